"""Whole documents shared out over ranks: of linear layers, which cannot be cut, and of images."""

from __future__ import annotations

import heapq


def document_owners(lens: list[int], num_ranks: int) -> list[int]:
    """The rank of each document: the longest first, each to the rank that has the fewest tokens so
    far.

    [8, 2, 6, 4] over 2 ranks: [0, 0, 1, 1].
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(lens)
    for document in sorted(range(len(lens)), key=lambda i: -lens[i]):
        load, rank = heapq.heappop(loads)
        owners[document] = rank
        heapq.heappush(loads, (load + lens[document], rank))
    return owners
