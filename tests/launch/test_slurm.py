"""The sbatch scripts on a real SLURM: two nodes, preempted, back in the queue, the same losses as never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import warm_python
from tests.launch import pyxis
from tests.launch.slurm_cluster import Cluster, missing
from tests.ranks import free_port
from tests.runs import QUICK, losses_by_step, train_on, wait_for_rows

ROOT = Path(__file__).resolve().parents[2]
STEPS = [*QUICK, "training.log_every_steps=1", "checkpoint.every_steps=50"]
WAIT_S = 240


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.up()
    yield cluster
    cluster.down()


HELD = """
import os, sys, time
if "--cfg" not in sys.argv and "SLURM_RESTART_COUNT" not in os.environ:
    from automodel_lite.run.stopping import SIGNALS
    from recipes import train_ft
    real = train_ft.TrainFinetuneRecipe.step
    def step(recipe, *given):
        while recipe.num_steps == 12 and not SIGNALS.received:
            time.sleep(0.05)
        return real(recipe, *given)
    train_ft.TrainFinetuneRecipe.step = step
from automodel_lite.cli import run_recipe
run_recipe("recipes.train_ft:main")
"""


def python_that_waits(folder: Path) -> str:
    """An interpreter whose first job stays before its step 13 until it gets a signal."""
    (folder / "held.py").write_text(HELD)
    python = folder / "python"
    python.write_text(f'#!/bin/bash\nexec {warm_python()} {folder}/held.py "${{@:2}}"\n')
    python.chmod(0o755)
    return str(python)


def submit(cluster: Cluster, script: str, folder: Path, *overrides: str, python: str = "") -> str:
    arguments = ["--config-name", "smoke", f"output_dir={folder}/run", *STEPS, *overrides]
    command = [
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--ntasks-per-node=1",
        f"--output={folder}/job.log",
        "--time=10",
    ]
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHON": python or warm_python(),
    }
    done = subprocess.run(
        [*command, f"launch/{script}", *arguments],
        cwd=ROOT,
        env=cluster.environment | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for_state(cluster: Cluster, job: str, folder: Path, *states: str) -> str:
    until = time.monotonic() + WAIT_S
    odd_since = None
    while time.monotonic() < until:
        state = cluster.state_of(job)
        if state in states:
            return state
        if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            odd_since = None
        else:  # a job on its way back into the queue passes through others
            odd_since = odd_since or time.monotonic()
            assert time.monotonic() - odd_since < 60, (
                f"{state}\n{(folder / 'job.log').read_text()[-3000:]}"
            )
        time.sleep(0.2)
    raise AssertionError(
        f"{job} is not {states}: {state}\n{(folder / 'job.log').read_text()[-3000:]}"
    )


def start_now(cluster: Cluster, job: str) -> None:
    """A requeued job waits for two minutes by itself; SLURM takes a start in its first second for the killed one."""
    time.sleep(3)
    for _ in range(100):
        if cluster.state_of(job) == "PENDING":
            cluster.call("scontrol", "update", f"job={job}", "StartTime=now")
            return
        time.sleep(0.2)


@pytest.mark.system
@pytest.mark.parametrize(
    ("script", "num_steps"),
    [
        ("slurm.sbatch", 30),
        pytest.param("slurm_torchrun.sbatch", 150, marks=pytest.mark.slow),
    ],
)
def test_stopped_requeued_and_finished(
    cluster: Cluster, tmp_path: Path, script: str, num_steps: int
) -> None:
    steps = [f"training.max_steps={num_steps}", f"checkpoint.every_steps={num_steps // 3}"]
    is_srun = script == "slurm.sbatch"  # the other starts torchrun, and does not wait for a signal
    python = python_that_waits(tmp_path) if is_srun else sys.executable
    job = submit(cluster, script, tmp_path, *steps, python=python)
    wait_for_rows(tmp_path / "run", 8, WAIT_S, tmp_path / "job.log")
    cluster.call("scancel", "--signal=TERM", job)  # what --signal=TERM@300 sends before the limit
    wait_for_state(cluster, job, tmp_path, "PENDING")
    status = json.loads((tmp_path / "run" / "STATUS.json").read_text())
    assert (status["state"], status["reason"]) == ("preempted", "SIGTERM")
    assert 8 <= status["step"] < num_steps
    start_now(cluster, job)
    wait_for_state(cluster, job, tmp_path, "COMPLETED")
    log = (tmp_path / "job.log").read_text()
    assert f"continues from step_{status['step']:08d}" in log
    assert train_on(2, tmp_path / "whole", *STEPS, *steps)[0] == 0
    assert losses_by_step(tmp_path / "run") == losses_by_step(tmp_path / "whole")


@pytest.mark.system
def test_a_dead_rank_takes_the_job_down_within_15_s(cluster: Cluster, tmp_path: Path) -> None:
    submitted = time.monotonic()
    job = submit(cluster, "slurm.sbatch", tmp_path, "training.max_steps=100000")
    wait_for_rows(tmp_path / "run", 5, WAIT_S, tmp_path / "job.log")
    started_s = time.monotonic() - submitted  # tells how slow the machine is
    victim = int(
        subprocess.check_output(["pgrep", "-f", f"train_ft.py.*{tmp_path}/run"], text=True).split()[
            -1
        ]
    )
    began = time.monotonic()
    os.kill(victim, 9)
    wait_for_state(cluster, job, tmp_path, "FAILED")
    took_s = time.monotonic() - began
    print(f"down after {took_s:.1f} s")
    assert took_s < 15 + 10 + started_s  # SLURM's own epilogue is in it


@pytest.mark.system
def test_a_job_goes_before_its_limit(cluster: Cluster, tmp_path: Path) -> None:
    """The job's end time alone, no signal: ten minutes are granted, all but a few seconds are kept as margin."""
    job = submit(
        cluster, "slurm.sbatch", tmp_path, "advanced.stop_margin_s=585", "training.max_steps=100000"
    )
    wait_for_rows(tmp_path / "run", 0, WAIT_S, tmp_path / "job.log")
    wait_for_state(cluster, job, tmp_path, "PENDING")
    assert (
        json.loads((tmp_path / "run" / "STATUS.json").read_text())["reason"]
        == "the time is nearly up"
    )
    cluster.call("scancel", job)


def test_dry_run_prints_the_command_as_it_was_typed() -> None:
    for script in ("slurm.sbatch", "slurm_torchrun.sbatch", "local.sh"):
        told = subprocess.run(
            [
                "bash",
                f"launch/{script}",
                "--config-name",
                "smoke",
                "dataset.path='a b'",
                "name=x$y",
            ],
            cwd=ROOT,
            env=os.environ | {"DRY_RUN": "1"},
            capture_output=True,
            text=True,
        )
        assert told.returncode == 0, told.stderr
        assert r"dataset.path=\'a\ b\' name=x\$y" in told.stdout


def test_array_task_takes_its_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("name=lr1 optimizer.lr=1e-5\nname=lr2 optimizer.lr=2e-5\n")
    told = subprocess.run(
        [
            "bash",
            "launch/slurm_array.sbatch",
            str(tmp_path / "sweep.txt"),
            "--config-name",
            "smoke",
        ],
        cwd=ROOT,
        env=os.environ | {"DRY_RUN": "1", "SLURM_ARRAY_TASK_ID": "2"},
        capture_output=True,
        text=True,
    )
    assert "--config-name smoke name=lr2 optimizer.lr=2e-5" in told.stdout


@pytest.mark.slow
def test_a_sweep_of_two_jobs_of_two_ranks_one_preempted(cluster: Cluster, tmp_path: Path) -> None:
    """Hydra's submitit launcher: both jobs end, the preempted one goes on where it was, the table is of both."""
    sweep = tmp_path / "run"
    arguments = [
        "--config-name",
        "smoke",
        f"output_dir={sweep}",
        *STEPS,
        "--multirun",
        "hydra/launcher=submitit_slurm",
    ]
    arguments += [
        "--nproc",
        "2",
        "hydra.launcher.timeout_min=10",
        "seed=0,1",
        "training.max_steps=400",
    ]
    settings = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "job.log", "w") as log:
        command = [sys.executable, "recipes/train_ft.py", *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=cluster.environment | settings, stdout=log, stderr=log
        )
    try:
        first = sweep / "0_seed-0"
        wait_for_rows(first, 20, WAIT_S, tmp_path / "job.log")
        job = cluster.call("squeue", "--noheader", "--states=RUNNING", "--format=%A").split()[0]
        # what submitit asks SLURM to send before the limit
        cluster.call("scancel", "--signal=USR2", job)
        wait_for_state(cluster, job, tmp_path, "PENDING")
        assert json.loads((first / "STATUS.json").read_text())["state"] == "preempted"
        start_now(cluster, job)
        assert process.wait(timeout=WAIT_S) == 0, (tmp_path / "job.log").read_text()[-3000:]
    finally:
        process.kill()
    results = json.loads((sweep / "sweep.json").read_text())
    assert [(row["job"], row["settings"], row["state"], row["step"]) for row in results] == [
        (0, "seed=0", "finished", 400),
        (1, "seed=1", "finished", 400),
    ]
    assert sorted(losses_by_step(first)) == list(range(1, 401))
    assert "| 0 " in (tmp_path / "job.log").read_text()


@pytest.mark.slow
def test_the_script_that_is_written_for_a_cluster_runs_on_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "automodel_lite", "slurm", "--nodes", "2", "--time", "10"],
        cwd=ROOT,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert {"#SBATCH --partition=main", "#SBATCH --nodes=2", "#SBATCH --time=10"} <= set(
        told.stdout.splitlines()
    )
    (tmp_path / "job.sbatch").write_text(told.stdout)
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SBATCH_OUTPUT": str(tmp_path / "job.log"),
    }
    arguments = [
        "--config-name",
        "smoke",
        f"output_dir={tmp_path}/run",
        *QUICK,
        "training.max_steps=2",
    ]
    done = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch", *arguments],
        cwd=tmp_path,
        env=cluster.environment | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wait_for_state(cluster, done.stdout.strip(), tmp_path, "COMPLETED")
    assert "2 processes" in (tmp_path / "job.log").read_text()


@pytest.mark.system
def test_an_array_tokenizes_and_one_more_task_merges(cluster: Cluster, tmp_path: Path) -> None:
    """As docs/slurm.md says it: the merge waits for the array, and training finds the rows."""
    told = subprocess.run(
        [warm_python(), "-m", "automodel_lite", "slurm", "--prepare", "2", "--time", "10"],
        cwd=ROOT,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert "#SBATCH --array=1-2" in told.stdout.splitlines()
    (tmp_path / "prepare.sbatch").write_text(told.stdout)
    rows = [{"text": f"Ship {number} came with a cargo of salt."} for number in range(300)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        *("--config-name", "smoke", "dataset=files", f"dataset.path={tmp_path}/data.jsonl"),
        *("~dataset.num_chats", f"cache_dir={tmp_path}/cache"),
    ]

    def sbatch(*options: str) -> str:
        output = f"--output={tmp_path}/job.log"
        done = subprocess.run(
            ["sbatch", "--parsable", output, *options, "prepare.sbatch", *arguments],
            cwd=tmp_path,
            env=cluster.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    array = sbatch()
    merge = sbatch(f"--dependency=afterok:{array}", "--array=0")
    for job in (f"{array}_1", f"{array}_2", f"{merge}_0"):
        wait_for_state(cluster, job, tmp_path, "COMPLETED")
    one_step = [f"output_dir={tmp_path}/run", *QUICK, "training.max_steps=1"]
    trained = subprocess.run(
        [warm_python(), "-m", "automodel_lite", "train", *arguments, *one_step],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert trained.returncode == 0, trained.stderr
    assert "train: 300 documents → 300 rows" in trained.stdout
    assert "cache: hit" in trained.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := pyxis.missing():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("image")
    pyxis.make_image(root)
    return root


@pytest.mark.system
def test_a_job_in_a_container_has_the_images_package_and_the_mounted_data(
    image: Path, tmp_path: Path
) -> None:
    """The folder of the job is a checkout, the host has no Python, and the data lie under another name: the run
    folder is asked of the container, whose package trains."""
    stand_in = pyxis.make_srun(tmp_path / "srun")
    for name in ("python", "python3"):
        (stand_in / name).write_text("#!/bin/bash\necho the host has no python >&2\nexit 127\n")
        (stand_in / name).chmod(0o755)
    work, data = tmp_path / "work", tmp_path / "chats"
    (work / "automodel_lite").mkdir(parents=True)
    (work / "automodel_lite" / "__init__.py").write_text("raise ImportError('the checkout')\n")
    data.mkdir()
    chat = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    rows = [
        json.dumps({"messages": [{**m, "content": f"{m['content']} {n}"} for m in chat]})
        for n in range(40)
    ]
    (data / "chats.jsonl").write_text("\n".join(rows))
    command = ["bash", str(ROOT / "launch" / "slurm.sbatch"), "--config-name", "smoke"]
    command += [
        *QUICK,
        "training.max_steps=2",
        "dataset=files",
        "~dataset.num_chats",
        "dataset.path=/data/chats.jsonl",
    ]
    settings = {
        "PATH": f"{stand_in}:{os.environ['PATH']}",
        "PYXIS_IMAGE": str(image),
        "MOUNT": f"{data}:/data",
        "LAUNCH": str(ROOT / "launch"),
        "PYTHONPATH": str(work),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        command, cwd=work, env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "the host has no python" not in done.stderr
    (status,) = work.glob("runs/*/STATUS.json")
    assert json.loads(status.read_text())["state"] == "finished"
    assert not (image / "data" / "chats.jsonl").exists()  # it was there for the job alone
