"""What starting costs: CPU seconds until `--help` and `--cfg` have answered, and which packages are imported."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ONLY_SOME_CONFIGS = (
    "datasets pandas peft wandb mlflow torch.utils.tensorboard matplotlib torchao bitsandbytes "
    "flash_attn transformer_engine sklearn torchvision automodel_lite.parts.kernels.varlen automodel_lite.parts.kernels.flex"
)
ONLY_MODELS = "transformers.modeling_utils transformers.masking_utils transformers.models torch._dynamo scipy accelerate"

ENVIRONMENT = os.environ | {"PYTHONPATH": os.getcwd()}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)  # a second start would compile everything again


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        pytest.param(["--config-name", "llama_packed", "--cfg", "job"], marks=pytest.mark.system),
    ],
    ids=["help", "cfg"],
)
def test_questions_are_answered_without_torch(arguments: list[str]) -> None:
    """Compared in turns: machines differ, and a busy neighbor of the core can double a single measurement."""
    pairs = (
        (cpu_seconds("recipes/train_ft.py", *arguments), cpu_seconds("-c", "import torch"))
        for _ in range(5)
    )
    assert any(ours <= 0.7 * torchs for ours, torchs in pairs)


def imported_by(*pieces: str) -> list[list[str]]:
    """What is imported, of all that not every run needs, when each of these pieces of code has run; one process."""
    names = f"{ONLY_SOME_CONFIGS} {ONLY_MODELS}".split()
    look = f"print('imported:', *[name for name in {names} if name in sys.modules])"
    code = "; ".join(["import sys", *(f"{piece}; {look}" for piece in pieces)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    return [line.removeprefix("imported:").split() for line in lines]


@pytest.mark.system
def test_imported_is_what_is_used(tmp_path: Path) -> None:
    """By the recipe itself neither models nor what only some configurations use; by a plain run no more than models."""
    overrides = [
        *(
            "name=plain",
            f"output_dir={tmp_path}/run",
            f"cache_dir={tmp_path}/cache",
            "dataset.num_chats=60",
        ),
        *(
            "training.max_steps=1",
            "training.num_epochs=null",
            "lr_scheduler.warmup_steps=0",
            "evaluation=none",
        ),
        *("checkpoint.export_hf=false", "report=false", "training.num_threads=1"),
    ]
    run = (
        "from automodel_lite.cli import Recipe, compose_config; from automodel_lite.config.check import check_config; "
        f"assert Recipe('recipes.train_ft:main').function()(check_config(compose_config('smoke', {overrides}))) == 0"
    )
    by_recipe, by_run = imported_by("import recipes.train_ft", run)
    assert by_recipe == []
    assert [name for name in by_run if name in ONLY_SOME_CONFIGS.split()] == []
    assert by_run  # of models: the second look came after the run
