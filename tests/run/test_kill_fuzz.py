"""SIGKILL at random moments: nothing complete is lost, nothing incomplete is taken, no loss changes.

    python -m tests.run.test_kill_fuzz FOLDER KILLS WORLD_SIZES SEED [override ...]

The ranks are forked from that process, which has everything imported: a restart costs half a second. After every kill
each complete checkpoint is checked file by file, and every logged loss is compared with those of an uninterrupted run.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.run import checkpoint_folder
from recipes import train_ft  # everything is imported once, before the forks
from tests.forked import warm_python
from tests.ranks import free_port
from tests.runs import DROPOUT, losses_by_step, quick_config
from tests.tiers import rarely

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 16
OPTIONS = [
    f"training.max_steps={NUM_STEPS}",
    "training.global_batch_size=4",
    "packed_sequence.packed_sequence_size=64",
    "packed_sequence.overlong=drop",
    "dataset.num_chats=120",
    "checkpoint.every_steps=2",
    "training.hang_timeout_s=0",
]


def start(folder: Path, world_size: int, overrides: list[str]) -> list[int]:
    """Process ids of the ranks of one run."""
    port, pids = free_port(), []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                }
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                code = train_ft.main(quick_config(folder, *OPTIONS, *overrides))
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def wait(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def have_ended(pids: list[int]) -> bool:
    """Returns whether no rank runs any more; `wait` still finds how each ended."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return all(os.waitid(os.P_PID, pid, how) for pid in pids)


def kill(pids: list[int], rng: random.Random) -> None:
    """All at once, or one rank first and the others while they notice."""
    order = rng.sample(pids, len(pids))
    if rng.random() < 0.3:
        os.kill(order[0], signal.SIGKILL)
        time.sleep(rng.uniform(0, 0.3))
    for pid in order:
        os.kill(pid, signal.SIGKILL)


def newest(folder: Path) -> int:
    """Step of the newest complete checkpoint; every one that says it is complete is checked byte by byte."""
    complete, _ = checkpoint_folder.survey(folder / "checkpoints")
    for path in complete:
        assert not checkpoint_folder.broken_files(path, 0, 1), path
    return max((checkpoint_folder.step_of(path) or 0 for path in complete), default=0)


def fuzz(
    base: Path, kills: int, worlds: list[int], seed: int, overrides: list[str]
) -> dict[str, Any]:
    rng = random.Random(seed)
    began = time.monotonic()
    assert set(wait(start(base / "whole", worlds[0], overrides))) == {0}, (
        base / "whole.log"
    ).read_text()
    whole_s = time.monotonic() - began
    want = losses_by_step(base / "whole")
    found: dict[str, Any] = {
        "kills": 0,
        "lost": 0,
        "runs": 0,
        "losses": 0,
        "not_equal": 0,
        "worst_rel": 0.0,
    }
    folder, before = base / "run0", 0
    while found["kills"] < kills:
        began_run = time.monotonic()
        pids = start(folder, rng.choice(worlds), overrides)
        kill_at = began_run + rng.uniform(0.05, 1.0) * whole_s
        while time.monotonic() < kill_at and not have_ended(pids):
            time.sleep(0.02)
        if have_ended(pids):  # nobody was killed: the machine is faster than it was
            assert set(wait(pids)) == {0}, folder.with_suffix(".log").read_text()[-3000:]
            whole_s = min(whole_s, time.monotonic() - began_run) if before == 0 else whole_s
        else:
            kill(pids, rng)
            wait(pids)
            found["kills"] += 1
        now = newest(folder)
        found["lost"] += now < before
        before, seen = now, found["losses"]
        _compare(folder, want, found)
        # nothing was reached: the machine is slower than it was
        whole_s *= 1.2 if found["losses"] == seen else 1.0
        if now == NUM_STEPS:
            found["runs"] += 1
            folder, before = base / f"run{found['runs']}", 0
            shutil.rmtree(base / f"run{found['runs'] - 1}")
    codes = wait(start(folder, worlds[0], overrides))
    assert set(codes) == {0}, folder.with_suffix(".log").read_text()[-3000:]
    _compare(folder, want, found)
    assert losses_by_step(folder).keys() == want.keys()
    return found | {"seconds": round(time.monotonic() - began, 1), "whole_s": round(whole_s, 1)}


def _compare(folder: Path, want: dict[int, tuple[float, float]], found: dict[str, Any]) -> None:
    if not (folder / "metrics.jsonl").is_file():
        return
    path = folder / "metrics.jsonl"
    text = path.read_text()
    whole_lines = text[: text.rfind("\n") + 1]  # a killed process may leave a torn last line
    (folder / "whole").mkdir(exist_ok=True)
    (folder / "whole" / "metrics.jsonl").write_text(whole_lines)
    for step, values in losses_by_step(folder / "whole").items():
        found["losses"] += 1
        found["not_equal"] += values != want[step]
        found["worst_rel"] = max(found["worst_rel"], abs(values[0] - want[step][0]) / want[step][0])


def run_fuzz(folder: Path, kills: int, worlds: str, seed: int, *overrides: str) -> dict[str, Any]:
    command = [
        warm_python(),
        "-m",
        "tests.run.test_kill_fuzz",
        str(folder),
        str(kills),
        worlds,
        str(seed),
        *overrides,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100 * kills + 900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["kills"] == kills
    assert found["lost"] == 0
    assert found["losses"] > kills
    return found


DROPOUT_64 = [option.replace("n_positions=128", "n_positions=64") for option in DROPOUT]
CASES = [
    pytest.param("2", DROPOUT_64, 0.0, 0.5, id="sync"),
    pytest.param("2", [*DROPOUT_64, "checkpoint.mode=async"], 0.0, 0.3, id="async"),
    pytest.param("2,1,4", [], 1e-6, 0.2, id="worlds-1-2-4", marks=pytest.mark.slow),
]


@pytest.mark.system
@pytest.mark.parametrize("kills", [10, *rarely(100, 1000)])
@pytest.mark.parametrize(("worlds", "overrides", "tolerance", "share"), CASES)
def test_kills(
    tmp_path: Path, worlds: str, overrides: list[str], tolerance: float, share: float, kills: int
) -> None:
    found = run_fuzz(tmp_path, round(kills * share), worlds, kills, *overrides)
    assert found["worst_rel"] <= tolerance
    assert found["not_equal"] == 0 or tolerance


if __name__ == "__main__":
    where, num_kills, world_sizes, fuzz_seed, *more = sys.argv[1:]
    result = fuzz(
        Path(where), int(num_kills), [int(w) for w in world_sizes.split(",")], int(fuzz_seed), more
    )
    print(json.dumps(result), flush=True)
