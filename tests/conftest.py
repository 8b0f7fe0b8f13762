"""Holds for every test of the suite: pytest reads this file by its name."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest

gc.disable()  # until all is imported: a quarter of the CPU time that collecting the suite takes

OFTEN = gc.get_threshold()
SELDOM = (20_000, 20, 20)
# what they count depends on when garbage goes, and no user's run has it wait so long
COUNTS_MEMORY = (
    "test_costs.py",
    "test_crossings.py",
    "test_memory.py",
    "test_plan.py",
    "test_planner.py",
    "test_recompute.py",
    "test_simulated_families.py",
    "test_simulation.py",
    "test_tracker.py",
)
LONG = (
    "test_averages.py",
    "test_compute_weights.py",
    "test_context_parallel.py",
    "test_faults_of_disks.py",
    "test_own_words.py",
    "test_plan.py",
    "test_planner.py",
    "test_policy.py",
    "test_scaling.py",
    "test_sharded_start.py",
    "test_simulation.py",
    "test_start_up.py",
    "test_streaming.py",
    "test_trip.py",
    "test_unequal_ranks.py",
)


def pytest_collection_finish() -> None:
    """Collections of garbage look through what tests make, and not through what was imported: they took a twentieth of the CPU
    time of tests, and take half of that.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Workers share the cores: with a thread for each core, threads wait for each other, five times as long as they
    compute. What the test before has set does not count.
    """
    import torch  # only here: who hands out the tests needs none

    torch.set_num_threads(1)
    gc.set_threshold(*(OFTEN if item.path.name in COUNTS_MEMORY else SELDOM))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of whole jobs and long ones first, then those of many tests: of workers that take a file at a time, none is
    left alone with a long one at the end, and what waits runs beside what computes.
    """
    in_file = Counter(item.path for item in items)
    first = {
        item.path for item in items if item.path.name in LONG or item.get_closest_marker("system")
    }
    items.sort(key=lambda item: (item.path not in first, -in_file[item.path]))


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """The program sets variables for the processes that it will start; the next test of this process has its own."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
