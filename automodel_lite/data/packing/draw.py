"""Packs and masks drawn in characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BAR = "█"


def draw_pack(seq_lens: Sequence[int], slots: Sequence[int], width: int = 64) -> str:
    """A pack as one line: a letter a document, dots for padding; a character stands for size / width tokens.

    >>> draw_pack([3, 4, 0], [4, 4, 8], width=16)
    'AAA.BBBB........'
    """
    size = sum(slots)
    tokens = np.zeros(size, np.int64)
    starts = np.cumsum([0, *slots[:-1]])
    for number, (start, length) in enumerate(zip(starts, seq_lens), start=1):
        tokens[start : start + length] = number
    places = (np.arange(width) * size / width).astype(np.int64)
    return "".join("." if number == 0 else LETTERS[(number - 1) % len(LETTERS)] for number in tokens[places].tolist())


def draw_mask(seq_lens: Sequence[int], slots: Sequence[int], width: int = 32) -> list[str]:
    """Which tokens (rows) see which (columns): `█` all of a cell, `▄` some, `·` none; padding sees nothing here.

    >>> print("\\n".join(draw_mask([2, 2], [2, 2], width=4)))
    █···
    ██··
    ··█·
    ··██
    """
    size = sum(slots)
    document = np.full(size, -1)
    starts = np.cumsum([0, *slots[:-1]])
    for number, (start, length) in enumerate(zip(starts, seq_lens)):
        document[start : start + length] = number
    width = min(width, size)
    edges = (np.arange(width + 1) * size / width).astype(np.int64)
    return ["".join(_cell(document, edges, row, column) for column in range(width)) for row in range(width)]


def _cell(document: np.ndarray, edges: np.ndarray, row: int, column: int) -> str:
    queries, keys = np.arange(edges[row], edges[row + 1]), np.arange(edges[column], edges[column + 1])
    same = (document[queries][:, None] == document[keys][None]) & (document[queries] >= 0)[:, None]
    seen = same & (queries[:, None] >= keys[None])
    return BAR if seen.all() or (seen.any() and row == column) else "▄" if seen.any() else "·"


def draw_histogram(lengths: np.ndarray, limit: int | None = None, bins: int = 12, width: int = 40) -> list[str]:
    """Lengths in tokens, a line a range; `limit` marks the ranges that are too long for a pack."""
    ends = [] if limit is None or not lengths.min() <= limit < lengths.max() else [limit + 1]
    edges = np.unique(np.append(np.linspace(lengths.min(), lengths.max() + 1, bins + 1).astype(np.int64), ends))
    counts, edges = np.histogram(lengths, edges)
    most = max(1, int(counts.max()))
    digits = len(f"{int(lengths.max()):,}")
    lines = []
    for count, start, stop in zip(counts.tolist(), edges[:-1].astype(int).tolist(), edges[1:].astype(int).tolist()):
        bar = BAR * (-(-count * width // most))
        too_long = "  over packed_sequence_size" if limit is not None and start > limit else ""
        lines.append(f"{start:>{digits},} to {stop - 1:>{digits},}  {bar:<{width}} {count:,}{too_long}")
    return lines
