"""What the ranks agree on before their first model is loaded: they have no process group yet."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import torch.distributed as dist

from automodel_lite.launched import rank, world_size
from automodel_lite.parallel.mesh import launchers_store

_numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


def from_first(subject: str, make: Callable[[], str]) -> str:
    """Returns what rank 0 makes, on all ranks, which ask for a subject in one order."""
    if world_size() == 1:
        return make()
    number = str(next(_numbers[subject]))
    store = dist.PrefixStore(subject, launchers_store())
    if rank() == 0:
        store.set(number, make())
    return store.get(number).decode()
