from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from automodel_lite.cli.hydra_app import run_command_line
from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli.sweep import results_of, table
from tests.forked import warm_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ("optimizer.lr=0.003,seed=1", "3_optimizer.lr-0.003-seed-1"),
        ("dataset.path=/data/a b.jsonl", "3_dataset.path-data-a-b.jsonl"),
        ("+x=1,+y=a/b", "3_x-1-y-a-b"),
        ("", "3_"),
        ("x=" + "long" * 100, "3_x-" + "long" * 29 + "lo"),
    ],
)
def test_the_folder_of_a_job_names_what_varies(overrides: str, folder: str):
    job = {"num": 3, "override_dirname": overrides}
    config = OmegaConf.create(
        {"job": job, "folder": "${job.num}_${file_name:${job.override_dirname}}"}
    )
    assert config.folder == folder


def test_table_marks_the_best():
    results = [
        {"job": 0, "settings": "seed=0", "state": "finished", "val_loss": 2.0},
        {"job": 1, "settings": "seed=1", "state": "failed"},
        {"job": 2, "settings": "seed=2", "state": "finished", "val_loss": 1.5},
    ]
    assert table(results).splitlines() == [
        "| | settings | state | val_loss |",
        "|---|---|---|---|",
        "| 0 | seed=0 | finished | 2.0000 |",
        "| 1 | seed=1 | failed |  |",
        "| 2 * | seed=2 | finished | 1.5000 |",
        "",
        "marked *: the lowest val_loss",
    ]


def test_val_loss_is_the_mean_of_the_last_of_all_sets(tmp_path: Path):
    assert results_of(tmp_path) == {}  # of a recipe that trains nothing
    rows = [
        {"step": 1, "val_loss/a": 4.0},
        {"step": 2, "loss": 3.0},
        {"step": 2, "val_loss/a": 2.0, "val_loss/b": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    last = {"step": 2, "loss": 3.0, "val_loss/a": 2.0, "val_loss/b": 1.0}
    assert results_of(tmp_path) == last | {"val_loss": 1.5}


def test_the_folder_of_a_run_is_not_a_sweeps(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("name: x\n")
    done = sweep(tmp_path, [], "seed=0,1")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == f"{tmp_path} is the folder of a run: give the sweep another name=... ."
    )


def sweep(
    folder: Path, flags: list[str], *overrides: str, python: str | None = None
) -> subprocess.CompletedProcess[str]:
    options = [*flags, "--config-name", "smoke", f"output_dir={folder}", "--multirun", *overrides]
    command = [python or warm_python(), "recipes/train_ft.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.system
def test_a_failed_job_does_not_stop_the_rest(tmp_path: Path):
    done = sweep(tmp_path / "s", [], "optimizer.lr=fast,1e-3", "training.max_steps=1")
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1] == f"1 of 2 jobs failed: 0_optimizer.lr-fast in {tmp_path}/s"
    )
    assert "optimizer.lr=fast must be a number or auto." in done.stderr
    states = [
        (job["settings"], job["state"])
        for job in json.loads((tmp_path / "s/sweep.json").read_text())
    ]
    assert states == [("optimizer.lr=fast", "failed"), ("optimizer.lr=0.001", "finished")]


@pytest.mark.slow
def test_each_job_has_ranks_of_its_own(tmp_path: Path):
    sizes = "packed_sequence.packed_sequence_size=63,64"
    done = sweep(
        tmp_path / "s", ["--nproc", "2"], sizes, "mesh.cp=2", "training.max_steps=1", "seed=0,1"
    )
    states = [job["state"] for job in json.loads((tmp_path / "s/sweep.json").read_text())]
    assert states == ["failed", "failed", "finished", "finished"]
    assert "2 of 4 jobs failed" in done.stderr


def test_a_sweep_is_refused_in_several_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 processes would each do all of this work"):
        run_command_line(
            "recipes.train_ft:main", ["--config-name", "smoke", "--multirun", "seed=0,1"]
        )


def test_a_job_of_a_sweep_runs_on_one_node(tmp_path: Path):
    nodes = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2"]
    done = sweep(tmp_path / "s", [], *nodes, "seed=0,1")
    assert (
        done.returncode,
        "hydra.launcher.nodes and tasks_per_node must be 1" in done.stderr,
    ) == (2, True)


ONE_STEP = ["training.max_steps=1", "report=false", "checkpoint.export_hf=false"]


ENGINES = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1"],
    "submitit_local": ["hydra/launcher=submitit_local", "seed=0,1"],
    "optuna": [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
        "seed=range(0,5)",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_of_hydra(engine: str, tmp_path: Path):
    # submitit's local launcher makes a job's folder while the job's interpreter starts
    python = sys.executable if engine == "submitit_local" else None
    done = sweep(tmp_path / "s", [], *ENGINES[engine], *ONE_STEP, python=python)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "s/sweep.json").read_text())
    assert [(row["job"], row["state"]) for row in results] == [(0, "finished"), (1, "finished")]
    assert "Traceback" not in done.stderr
    assert "leaked" not in done.stderr
    for facts in (tmp_path / "s").glob("*/run.json"):
        # not that of a worker
        assert ENGINES[engine][0] in json.loads(facts.read_text())["command"]
    if engine == "optuna":
        best = OmegaConf.load(tmp_path / "s/optimization_results.yaml")
        assert best.best_value == min(row["val_loss"] for row in results)


@pytest.mark.slow
def test_optuna_chooses_the_same_points_again(tmp_path: Path):
    points = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    line = [*points, "optimizer.lr=tag(log,interval(1e-4,1e-2))", *ONE_STEP]
    for _ in range(2):
        done = sweep(tmp_path / "s", ["--nproc", "2"], *line)
        assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("nothing to do") == 2  # the same command again: nothing is left
    assert len(json.loads((tmp_path / "s/sweep.json").read_text())) == 2
