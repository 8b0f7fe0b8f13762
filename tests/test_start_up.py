"""What starting costs: CPU seconds until `--help` and `--cfg` have answered, and which packages are imported."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

NOT_IMPORTED = "datasets peft wandb mlflow trackio tensorboard matplotlib liger_kernel torchao bitsandbytes flash_attn transformer_engine"

ENVIRONMENT = os.environ | {"PYTHONPATH": os.getcwd()}


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--config-name", "llama_packed", "--cfg", "job"]], ids=["help", "cfg"]
)
def test_questions_are_answered_without_torch(arguments: list[str]) -> None:
    assert cpu_seconds("recipes/train_ft.py", *arguments) <= 0.6  # torch alone takes 1.3


def test_recipe_imports_nothing_that_only_some_configs_use() -> None:
    check = f"import sys, recipes.train_ft; print(*[n for n in '{NOT_IMPORTED}'.split() if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.split() == []
