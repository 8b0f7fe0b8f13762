"""How many CPU threads a process takes, and the reason that is printed."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from automodel_lite.parallel import mesh
from automodel_lite.parallel.mesh import cgroup_cores, threads_of


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(mesh, "cgroup_cores", lambda: math.inf)


@pytest.mark.parametrize(
    ("asked", "ranks", "found"),
    [
        ("", 1, (8, "8 cores")),
        ("1", 1, (1, "OMP_NUM_THREADS")),
        ("3", 2, (3, "OMP_NUM_THREADS")),
        ("1", 2, (4, "8 cores, 2 processes")),  # torchrun's own choice
        ("x", 1, (8, "8 cores")),
    ],
)
def test_omp_num_threads_is_respected(
    asked: str, ranks: int, found: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_of(0) == found
    assert threads_of(5) == (5, "training.num_threads")


def test_a_containers_limit_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "cgroup_cores", lambda: 2.5)
    assert threads_of(0) == (2, "the container's limit of 2.5 cores")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "250000 100000"}, 2.5),
        ({}, math.inf),
    ],
)
def test_the_limit_of_a_cgroup(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_cores(tmp_path) == cores
