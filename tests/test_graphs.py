"""Settings of the compiler for the whole process."""

from __future__ import annotations

import os

import pytest
import torch._inductor.config as inductor_config

from automodel_lite.graphs import strict_graphs


@pytest.mark.parametrize(
    ("num_ranks", "chosen", "threads"),
    [("1", None, 8), ("4", None, 2), ("16", None, 1), ("4", "7", 8)],
)
def test_ranks_of_a_host_share_its_cores(
    num_ranks: str, chosen: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 cores; 8 processes stand for torch's own choice, and a choice of the user's stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", chosen)
    with inductor_config.patch(compile_threads=8):
        strict_graphs()
        assert inductor_config.compile_threads == threads
