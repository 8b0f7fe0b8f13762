"""torch.compile with its silent ways out closed: one graph too many is an error, never a return to uncompiled code."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

MAX_GRAPHS = 64
"""Of one function. dynamo's default is 8, which GPT-OSS and Gemma-2 use up with flex attention alone: two windows, each
for training, validation and a first change of length."""


def strict_graphs() -> None:
    """For the whole process. Floats (softcap, scale) stay constants: symbolic ones cannot be traced with gradients.

    Each rank starts up to 32 processes that compile kernels: the ranks of a host share its cores instead, unless
    TORCHINDUCTOR_COMPILE_THREADS is set.
    """
    config = torch._dynamo.config
    config.fail_on_recompile_limit_hit = True
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    config.specialize_float = True
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        import torch._inductor.config as inductor_config  # seconds, where nothing is compiled

        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        inductor_config.compile_threads = max(1, min(inductor_config.compile_threads or 1, share))


@functools.cache
def compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Compiles a function as one graph; sizes that change become symbolic at their second value.

    Not `dynamic=True`: it makes floats symbolic, which torch 2.11 to 2.13 cannot trace with gradients.
    """
    strict_graphs()
    return torch.compile(function, fullgraph=True, backend=backend)


def compiled_graphs() -> int:
    """Graphs compiled so far by this process: must stay the same once each shape has been seen."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
