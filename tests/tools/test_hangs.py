"""Ranks that wait for each other, by what torch recorded of their groups."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_lite.extras.report.hangs import hangs_of
from automodel_lite.run.watchdog import Watchdog
from tests.ranks import run_ranks


def wait_for_rank_1(rank: int, world_size: int, folder: Path) -> list[str]:
    """Rank 1 comes only when both ranks have written their records, and returns what these say then; `run_ranks` has let
    them meet once.
    """
    dist.all_reduce(torch.ones(3))
    watchdog = Watchdog(folder, rank, after_s=0.2)
    watchdog.start("token")
    deadline = time.monotonic() + 60
    found: list[str] = []
    while rank == 1 and not found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = waiting_ranks(folder)
    dist.all_reduce(torch.ones(3, 4))
    watchdog.stop()
    return found


def waiting_ranks(folder: Path) -> list[str]:
    """Returns the sentences, once both records are there."""
    is_written = len([*folder.glob("logs/collectives_*.json")]) == 2
    return hangs_of(folder / "logs") if is_written else []


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    assert run_ranks(wait_for_rank_1, 2, tmp_path)[1] == [
        "rank 1 did not come to all_reduce of float [3, 4], number 3 of gloo group 0 (default_pg), "
        "where rank 0 waited."
    ]


def call(number: int, name: str, sizes: list[list[int]], is_done: bool, group: str = "7") -> Any:
    return {
        "process_group": [group, "mesh_dp_shard_cp"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"nccl:{name}",
        "input_sizes": sizes,
        "input_dtypes": ["BFloat16"],
        "state": "completed" if is_done else "scheduled",
        "retired": False,
        "time_created_ns": number,
    }


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        (
            [call(4, "all_gather", [[8]], False), call(4, "all_gather", [[8]], False)],
            "ranks 0, 1 waited in all_gather of bfloat16 [8], number 4 of nccl group 7 "
            "(mesh_dp_shard_cp), which all of them had called: a link or a GPU hung.",
        ),
        (
            [call(4, "all_gather", [[8]], False), call(4, "reduce_scatter", [[9]], False)],
            "rank 0 called all_gather of bfloat16 [8] where rank 1 called reduce_scatter of bfloat16 "
            "[9], number 4 of nccl group 7 (mesh_dp_shard_cp).",
        ),
        (
            [call(4, "all_gather", [[8]], False), None],
            "rank 1 did not come to all_gather of bfloat16 [8], number 4 of nccl group 7 "
            "(mesh_dp_shard_cp), where rank 0 waited.",
        ),
        ([call(4, "all_gather", [[8]], True), call(3, "all_gather", [[8]], True)], None),
    ],
    ids=["all wait", "another call", "one is missing", "nobody waits"],
)
def test_records_are_compared(calls: list[Any], sentence: str | None, tmp_path: Path) -> None:
    for rank, of_rank in enumerate(calls):
        config = {"7": {"desc": "mesh_dp_shard_cp", "ranks": "[0, 1]"}}
        entries = [of_rank] if of_rank else []
        record = {"nccl": {"entries": entries, "pg_config": config}}
        (tmp_path / f"collectives_{rank:05d}.json").write_text(json.dumps(record))
    (tmp_path / "collectives_00009.json").write_text('{"nccl": {"entries": [{}]')  # cut
    assert hangs_of(tmp_path) == ([sentence] if sentence else [])
