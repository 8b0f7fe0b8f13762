"""torch.compile with its silent ways out closed: one graph too many is an error, never a return to
uncompiled code.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from automodel_lite import compat
from automodel_lite.errors import one_line

MAX_GRAPHS = 64
"""Of one function. dynamo's default is 8, which GPT-OSS and Gemma-2 use up with flex attention
alone: two windows, each for training, validation and a first change of length.
"""
TURN_S = 300.0  # the longest wait for another rank that compiles the same graph


def strict_graphs() -> None:
    """For the whole process. Floats (softcap, scale) stay constants: symbolic ones cannot be traced
    with gradients.

    Each rank starts up to 32 processes that compile kernels: the ranks of a host share its cores
    instead, unless TORCHINDUCTOR_COMPILE_THREADS is set.
    """
    config = compat.dynamo.config
    config.fail_on_recompile_limit_hit = True
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    config.specialize_float = True
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor = compat.inductor_config  # seconds to import, where nothing is compiled

        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        inductor.compile_threads = max(1, min(inductor.compile_threads or 1, share))


@functools.cache  # dynamo knows a backend by its identity
def backend_of(name: Any) -> Callable[..., Any]:
    """Returns what torch.compile takes: a backend whose failure is an error, where dynamo would
    leave some of them (a value that the compiler has to know) to uncompiled code, with a line in
    its log. Of several ranks on a host, one compiles each graph before the others do.
    """
    lookup = compat.dynamo.lookup_backend

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        in_turn = name == "inductor" and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
        try:
            return (inductor_in_turn if in_turn else lookup(name))(graph, inputs)
        except compat.dynamo.exc.exceptions_allowed_to_be_fallback as error:
            text = f"{type(error).__name__}: {one_line(error, 200)}"
            raise RuntimeError(f"{text}, where the compiler needs a value") from error

    return compile_graph


def inductor_in_turn(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """inductor, by which the first rank of a host to meet a graph compiles it; the others wait, and
    find what it has made in inductor's caches. Nobody waits for a rank that has failed: its lock
    ends with its process.
    """
    # Triton's kernels, most of the work, have one key for all GPUs of a kind; inductor's default is
    # a folder for each.
    caches = Path(compat.cache_dir_utils.cache_dir())
    os.environ.setdefault("TRITON_CACHE_DIR", str(caches / "triton" / "all"))
    marks = caches / "in_turn"
    marks.mkdir(parents=True, exist_ok=True)

    def compile_in_turn(graph: torch.fx.GraphModule, inputs: Any, **how: Any) -> Any:
        # A mark that is there from an earlier run says rightly that the caches, its neighbors, have
        # the graph.
        shapes = [
            (str(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else str(x) for x in inputs
        ]
        mark = (
            marks / hashlib.sha256(f"{torch.__version__}{graph.graph}{shapes}".encode()).hexdigest()
        )
        with suppress(Timeout, OSError), FileLock(f"{mark}.lock", timeout=TURN_S):
            if not mark.exists():
                made = compat.compile_fx.compile_fx_inner(graph, inputs, **how)
                mark.touch()
                return made
        return compat.compile_fx.compile_fx_inner(graph, inputs, **how)

    return compat.compile_fx.compile_fx(graph, inputs, inner_compile=compile_in_turn)


@functools.cache
def compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Compiles a function as one graph; sizes that change become symbolic at their second value.

    Not `dynamic=True`: it makes floats symbolic, which torch 2.11 to 2.13 cannot trace with
    gradients.
    """
    strict_graphs()
    return torch.compile(function, fullgraph=True, backend=backend_of(backend))


def graph_breaks() -> Counter[str]:
    """Returns how often tracing gave up within a frame so far, by reason. What is disabled by
    intent, as attention that no graph holds, does not count.
    """
    found = compat.dynamo.utils.counters["graph_break"]
    reasons = Counter[str]()
    for text, times in found.items():
        reason = one_line(text.split("\n")[0], 100)
        if not reason.startswith("Skip calling `torch.compiler.disable()`d"):
            reasons[reason] += times
    return reasons


def compiled_graphs() -> int:
    """Graphs compiled so far by this process: must stay the same once each shape has been seen."""
    return int(compat.dynamo.utils.counters["stats"]["unique_graphs"])
