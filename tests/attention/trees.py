"""Rows that share beginnings, as one tree, and random ones to prove them with."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.thd import ThdBatch, to_thd

Row = tuple[list[int], list[int]]  # ids, labels


def labelled(ids: list[int], first: int) -> Row:
    """Labels of everything from token `first` on."""
    return ids, [token if i >= first else IGNORE_INDEX for i, token in enumerate(ids[1:], 1)] + [
        IGNORE_INDEX
    ]


def random_rows(
    r: random.Random, vocab: int, depth: int = 6, branching: int = 5, most: int = 12
) -> list[Row]:
    """Rows of one random tree, 1 to 12 of them; nodes of 1 token and more."""
    rows: list[list[int]] = []

    def grow(path: list[int], level: int) -> None:
        path = path + [
            r.randrange(3, vocab)
            for _ in range(r.choice([1, 2, r.randint(1, 9), r.randint(5, 40)]))
        ]
        if level == depth or r.random() < 0.3 or len(rows) >= most:
            rows.append(path)
            return
        for _ in range(r.randint(1, branching)):
            if len(rows) < most:
                grow(path, level + 1)

    grow([r.randrange(3, vocab)], 0)
    return [labelled(ids, r.randint(1, max(1, len(ids) - 1))) for ids in rows]


def tree_of(rows: list[Row]) -> tuple[list[int], list[int], list[int], list[float]]:
    """ids, labels, positions, weights of one tree, built token by token: the slow twin of what packs hold."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    weights: list[float] = []

    def put(group: list[Row], at: int, until: int) -> None:
        for i in range(at, until):
            trained = [row[1][i] for row in group if row[1][i] != IGNORE_INDEX]
            ids.append(group[0][0][i])
            labels.append(trained[0] if trained else IGNORE_INDEX)
            positions.append(i)
            weights.append(float(len(trained)))

    def grow(group: list[Row], at: int) -> None:
        shared = 0
        while all(len(row[0]) > shared and row[0][shared] == group[0][0][shared] for row in group):
            shared += 1
        if len(group) == 1:
            return put(group, at, len(group[0][0]))
        put(group, at, shared - 1)
        branches: dict[object, list[Row]] = {}
        for number, row in enumerate(group):  # a row that ends here is a branch of its own
            following = row[0][shared] if len(row[0]) > shared else ("end", number)
            branches.setdefault(following, []).append(row)
        for branch in branches.values():
            grow(branch, shared - 1)

    grow(rows, 0)
    return ids, labels, positions, weights


def batch_of(trees: list[list[Row]], multiple: int = 1) -> tuple[ThdBatch, Tensor]:
    """One stream of trees, each padded to `multiple`, and the weight of every label [T]."""
    columns: tuple[list[int], list[int], list[int], list[float]] = ([], [], [], [])
    lens, slots = [], []
    for rows in trees:
        parts = tree_of(rows)
        missing = -len(parts[0]) % multiple
        last = parts[2][-1]
        padding = (
            [0] * missing,
            [IGNORE_INDEX] * missing,
            [*range(last + 1, last + 1 + missing)],
            [0.0] * missing,
        )
        for column, part, behind in zip(columns, parts, padding):
            column += part + behind  # type: ignore[operator]
        lens.append(len(parts[0]))
        slots.append(len(parts[0]) + missing)
    names = ("input_ids", "labels", "position_ids")
    batch = {name: torch.tensor([column]) for name, column in zip(names, columns)}
    batch |= {"seq_lens": torch.tensor([lens]), "seq_lens_padded": torch.tensor([slots])}
    batch["loss_weights"] = torch.tensor([columns[3]])
    return to_thd(batch), torch.tensor(columns[3])
