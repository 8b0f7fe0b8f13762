"""The recipe on this GPU: what works, what it costs beside a bare step, and whether the GPU ever stands idle.

The built-in job runs as a user types it; the others run in this process, one after another. `strict_step` and `idle`
look inside a run.
"""

from __future__ import annotations

import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.documents import SEED, lengths
from benchmarks.gpu.steps import SHAPES
from benchmarks.gpu.workers import ROOT, environment

PLAIN = "training.compile=false"  # unless a part asks for it: every process would make its graphs
TINY = [
    PLAIN,
    "training.max_steps=8",
    "training.log_every_steps=1",
    "checkpoint.every_steps=4",
    "checkpoint.export_hf=false",
]
SAVES = [
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=1",
    "training.activation_checkpointing=full",
]
# multiples of 16 in every dim, for fp8; a vocabulary that the built-in tokenizer has
SMALL = [
    "model.config.hidden_size=256",
    "model.config.intermediate_size=512",
    "packed_sequence.packed_sequence_size=512",
]


def command(recipe: str, *arguments: str) -> tuple[int, str]:
    """Exit code and screen of `python recipes/<recipe>.py ...`."""
    done = subprocess.run(
        [sys.executable, f"recipes/{recipe}.py", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def failed(screen: str) -> dict[str, Any]:
    return {"verdict": "FAIL", "why": " | ".join(screen.strip().splitlines()[-6:])[-1200:]}


def built_in_job(device: str, steps: int = 200) -> dict[str, Any]:
    """`llama_packed` from the data to held-out questions: 24 of 24."""
    with tempfile.TemporaryDirectory() as folder:
        code, screen = command(
            "train_ft",
            "--config-name",
            "llama_packed",
            f"output_dir={folder}/run",
            f"training.max_steps={steps}",
        )
        answers = next(
            (line for line in screen.splitlines() if line.startswith("held-out questions")), ""
        )
    if code or (steps == 200 and "24 of 24" not in answers):
        return failed(screen)
    return {"verdict": "pass", "answers": answers}


def job(recipe: str, preset: str, *overrides: str) -> tuple[int, str]:
    """Exit code and screen of a recipe in this process."""
    from importlib import import_module

    from automodel_lite.cli import compose_config
    from automodel_lite.config.check import check_config

    screen = io.StringIO()
    with redirect_stdout(screen):
        code = import_module(f"recipes.{recipe}").main(
            check_config(compose_config(preset, [*overrides]))
        )
    return int(code or 0), screen.getvalue()


def verify(device: str) -> dict[str, Any]:
    """`recipes/verify.py`: packing and padding, gradients, on this device."""
    with tempfile.TemporaryDirectory() as folder:
        code, screen = job(
            "verify", "smoke", f"output_dir={folder}/run", f"cache_dir={folder}/cache"
        )
    return failed(screen) if code else {"verdict": "pass", "screen": screen.splitlines()[-3:]}


def feature(device: str, overrides: list[str]) -> dict[str, Any]:
    """Eight steps or more, stopped after some and continued from the checkpoint: the same losses as in one go."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = TINY if "training.compile=true" not in overrides else TINY[1:]
        run = Path(folder, "run")
        shared = [*tiny, *SMALL, *overrides, f"cache_dir={folder}/cache", f"output_dir={run}"]
        code, screen = job("train_ft", "smoke", *shared)
        saved = sorted((run / "checkpoints").glob("step_*")) if not code else []
        if len(saved) < 2:
            return failed(screen)
        whole = losses(run)
        shutil.rmtree(saved[-1])  # as if the run had ended after an earlier checkpoint
        (run / "STATUS.json").unlink(missing_ok=True)
        code, screen = job("train_ft", "smoke", *shared, "checkpoint.accept_changes=true")
        again = losses(run)
    if code or f"continues from {saved[-2].name}" not in screen:
        return failed(screen)
    worst = max(abs(again[step] - whole[step]) / abs(whole[step]) for step in whole)
    # FlashAttention adds up gradients in any order
    return {
        "verdict": "pass" if worst < 0.02 else "FAIL",
        "resumed_off_by": worst,
        "loss": [whole[1], whole[8]],
    }


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


# -------------------------------------------------------------------------------------------------- inside of one run
def write_documents(path: Path, num_documents: int, longest: int) -> None:
    """Texts of so many words as the chats of `steps.lengths` have tokens; each word becomes about one token."""
    rng = np.random.default_rng(SEED)
    words = np.array(
        [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ru", "sa", "to") for b in range(100)]
    )
    source = lengths("chat", longest - 64)
    with path.open("w") as file:
        for _ in range(num_documents):
            file.write(json.dumps({"text": " ".join(rng.choice(words, next(source)))}) + "\n")


def config_of(folder: str, shape: str, pack: int, steps: int, overrides: list[str]) -> Any:
    """The preset `finetune` on a model from scratch."""
    from automodel_lite.cli import compose_config
    from automodel_lite.config.check import check_config

    data = Path(folder, "documents.jsonl")
    write_documents(data, max(200, steps * pack // 300), pack)
    settings = {"max_position_embeddings": 131072} | SHAPES[shape]
    return check_config(
        compose_config(
            "finetune",
            [
                "name=gpu_check",
                f"output_dir={folder}/run",
                f"cache_dir={folder}/cache",
                f"dataset.path={data}",
                "tokenizer=bpe",
                "tokenizer.vocab_size=1500",
                "tokenize.train_on=all",
                "model=llama_smoke",
                *(f"model.config.{key}={str(value).lower()}" for key, value in settings.items()),
                f"packed_sequence.packed_sequence_size={pack}",
                "training.global_batch_size=1",
                "training.num_epochs=null",
                f"training.max_steps={steps}",
                "checkpoint.every_steps=0",
                "checkpoint.export_hf=false",
                "report=false",
                *(
                    []
                    if any(text.startswith("training.compile") for text in overrides)
                    else [PLAIN]
                ),
                *overrides,
            ],
        )
    )


def measured(config: Any) -> int:
    """Trains as the recipe does, and saves nothing: the last step of an 8B model would be 96 GB."""
    from recipes.train_ft import TrainFinetuneRecipe

    class Measured(TrainFinetuneRecipe):
        def save(self, wait: bool = False) -> None:
            pass

        def end(self) -> int:
            self.meter.close()
            self.bar.close()
            self.guards.close()
            del self.feed
            self.metrics.close()
            self.mesh.close()
            return 0

    return Measured.launch(config)


def rate(
    device: str, shape: str = "1b", overrides: list[str] | None = None, steps: int = 48
) -> dict[str, Any]:
    """Tokens per second of the recipe as shipped, by its own metrics after the warm-up: beside the bare step, its tax."""
    every = max(2, steps // 6)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"training.log_every_steps={every}", *(overrides or [])]
        config = config_of(folder, shape, 256 if shape == "tiny" else 8192, steps, options)
        if measured(config):
            return {"verdict": "FAIL"}
        rows = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    rows = [row for row in rows if "loss" in row and row["step"] > 2 * every]
    rates = [row["tokens_per_s"] for row in rows]
    median = statistics.median(rates)
    found = {
        "verdict": "pass",
        "tokens_per_s": median,
        "spread_frac": (max(rates) - min(rates)) / median,
    }
    found |= {"mfu_frac": rows[-1].get("mfu_frac"), "tflops_per_s": rows[-1]["tflops_per_s"]}
    return found | {"peak_gib": rows[-1]["memory_gib"], "data_wait_s": rows[-1]["data_wait_s"]}


def save_and_resume(device: str, shape: str) -> dict[str, Any]:
    """Two steps, saved, and two more by another start: seconds of each, and the size of a checkpoint and how fast it
    is written (1B: 15 GB, which the disk of a lent machine holds twice).
    """
    from recipes import train_ft

    # two checkpoints of weights and moments in fp32
    needed = 2.2 * 12 * 1.24e9 if shape == "1b" else 0.0
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < needed:
            return {
                "verdict": "missing",
                "why": f"needs {needed / 1e9:.0f} GB of disk in {Path(folder).parent}",
            }
        config = config_of(folder, shape, 256 if shape == "tiny" else 8192, 2, [*SAVES])
        began = time.perf_counter()
        if train_ft.main(config):
            return {"verdict": "FAIL"}
        first_s, began = time.perf_counter() - began, time.perf_counter()
        saved = Path(folder, "run", "checkpoints", "step_00000002")
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        again = config_of(
            folder,
            shape,
            256 if shape == "tiny" else 8192,
            4,
            [*SAVES, "checkpoint.accept_changes=true"],
        )
        screen = io.StringIO()
        with redirect_stdout(screen):
            code = train_ft.main(again)
        if code or "continues from step_00000002" not in screen.getvalue():
            return failed(screen.getvalue())
        second_s = time.perf_counter() - began
        rows = [
            json.loads(text) for text in Path(folder, "run/metrics.jsonl").read_text().splitlines()
        ]
    saving_s = [row["checkpoint_s"] for row in rows if row.get("checkpoint_s")]
    found = {"verdict": "pass", "gb": size / 1e9, "first_s": first_s, "resumed_s": second_s}
    return found | {"saving_s": saving_s}


def strict_step(device: str) -> dict[str, Any]:
    """Steps under torch's own guard: any wait of the host for the GPU is an error."""
    import torch

    from recipes import train_ft

    real = train_ft.TrainFinetuneRecipe.step

    def step(recipe: Any, ready: Any) -> Any:
        if device != "cuda" or recipe.num_steps < 3:  # the first ones compile and warm up
            return real(recipe, ready)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(recipe, ready)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with tempfile.TemporaryDirectory() as folder, _stepping_by(step):
        config = config_of(folder, "tiny", 512, 8, ["training.log_every_steps=8"])
        return {"verdict": "FAIL" if train_ft.main(config) else "pass"}


@contextmanager
def _stepping_by(step: Any) -> Iterator[None]:
    """The recipe's step is `step`; other parts of this process get the real one again."""
    from recipes import train_ft

    real = train_ft.TrainFinetuneRecipe.step
    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        train_ft.TrainFinetuneRecipe.step = real  # type: ignore[method-assign]


def idle(device: str, shape: str = "1b") -> dict[str, Any]:
    """The share of the time between the first and the last kernel in which the GPU ran none, over 6 steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from recipes import train_ft

    real, profiler = train_ft.TrainFinetuneRecipe.step, profile(activities=[ProfilerActivity.CUDA])
    first = 10 if shape != "tiny" else 3

    def step(recipe: Any, ready: Any) -> Any:
        if device == "cuda" and recipe.num_steps == first:
            torch.cuda.synchronize()
            profiler.start()
        result = real(recipe, ready)
        if device == "cuda" and recipe.num_steps == first + 5:
            torch.cuda.synchronize()
            profiler.stop()
        return result

    with tempfile.TemporaryDirectory() as folder, _stepping_by(step):
        config = config_of(
            folder,
            shape,
            256 if shape == "tiny" else 8192,
            first + 8,
            ["training.log_every_steps=1000"],
        )
        if measured(config):
            return {"verdict": "FAIL"}
    if device != "cuda":
        return {"verdict": "pass", "idle_frac": None}
    return {"verdict": "pass", "idle_frac": idle_frac(kernel_spans(profiler.events()))}


def kernel_spans(events: Any) -> list[tuple[float, float]]:
    """Of what ran on the GPU, by start: launches by the host are events of this activity too."""
    from torch.autograd import DeviceType

    on_gpu = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return sorted((event.time_range.start, event.time_range.end) for event in on_gpu)


def idle_frac(spans: list[tuple[float, float]]) -> float:
    """Of spans sorted by their start: the uncovered share between the first start and the last end.

    >>> idle_frac([(0, 4), (2, 5), (6, 10)])
    0.1
    """
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])
