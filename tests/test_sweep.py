import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.sweep import expand, run_sweep, table

ROOT = Path(__file__).resolve().parent.parent


def test_every_combination_the_last_override_fastest():
    jobs = expand(["optimizer.lr=1e-3,3e-3", "training.max_steps=4", "seed=range(0,2)"])
    assert [job.overrides for job in jobs] == [
        ["optimizer.lr=0.001", "training.max_steps=4", "seed=0"],
        ["optimizer.lr=0.001", "training.max_steps=4", "seed=1"],
        ["optimizer.lr=0.003", "training.max_steps=4", "seed=0"],
        ["optimizer.lr=0.003", "training.max_steps=4", "seed=1"],
    ]
    assert [job.folder_name for job in jobs] == [
        "0_lr-0.001_seed-0",
        "1_lr-0.001_seed-1",
        "2_lr-0.003_seed-0",
        "3_lr-0.003_seed-1",
    ]
    assert jobs[3].label == "optimizer.lr=0.003, seed=1"


def test_a_list_is_one_value_and_nothing_to_vary_is_one_job():
    (job,) = expand(["logger=[tensorboard,wandb]"])
    assert (job.overrides, job.folder_name, job.label) == (["logger=[tensorboard,wandb]"], "0", "as given")
    with pytest.raises(ConfigError, match="cannot be read as key=value"):
        expand(["seed=[1"])


def test_table_marks_the_best():
    results = [
        {"job": 0, "settings": "seed=0", "state": "finished", "val_loss/a": 2.0},
        {"job": 1, "settings": "seed=1", "state": "failed"},
        {"job": 2, "settings": "seed=2", "state": "finished", "val_loss/a": 1.5},
    ]
    assert table(results).splitlines() == [
        "| | settings | state | val_loss/a |",
        "|---|---|---|---|",
        "| 0 | seed=0 | finished | 2.0000 |",
        "| 1 | seed=1 | failed |  |",
        "| 2 * | seed=2 | finished | 1.5000 |",
        "",
        "\\* lowest val_loss/a",
    ]


def test_the_folder_of_a_run_is_no_sweeps(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(ConfigError, match="give the sweep another name"):
        run_sweep("recipes.train_ft:main", ["--config-name", "smoke"], [], tmp_path)


def sweep(folder: Path, launcher: list[str], *overrides: str) -> subprocess.CompletedProcess[str]:
    recipe = ["recipes/train_ft.py", "--config-name", "smoke", f"output_dir={folder}", "--multirun", *overrides]
    command, environment = [sys.executable, *launcher, *recipe], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_a_failed_job_does_not_stop_the_rest(tmp_path: Path):
    done = sweep(tmp_path / "s", [], "optimizer.lr=fast,1e-3", "training.max_steps=1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"1 of 2 jobs failed: 0_lr-fast in {tmp_path}/s"
    assert "optimizer.lr=fast must be a number." in done.stderr
    states = [(job["settings"], job["state"]) for job in json.loads((tmp_path / "s/sweep.json").read_text())]
    assert states == [("optimizer.lr=fast", "failed"), ("optimizer.lr=0.001", "finished")]


@pytest.mark.slow
def test_two_ranks_under_torchrun(tmp_path: Path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = "packed_sequence.packed_sequence_size=63,64"
    done = sweep(tmp_path / "s", launcher, sizes, "mesh.cp=2", "training.max_steps=1", "seed=0,1")
    states = [job["state"] for job in json.loads((tmp_path / "s/sweep.json").read_text())]
    assert states == ["failed", "failed", "finished", "finished"]
    assert "2 of 4 jobs failed" in done.stderr
