"""Many hosts read weights in turn, here of one rank each: who waits for whom, and what a failure does."""

from __future__ import annotations

import time
from pathlib import Path

from automodel_lite.parallel import mesh
from automodel_lite.parallel.mesh import reading_turn
from tests.ranks import run_ranks
from tests.runs import wait_until


def read(
    rank: int, world_size: int, hosts_at_once: int, failing: int, folder: Path
) -> tuple[float, float]:
    """Reads until all that may read now do -> when this rank began, and ended."""
    mesh.HOSTS_AT_ONCE = hosts_at_once
    first = rank // hosts_at_once * hosts_at_once
    together = [
        folder / str(other) for other in range(first, min(first + hosts_at_once, world_size))
    ]
    ended = 0.0
    try:
        with reading_turn():
            began = time.monotonic()
            (folder / str(rank)).touch()
            if rank == failing:
                raise OSError("a damaged file")
            wait_until(lambda: all(x.exists() for x in together), 60)
            ended = time.monotonic()
    except OSError:
        ended = time.monotonic()
    return began, ended


def test_so_many_hosts_read_at_once(tmp_path: Path) -> None:
    turns = run_ranks(read, 4, 2, -1, tmp_path)
    for first, second in ((0, 2), (1, 3)):
        assert turns[second][0] >= turns[first][1]


def test_a_rank_that_fails_lets_the_next_one_read(tmp_path: Path) -> None:
    turns = run_ranks(read, 2, 1, 0, tmp_path)
    assert turns[1][0] - turns[0][1] < 60  # and not the half hour that it would wait


def test_few_hosts_do_not_wait(tmp_path: Path) -> None:
    run_ranks(read, 3, mesh.HOSTS_AT_ONCE, -1, tmp_path)
