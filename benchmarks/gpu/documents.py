"""Random documents of like lengths for every contestant, and the batches of each way to hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.variant import Variant

SEED = 0
# median and spread of the logarithm
KINDS = {"gsm8k": (150, 0.37), "chat": (420, 0.85), "long": (6000, 1.0)}
TREE = (512, 4, 127)  # tokens of a shared beginning, rows that share it, and their own tokens


def lengths(kind: str, longest: int) -> Iterator[int]:
    """Endless lengths of documents: gsm8k (median 150), chat (420, long-tailed) or long (6,000)."""
    median, spread = KINDS[kind]
    rng = np.random.default_rng(SEED)
    while True:
        yield int(np.clip(rng.lognormal(np.log(median), spread), 16, longest))


def described(kind: str, longest: int = 8192) -> dict[str, float]:
    """Of the first 10,000 documents."""
    source = lengths(kind, longest)
    drawn = np.array([next(source) for _ in range(10_000)])
    middle = {"mean_tokens": float(drawn.mean()), "median_tokens": float(np.median(drawn))}
    return middle | {"longest": int(drawn.max())}


def padded_batches(variant: Variant, source: Iterator[int]) -> Iterator[list[int]]:
    """Documents of one batch, a row each: as many as the packs hold; sorted: of like length, in random order of batches."""
    mean = {"gsm8k": 160, "chat": 600, "long": 9000}[variant.documents]
    num_rows = max(1, variant.micro * variant.pack // mean)
    if variant.attention == "padded":
        while True:
            yield [next(source) for _ in range(num_rows)]
    rng = np.random.default_rng(SEED + 1)
    while True:
        pool = sorted(next(source) for _ in range(32 * num_rows))
        batches, batch = [], []
        for length in pool:
            # slots of a batch, as in a pack
            if batch and length * (len(batch) + 1) > variant.micro * variant.pack:
                batches.append(batch)
                batch = []
            batch.append(length)
        for index in rng.permutation(len(batches)):
            yield batches[index]


def batches_of(variant: Variant, vocabulary: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Collated batches of one micro-batch, and the lengths of their documents."""
    if variant.documents in ("trees", "rows of trees"):
        yield from _shared_beginnings(variant, vocabulary)
    source = lengths(variant.documents, variant.pack)
    padded = padded_batches(variant, source)
    generator = torch.Generator().manual_seed(SEED)
    left = 0
    while True:
        rows: list[list[int]] = []
        if variant.attention in ("padded", "sorted"):
            rows = [[length] for length in next(padded)]
            width = max(row[0] for row in rows)
        else:
            width = variant.pack
            for _ in range(variant.micro):
                row: list[int] = []
                while sum(row) < width:
                    left = left or next(source)
                    row.append(min(left, width - sum(row)))
                    left = 0
                rows.append(row)
        ids = torch.randint(3, vocabulary, (len(rows), width), generator=generator)
        yield _collated(ids, rows), [n for row in rows for n in row]


def _collated(ids: Any, rows: list[list[int]]) -> dict[str, Any]:
    width = ids.shape[1]
    labels, positions = ids.roll(-1, 1), torch.zeros_like(ids)
    slots = [[*row[:-1], row[-1] + width - sum(row)] for row in rows]
    for r, row in enumerate(rows):
        ends = torch.tensor(row).cumsum(0)
        labels[r, ends - 1] = -100
        labels[r, sum(row) :] = -100
        positions[r] = torch.cat([torch.arange(n) for n in slots[r]])
    longest = max(map(len, rows))
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "seq_lens": torch.tensor([row + [-1000] * (longest - len(row)) for row in rows]),
        "seq_lens_padded": torch.tensor([slot + [-1000] * (longest - len(slot)) for slot in slots]),
    }


def _shared_beginnings(
    variant: Variant, vocabulary: int
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Rows that share their beginning: as trees, whose branches begin with a copy of its last token, or one by one. Both
    count the tokens of rows.
    """
    shared, num_rows, own = TREE
    generator = torch.Generator().manual_seed(SEED)
    branch = torch.arange(shared - 1, shared + own)
    tree = torch.cat([torch.arange(shared - 1), *[branch] * num_rows])
    is_tree = variant.documents == "trees"
    slot = len(tree) if is_tree else shared + own
    while True:
        row = [slot] * (variant.pack // slot)
        ids = torch.randint(3, vocabulary, (variant.micro, sum(row)), generator=generator)
        batch = _collated(ids, [row] * variant.micro)
        if is_tree:
            batch["position_ids"] = tree.repeat(len(row)).expand_as(ids).clone()
            # the last token of each branch but the last
            ends = (tree[1:] == shared - 1).nonzero().squeeze(1)[1:]
            for d in range(len(row)):
                batch["labels"][:, d * slot + ends] = -100
        rows_of_slot = num_rows if is_tree else 1
        yield batch, [shared + own] * (rows_of_slot * len(row) * variant.micro)
