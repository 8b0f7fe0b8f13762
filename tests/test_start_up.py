"""What starting costs: CPU seconds until `--help` and `--cfg` have answered, and which packages are imported."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_lite.interpreter import collecting_seldom

ONLY_SOME_CONFIGS = (
    "datasets pandas peft wandb mlflow trackio torch.utils.tensorboard matplotlib liger_kernel torchao bitsandbytes "
    "flash_attn transformer_engine sklearn torchvision automodel_lite.attention.varlen automodel_lite.attention.flex"
)
ONLY_MODELS = (
    "transformers.modeling_utils transformers.masking_utils transformers.models torch._dynamo scipy accelerate"
)

ENVIRONMENT = os.environ | {"PYTHONPATH": os.getcwd()}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)  # a second start would compile everything again


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--config-name", "llama_packed", "--cfg", "job"]], ids=["help", "cfg"]
)
def test_questions_are_answered_without_torch(arguments: list[str]) -> None:
    """Compared in turns: machines differ, and a busy neighbor of the core can double a single measurement."""
    pairs = ((cpu_seconds("recipes/train_ft.py", *arguments), cpu_seconds("-c", "import torch")) for _ in range(5))
    assert any(ours <= 0.7 * torchs for ours, torchs in pairs)


def imported_of(names: str, code: str) -> list[str]:
    """Those of `names` that are imported once `code` has run."""
    check = f"import sys; {code}; print('imported:', *[name for name in '{names}'.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return done.stdout.splitlines()[-1].removeprefix("imported:").split()


def test_recipe_imports_neither_models_nor_what_only_some_configs_use() -> None:
    assert imported_of(f"{ONLY_SOME_CONFIGS} {ONLY_MODELS}", "import recipes.train_ft") == []


def test_a_plain_run_imports_nothing_that_only_other_configs_use(tmp_path: Path) -> None:
    overrides = [
        *("name=plain", f"output_dir={tmp_path}/run", f"cache_dir={tmp_path}/cache", "dataset.num_chats=60"),
        *("training.max_steps=1", "training.num_epochs=null", "lr_scheduler.warmup_steps=0", "evaluation=none"),
        *("checkpoint.export_hf=false", "report=false", "training.num_threads=1"),
    ]
    run = (
        "from automodel_lite.cli import compose_config, imported; from automodel_lite.config.check import check_config; "
        f"assert imported('recipes.train_ft:main')(check_config(compose_config('llama_packed', {overrides}))) == 0"
    )
    assert imported_of(ONLY_SOME_CONFIGS, run) == []


def test_garbage_is_looked_for_as_often_as_before_once_all_is_imported() -> None:
    before = gc.get_threshold()
    with collecting_seldom():
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
