"""Many hosts read weights in turn, here of one rank each: who waits for whom, and what a failure does."""

from __future__ import annotations

import time

from automodel_lite.parallel import mesh
from automodel_lite.parallel.mesh import reading_turn
from tests.ranks import run_ranks


def read(rank: int, world_size: int, hosts_at_once: int, failing: int) -> tuple[float, float]:
    """Half a second of reading -> when it began, and ended."""
    mesh.HOSTS_AT_ONCE = hosts_at_once
    try:
        with reading_turn():
            began = time.time()
            if rank == failing:
                raise OSError("a damaged file")
            time.sleep(0.5)
    except OSError:
        pass
    return began, time.time()


def test_so_many_hosts_read_at_once() -> None:
    turns = run_ranks(read, 4, 2, -1)
    for first, second in ((0, 2), (1, 3)):
        assert turns[second][0] >= turns[first][1] - 0.1
    assert max(began for began, _ in turns[:2]) < min(ended for _, ended in turns[:2])


def test_a_rank_that_fails_lets_the_next_one_read() -> None:
    turns = run_ranks(read, 2, 1, 0)
    assert turns[1][0] - turns[0][1] < 5


def test_few_hosts_do_not_wait() -> None:
    turns = run_ranks(read, 3, mesh.HOSTS_AT_ONCE, -1)
    assert max(began for began, _ in turns) < min(ended for _, ended in turns)
