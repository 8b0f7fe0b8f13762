"""The recipe on this GPU: what works, what it costs beside a bare step, and whether the GPU ever stands idle.

The built-in job runs as a user types it; the others run in this process, one after another. `strict_step` and `idle`
look inside a run.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.models.source import model_class
from benchmarks.gpu.documents import SEED, lengths
from benchmarks.gpu.machine import check_computes
from benchmarks.gpu.variant import SHAPES
from benchmarks.gpu.workers import ROOT, environment
from recipes import train_ft

PLAIN = "training.compile=false"  # unless a part asks for it: every process would make its graphs
# multiples of 16 in every dim, for fp8; a vocabulary that the built-in tokenizer has
SMALL = """
    training.max_steps=8 training.log_every_steps=1 checkpoint.every_steps=4
    checkpoint.export_hf=false model.config.hidden_size=256 model.config.intermediate_size=512
    packed_sequence.packed_sequence_size=512
""".split()  # noqa: SIM905
SAVES = "checkpoint.every_steps=2 checkpoint.keep_last=1 training.activation_checkpointing=full"


def failed(screen: str) -> dict[str, Any]:
    return {"verdict": "FAIL", "why": " | ".join(screen.strip().splitlines()[-6:])[-1200:]}


def built_in_job(device: str, steps: int = 200) -> dict[str, Any]:
    """`llama_packed` from the data to held-out questions: 24 of 24."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "recipes/train_ft.py", "--config-name", "llama_packed"]
        done = subprocess.run(
            [*command, f"output_dir={folder}/run", f"training.max_steps={steps}"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith("held-out questions")]
    if answers:
        check_computes(device)
    if done.returncode or (steps == 200 and "24 of 24" not in "".join(answers)):
        return failed(done.stdout)
    return {"verdict": "pass", "answers": "".join(answers[:1])}


def job(recipe: str, config: Any) -> tuple[int, str]:
    """Exit code and screen of a recipe in this process."""
    screen = io.StringIO()
    with redirect_stdout(screen):
        code = import_module(f"recipes.{recipe}").main(config)
    return int(code or 0), screen.getvalue()


def config(preset: str, folder: str, *overrides: str) -> Any:
    """The checked configuration of a preset, whose run and caches are in `folder`."""
    where = [f"output_dir={folder}/run", f"cache_dir={folder}/cache"]
    is_plain = not any(text.startswith("training.compile") for text in overrides)
    return check_config(compose_config(preset, [*where, *[PLAIN][:is_plain], *overrides]))


def verify(device: str) -> dict[str, Any]:
    """`recipes/verify.py`: packing and padding, gradients, on this device."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            code, screen = job("verify", config("smoke", folder))
        except ZeroDivisionError:  # the first of its rows compares with a loss of 0
            check_computes(device)
            raise
    return failed(screen) if code else {"verdict": "pass", "screen": screen.splitlines()[-3:]}


def feature(device: str, overrides: list[str]) -> dict[str, Any]:
    """Eight steps or more, stopped after some and continued from the checkpoint: the same losses as in one go."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        code, screen = job("train_ft", config("smoke", folder, *SMALL, *overrides))
        saved = sorted((run / "checkpoints").glob("step_*")) if not code else []
        if len(saved) < 2:
            return failed(screen)
        whole = losses(run)
        shutil.rmtree(saved[-1])  # as if the run had ended after an earlier checkpoint
        (run / "STATUS.json").unlink(missing_ok=True)
        again = [*SMALL, *overrides, "checkpoint.accept_changes=true"]
        code, screen = job("train_ft", config("smoke", folder, *again))
        resumed = losses(run)
    if code or f"continues from {saved[-2].name}" not in screen:
        return failed(screen)
    check_computes(device)
    worst = max(abs(resumed[step] - whole[step]) / abs(whole[step]) for step in whole)
    # FlashAttention adds up gradients in any order
    verdict = "pass" if worst < 0.02 else "FAIL"
    return {"verdict": verdict, "resumed_off_by": worst, "loss": [whole[1], whole[8]]}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What a run has written of its steps."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows_of(folder)}


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


def config_of(folder: str, shape: str, steps: int, *overrides: str, pack: int = 0) -> Any:
    """The preset `finetune` on a model from scratch."""
    pack = pack or (256 if shape == "tiny" else 8192)
    data = Path(folder, "documents.jsonl")
    write_documents(data, max(200, steps * pack // 300), pack)
    settings = {"max_position_embeddings": 131072} | SHAPES[shape]
    model = ["model=llama_smoke"]
    model += [f"model.config.{key}={str(value).lower()}" for key, value in settings.items()]
    if has_adapter(overrides):  # which needs a model that is there
        model = [f"model.pretrained={hollow_checkpoint(Path(folder, 'model'), settings)}"]
    run = f"""
        name=gpu_check dataset.path={data} tokenizer=bpe tokenizer.vocab_size=1500
        tokenize.train_on=all packed_sequence.packed_sequence_size={pack}
        training.global_batch_size=1 training.num_epochs=null training.max_steps={steps}
        checkpoint.every_steps=0 checkpoint.export_hf=false report=false
    """
    return config("finetune", folder, *run.split(), *model, *overrides)


def has_adapter(overrides: Sequence[str]) -> bool:
    return any(text.startswith("peft=") for text in overrides)


def hollow_checkpoint(folder: Path, settings: dict[str, Any]) -> Path:
    """A model in bf16 as `from_pretrained` reads it, whose layers' matrices are zeros: of 16 GB of an 8B model, 14 are a
    hole in the file. Embedding, head and norms are drawn, so that the checks of the start see logits.
    """
    config = AutoConfig.for_model(**{"model_type": "llama"} | settings)
    config.architectures = [model_class(config).__name__]
    config.save_pretrained(folder)
    with torch.device("meta"):
        lm = model_class(config).from_config(config, dtype=torch.bfloat16)
    weights = dict(lm.named_parameters())  # tied ones once
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        begin, end = end, end + weight.nbytes
        header[name] = {"dtype": "BF16", "shape": [*weight.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    torch.manual_seed(SEED)
    block = (0.02 * torch.randn(2**20)).bfloat16().view(torch.uint8).numpy().tobytes()
    ones = torch.ones(config.hidden_size, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, weight in weights.items():
            if weight.ndim > 1 and ".layers." in name:
                continue
            pattern = ones if weight.ndim == 1 else block
            file.seek(first + header[name]["data_offsets"][0])
            for begin in range(0, weight.nbytes, len(pattern)):
                file.write(pattern[: weight.nbytes - begin])
        file.truncate(first + end)
    return folder


def measured(settings: Any) -> int:
    """Trains as the recipe does, and saves nothing: the last step of an 8B model would be 96 GB."""

    class Measured(train_ft.TrainFinetuneRecipe):
        def setup(self) -> None:
            """Draws a base of zeros: products of them take less power, and are faster than any."""
            super().setup()
            with torch.no_grad():
                for weight in self.engine.model.parameters():
                    if weight.ndim > 1 and not weight.requires_grad:
                        weight.normal_(std=0.02)

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

    return Measured.launch(settings)


def rate(
    device: str, shape: str = "1b", overrides: list[str] | None = None, steps: int = 48
) -> dict[str, Any]:
    """Tokens per second of the recipe as shipped, by its own metrics after the warm-up: beside the bare step, its tax."""
    every = max(2, steps // 6)
    with tempfile.TemporaryDirectory() as folder:
        logs = f"training.log_every_steps={every}"
        if measured(config_of(folder, shape, steps, logs, *(overrides or []))):
            return {"verdict": "FAIL"}
        rows = [row for row in rows_of(Path(folder, "run")) if row["step"] > 2 * every]
    rates = [row["tokens_per_s"] for row in rows]
    found = {"verdict": "pass", "tokens_per_s": statistics.median(rates)}
    found["spread_frac"] = (max(rates) - min(rates)) / found["tokens_per_s"]
    last = rows[-1]
    found |= {"mfu_frac": last.get("mfu_frac"), "tflops_per_s": last["tflops_per_s"]}
    return found | {"peak_gib": last["memory_gib"], "data_wait_s": last["data_wait_s"]}


def save_and_resume(device: str, shape: str) -> dict[str, Any]:
    """Two steps, saved, and two more by another start: seconds of each, and the size of a checkpoint and how fast it
    is written (1B: 15 GB, which the disk of a lent machine holds twice).
    """
    # two checkpoints of weights and moments in fp32
    needed = 2.2 * 12 * 1.24e9 if shape == "1b" else 0.0
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < needed:
            why = f"needs {needed / 1e9:.0f} GB of disk in {Path(folder).parent}"
            return {"verdict": "missing", "why": why}
        took_s, saving_s = [], []
        for steps in (2, 4):
            began = time.perf_counter()
            again = ["checkpoint.accept_changes=true"][: steps > 2]
            code, screen = job("train_ft", config_of(folder, shape, steps, *SAVES.split(), *again))
            if code or (again and "continues from step_00000002" not in screen):
                return failed(screen)
            took_s.append(time.perf_counter() - began)
            saving_s += map(float, re.findall(r"saved step_\d+ \(.+?, (.+?) s\)", screen))
            saved = Path(folder, "run", "checkpoints", f"step_{steps:08d}")
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    found = {"verdict": "pass", "gb": size / 1e9, "first_s": took_s[0], "resumed_s": took_s[1]}
    return found | {"saving_s": saving_s}


@contextmanager
def _around_steps(around: Callable[[int], AbstractContextManager[Any]]) -> Iterator[None]:
    """Each step of the recipe, by its number, is inside of `around`; other parts of this process get the real one again."""
    real = train_ft.TrainFinetuneRecipe.step

    def step(recipe: Any, ready: Any) -> Any:
        with around(recipe.num_steps):
            return real(recipe, ready)

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        train_ft.TrainFinetuneRecipe.step = real  # type: ignore[method-assign]


def strict_step(device: str) -> dict[str, Any]:
    """Steps under torch's own guard: any wait of the host for the GPU is an error."""

    @contextmanager
    def guard(number: int) -> Iterator[None]:
        is_strict = device == "cuda" and number >= 3  # the first ones compile and warm up
        if is_strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if is_strict:
                torch.cuda.set_sync_debug_mode("default")

    with tempfile.TemporaryDirectory() as folder, _around_steps(guard):
        settings = config_of(folder, "tiny", 8, "training.log_every_steps=8", pack=512)
        code, screen = job("train_ft", settings)
    return failed(screen) if code else {"verdict": "pass"}


def idle(device: str, shape: str = "1b") -> dict[str, Any]:
    """The share of the time between the first and the last kernel in which the GPU ran none, over 6 steps."""
    profiler = profile(activities=[ProfilerActivity.CUDA])
    first = 10 if shape != "tiny" else 3

    @contextmanager
    def watch(number: int) -> Iterator[None]:
        if device == "cuda" and number == first:
            torch.cuda.synchronize()
            profiler.start()
        yield
        if device == "cuda" and number == first + 5:
            torch.cuda.synchronize()
            profiler.stop()

    with tempfile.TemporaryDirectory() as folder, _around_steps(watch):
        if measured(config_of(folder, shape, first + 8, "training.log_every_steps=1000")):
            return {"verdict": "FAIL"}
    if device != "cuda":
        return {"verdict": "pass", "idle_frac": None}
    check_computes(device)
    return {"verdict": "pass", "idle_frac": idle_frac(kernel_spans(profiler.events()))}


def kernel_spans(events: Any) -> list[tuple[float, float]]:
    """Of what ran on the GPU, by start: launches by the host are events of this activity too."""
    on_gpu = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return sorted((event.time_range.start, event.time_range.end) for event in on_gpu)


def idle_frac(spans: list[tuple[float, float]]) -> float:
    """Of spans sorted by their start: the uncovered share between the first start and the last end."""
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])
