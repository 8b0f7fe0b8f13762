"""The recipe on this GPU: what works, what it costs beside a bare step, and whether the GPU ever stands idle.

Commands run as a user types them, in processes of their own; `strict_step` and `idle` look inside one run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "training.compile=false"  # unless a part asks for it: every process would make its graphs
TINY = [
    PLAIN,
    "training.max_steps=8",
    "training.log_every_steps=1",
    "checkpoint.every_steps=4",
    "checkpoint.export_hf=false",
]
# multiples of 16 in every dim, for fp8; a vocabulary that the built-in tokenizer has
SMALL = [
    "model.config.hidden_size=256",
    "model.config.intermediate_size=512",
    "packed_sequence.packed_sequence_size=512",
]
SHAPE_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": "true",
    "max_position_embeddings": 131072,
}
SHAPE_TINY = SHAPE_1B | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 2048,
}


def command(recipe: str, *arguments: str) -> tuple[int, str]:
    """Exit code and screen of `python recipes/<recipe>.py ...`."""
    done = subprocess.run(
        [sys.executable, f"recipes/{recipe}.py", *arguments],
        cwd=ROOT,
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
            "train_ft", "--config-name", "llama_packed", f"output_dir={folder}/run", f"training.max_steps={steps}"
        )
        answers = next((line for line in screen.splitlines() if line.startswith("held-out questions")), "")
    if code or (steps == 200 and "24 of 24" not in answers):
        return failed(screen)
    return {"verdict": "pass", "answers": answers}


def verify(device: str) -> dict[str, Any]:
    """`recipes/verify.py`: packing and padding, gradients, on this device."""
    code, screen = command("verify", "--config-name", "smoke")
    return failed(screen) if code else {"verdict": "pass", "screen": screen.splitlines()[-3:]}


def feature(device: str, overrides: list[str]) -> dict[str, Any]:
    """Eight steps, stopped after four and continued from the checkpoint: the same losses as in one go."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = TINY if "training.compile=true" not in overrides else TINY[1:]
        shared = ["--config-name", "smoke", *tiny, *SMALL, *overrides, f"cache_dir={folder}/cache"]
        code, screen = command("train_ft", *shared, f"output_dir={folder}/whole")
        if code:
            return failed(screen)
        whole = losses(Path(folder, "whole"))
        newest = Path(folder, "whole", "checkpoints", "step_00000008")
        if not newest.is_dir():
            return failed(screen)
        for path in newest.rglob("*"):  # as if the run had ended after its first checkpoint
            if path.is_file():
                path.unlink()
        shortened = Path(folder, "whole", "STATUS.json")
        shortened.unlink(missing_ok=True)
        code, screen = command("train_ft", *shared, f"output_dir={folder}/whole", "checkpoint.accept_changes=true")
        again = losses(Path(folder, "whole"))
    if code or "step_00000004" not in screen:
        return failed(screen)
    worst = max(abs(again[step] - whole[step]) / abs(whole[step]) for step in whole)
    # FlashAttention adds up gradients in any order
    return {"verdict": "pass" if worst < 0.02 else "FAIL", "resumed_off_by": worst, "loss": [whole[1], whole[8]]}


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


# -------------------------------------------------------------------------------------------------- inside of one run
def write_documents(path: Path, num_documents: int, longest: int) -> None:
    """Texts of so many words as the chats of `steps.lengths` have tokens; each word becomes about one token."""
    from benchmarks.gpu.steps import lengths

    rng = np.random.default_rng(0)
    words = np.array([f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ru", "sa", "to") for b in range(100)])
    source = lengths("chat", longest - 64)
    with path.open("w") as file:
        for _ in range(num_documents):
            file.write(json.dumps({"text": " ".join(rng.choice(words, next(source)))}) + "\n")


def config_of(folder: str, shape: dict[str, Any], pack: int, steps: int, overrides: list[str]) -> Any:
    """The preset `finetune` on a model from scratch."""
    from automodel_lite.cli import compose_config
    from automodel_lite.config.check import check_config

    data = Path(folder, "documents.jsonl")
    write_documents(data, max(200, steps * pack // 300), pack)
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
                *(f"model.config.{key}={value}" for key, value in shape.items() if key != "model_type"),
                f"packed_sequence.packed_sequence_size={pack}",
                "training.global_batch_size=1",
                "training.num_epochs=null",
                f"training.max_steps={steps}",
                "checkpoint.every_steps=0",
                "checkpoint.export_hf=false",
                "report=false",
                *([] if any(text.startswith("training.compile") for text in overrides) else [PLAIN]),
                *overrides,
            ],
        )
    )


def rate(device: str, is_tiny: bool = False, overrides: list[str] | None = None) -> dict[str, Any]:
    """Tokens per second of the recipe as shipped, by its own metrics after the warm-up: beside the bare step, its tax."""
    from recipes import train_ft

    shape, pack, steps = (SHAPE_TINY, 256, 8) if is_tiny else (SHAPE_1B, 8192, 48)
    every = max(2, steps // 6)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"training.log_every_steps={every}", *(overrides or [])]
        config = config_of(folder, shape, pack, steps, options)
        if train_ft.main(config):
            return {"verdict": "FAIL"}
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row and row["step"] > 2 * every]
    rates = [row["tokens_per_s"] for row in rows]
    median = statistics.median(rates)
    found = {"verdict": "pass", "tokens_per_s": median, "spread_frac": (max(rates) - min(rates)) / median}
    found |= {"mfu_frac": rows[-1].get("mfu_frac"), "tflops_per_s": rows[-1]["tflops_per_s"]}
    return found | {"peak_gib": rows[-1]["memory_gib"], "data_wait_s": rows[-1]["data_wait_s"]}


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

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(folder, SHAPE_TINY, 512, 8, ["training.log_every_steps=8"])
        return {"verdict": "FAIL" if train_ft.main(config) else "pass"}


def idle(device: str, is_tiny: bool = False) -> dict[str, Any]:
    """The share of the time between the first and the last kernel in which the GPU ran none, over 6 steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from recipes import train_ft

    real, profiler = train_ft.TrainFinetuneRecipe.step, profile(activities=[ProfilerActivity.CUDA])
    first = 10 if not is_tiny else 3

    def step(recipe: Any, ready: Any) -> Any:
        if device == "cuda" and recipe.num_steps == first:
            torch.cuda.synchronize()
            profiler.start()
        result = real(recipe, ready)
        if device == "cuda" and recipe.num_steps == first + 5:
            torch.cuda.synchronize()
            profiler.stop()
        return result

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    shape, pack = (SHAPE_TINY, 256) if is_tiny else (SHAPE_1B, 8192)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(folder, shape, pack, first + 8, ["training.log_every_steps=1000"])
        if train_ft.main(config):
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


def trl(device: str, is_tiny: bool = False) -> dict[str, Any]:
    """TRL's SFTTrainer, packed, on the same model and lengths; SDPA, as without flash-attn."""
    import time

    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from benchmarks.gpu.steps import lengths

    shape, pack, steps = (SHAPE_TINY, 256, 4) if is_tiny else (SHAPE_1B, 8192, 24)
    source = lengths("chat", pack)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, shape["vocab_size"], next(source)) for _ in range(steps * pack // 200)]
    config = LlamaConfig(**{k: v for k, v in shape.items() if k != "model_type"} | {"tie_word_embeddings": True})
    marks: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=steps,
            learning_rate=1e-5,
            packing=True,
            max_length=pack,
            bf16=device == "cuda",
            use_cpu=device != "cuda",
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
            optim="adamw_torch_fused",
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))  # TRL wants a tokenizer; the data has ids
        trainer = SFTTrainer(
            model=model,
            args=settings,
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>"),
            train_dataset=Dataset.from_dict({"input_ids": [row.tolist() for row in rows]}),
            callbacks=[Clock()],
        )
        trainer.train()
    half = len(marks) // 2  # the first half warms up
    seconds = marks[-1] - marks[half - 1]
    return {"verdict": "pass", "tokens_per_s": (len(marks) - half) * pack / seconds, "slots": True}
