"""Jobs of the tests here: the recipe in processes of its own, with a hook at the start of every step."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

from tests.forked import warm_python
from tests.runs import QUICK

ROOT = Path(__file__).resolve().parents[2]


def launch(folder: Path, hook: str, *overrides: str, world_size: int = 2) -> subprocess.Popen[str]:
    """The recipe under torchrun, or in a process of its own without a launcher; `hook` is Python that runs at the start
    of every step, with `recipe` and `rank`.
    """
    script = folder / "hooked.py"
    script.write_text(
        "import os, signal, sys, time, torch\n"
        "from recipes import train_ft\n"
        "from automodel_lite.cli import run_recipe\n"
        "from automodel_lite.run.stopping import SIGNALS\n"
        "real = train_ft.TrainFinetuneRecipe.step\n"
        "def step(recipe, *args):\n"
        "    rank = int(os.environ.get('RANK', '0'))\n"
        f"    {hook}\n"
        "    return real(recipe, *args)\n"
        "train_ft.TrainFinetuneRecipe.step = step\n"
        "run_recipe('recipes.train_ft:main')\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # torch 2.11 has none, and waits for half a minute
    if "--shutdown-timeout" in get_args_parser().format_help():
        torchrun.append("--shutdown-timeout=2")
    settings = ["--config-name", "smoke", f"output_dir={folder}/run", *QUICK]
    settings += (
        ["training.max_steps=100000", "training.log_every_steps=1"] if world_size > 1 else []
    )
    return subprocess.Popen(
        [warm_python(), *(torchrun if world_size > 1 else []), str(script), *settings, *overrides],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> str:
    screen, _ = process.communicate(timeout=timeout_s)
    return screen


def status_of(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((folder / "STATUS.json").read_text())
    return status
