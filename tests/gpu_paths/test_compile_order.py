"""Ranks of a host compile a graph one after the other, by inductor's C++ backend: the second finds it in the cache."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from automodel_lite import graphs
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def prepare(cache: str, ranks_here: int) -> None:
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "LOCAL_WORLD_SIZE": str(ranks_here)}


def curve(x: torch.Tensor) -> torch.Tensor:
    return x.sin().softmax(-1)


def counted(rank: int, world_size: int, cache: str, ranks_here: int) -> tuple[int, int]:
    """Compiles a function, forward and backward -> graphs that the cache had, and had not."""
    prepare(cache, ranks_here)
    torch.distributed.barrier()
    graphs.compiled(curve)(torch.ones(8, 16, requires_grad=True)).sum().backward()
    found = torch._dynamo.utils.counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def test_each_graph_is_compiled_once_per_host(tmp_path: Path) -> None:
    """Without turns both ranks compile both graphs, unless one is late."""
    found = run_ranks(counted, 2, str(tmp_path), 2)
    assert [sum(counts) for counts in zip(*found)] == [2, 2]


def hang(cache: str, is_inside: Event) -> None:
    """The first rank of its host, whose compiler never ends."""
    from torch._inductor import compile_fx

    prepare(cache, 2)

    def compile_fx_inner(*args: Any, **kwargs: Any) -> None:
        is_inside.set()
        time.sleep(600)

    compile_fx.compile_fx_inner = compile_fx_inner  # type: ignore[assignment]
    graphs.compiled(curve)(torch.ones(8, 16))


def follow(cache: str, has_result: Event) -> None:
    prepare(cache, 2)
    graphs.compiled(curve)(torch.ones(8, 16))
    has_result.set()


def test_a_rank_that_dies_while_compiling_frees_the_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    is_inside, has_result = context.Event(), context.Event()
    first = context.Process(target=hang, args=(str(tmp_path), is_inside))
    second = context.Process(target=follow, args=(str(tmp_path), has_result), daemon=True)
    first.start()
    assert is_inside.wait(120)
    second.start()
    try:
        assert not has_result.wait(20)  # alone it takes 5 to 10
    finally:
        first.kill()
    assert has_result.wait(120)
    second.join()


def test_nobody_waits_longer_than_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(graphs, "TURN_S", 0.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda graph, inputs: "compiled")
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda graph, inputs, inner_compile: inner_compile(graph, inputs)
    )
    graph = torch.fx.symbolic_trace(curve)
    assert graphs.inductor_in_turn(graph, [torch.ones(2)]) == "compiled"
    (mark,) = (tmp_path / "in_turn").glob("*[!k]")
    mark.unlink()
    with FileLock(f"{mark}.lock"):
        assert graphs.inductor_in_turn(graph, [torch.ones(2)]) == "compiled"
    assert not mark.exists()  # it was not its turn
