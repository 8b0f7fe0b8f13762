"""Which jobs go back into the queue: the shell functions of launch/requeue.sh, with a scontrol that writes down."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOST = "rank 3 on node7 ended without a message (killed, out of memory, or a crash), in step 4"
FOLLOWED = "rank 3 on node7: no heartbeat for 60 s: its host may be down"


def ended(
    run: Path,
    code: int,
    reason: str,
    *,
    is_further: bool,
    state: str = "failed",
    is_of_before: bool = False,
) -> list[str]:
    """What scontrol is told when a run ends with this code, and STATUS.json is written by it, or by
    the attempt before.
    """
    (run / "logs").mkdir(parents=True, exist_ok=True)
    (run / "STATUS.json").write_text(json.dumps({"state": state, "reason": reason}))
    for step in ("step_00000010", "step_00000020"):
        (run / "checkpoints" / step).mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / step / "COMPLETE.json").touch()
    before = (
        run / "checkpoints" / ("step_00000010" if is_further else "step_00000020") / "COMPLETE.json"
    )
    told = run / "told"
    told.write_text("")
    (run / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {told}\n')
    (run / "scontrol").chmod(0o755)
    write = f"touch {'-d yesterday' if is_of_before else ''} {run}/STATUS.json"
    subprocess.run(
        [
            "bash",
            "-c",
            f"source launch/requeue.sh; {write}; requeue_if_useful {run} {code} {before}",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{run}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "REQUEUE_WAIT_S": "0",
        },
        check=False,
    )
    return told.read_text().splitlines()


@pytest.mark.parametrize(
    ("code", "reason", "is_further", "is_requeued"),
    [
        (75, "SIGTERM", False, True),
        (137, "", True, True),
        (134, "", True, True),
        (1, LOST, True, True),
        (1, FOLLOWED, True, True),
        (1, "the loss is not finite", True, False),
        (2, "an unknown key", True, False),
        (137, "", False, False),
        (1, LOST, False, False),
        (0, "", True, False),
    ],
    ids=[
        "stopped",
        "killed",
        "aborted",
        "peer",
        "silent",
        "nan",
        "mistake",
        "killed-at-once",
        "peer-at-once",
        "done",
    ],
)
def test_a_job_that_lost_a_rank_goes_on_if_it_got_further(
    code: int, reason: str, is_further: bool, is_requeued: bool, tmp_path: Path
) -> None:
    assert ended(tmp_path, code, reason, is_further=is_further) == ["requeue 17"] * is_requeued


@pytest.mark.parametrize(
    ("code", "is_of_before", "is_requeued"),
    [(1, False, True), (1, True, False), (137, True, False), (75, True, True)],
    ids=["torchrun", "cannot-import", "killed-while-loading", "stopped"],
)
def test_a_preemption_of_the_attempt_before_says_nothing_of_this_one(
    code: int, is_of_before: bool, is_requeued: bool, tmp_path: Path
) -> None:
    told = ended(
        tmp_path,
        code,
        "SIGTERM",
        is_further=False,
        state="preempted",
        is_of_before=is_of_before,
    )
    assert told == ["requeue 17"] * is_requeued


def test_a_host_that_lost_two_ranks_is_left_out(tmp_path: Path) -> None:
    assert ended(tmp_path, 137, LOST, is_further=True) == ["requeue 17"]
    assert ended(tmp_path, 1, FOLLOWED, is_further=True) == [
        "update JobId=17 ExcNodeList=node7",
        "requeue 17",
    ]
