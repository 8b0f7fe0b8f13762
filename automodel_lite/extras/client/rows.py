"""Rows in memory become packs: checked, rows of one group as a tree, and back from tokens to rows.

    groups   [[q a, q b], [r c]]            rows that share their beginning
    trees    q a b │ r c                    what they share is there once
    packs    one micro-batch after the other, of all ranks

Legend: R rows, T tokens of all trees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from automodel_lite.columns import CHOSEN, COLUMNS, IGNORE_INDEX, REJECTED
from automodel_lite.config.sizes import ceil_div, round_up
from automodel_lite.data.packing.packs import PackedDataset, Packer
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import PAIRED, TokenizedDocuments, flatten
from automodel_lite.data.tokens.trees import cut_tree, grow_trees
from automodel_lite.errors import ConfigError, counted
from automodel_lite.extras.client.targets import IDS, NO_TARGET
from automodel_lite.models.loss import Loss, check_columns

Row = dict[str, np.ndarray]
GRAIN_TOKENS = 128  # packs are made as short as their rows, in steps of so many tokens


@dataclass(frozen=True)
class PackedRows:
    """packs   with the column `row_place`
    rows    as they were given
    paths   by the ids of a row: where its tokens stand among all tokens, int64 [L] each
    num_tokens  of all trees
    targets_T   the label of each token, [T], or its targets, [T, K]
    """

    packs: PackedDataset
    rows: list[Row]
    paths: dict[bytes, list[np.ndarray]]
    num_tokens: int
    targets_T: np.ndarray

    def of_rows(self, values_T: np.ndarray) -> list[np.ndarray]:
        """Returns the values of each token of each row, [L, ...], 0 where it has no label.

        values_T  [T, ...], NaN where no label is
        """
        found = []
        for row in self.rows:
            values = np.full((len(row["input_ids"]), *values_T.shape[1:]), np.nan, np.float32)
            wanted = targets_of(row)
            # rows of equal ids may lie apart, with labels at other places, or others
            for path in self.paths[row["input_ids"].tobytes()]:
                is_same = (self.targets_T[path] == wanted).reshape(len(path), -1).all(1)
                is_open = np.isnan(values).reshape(len(path), -1).any(1)
                values[is_same & is_open] = values_T[path[is_same & is_open]]
            values[row["labels"] == IGNORE_INDEX] = 0
            found.append(values)
        return found


def targets_of(row: Row) -> np.ndarray:
    """Returns what a row's values are of: its targets [L, K], or its labels [L]."""
    return row.get(IDS, row["labels"])


def check_rows(
    groups: Sequence[Sequence[Mapping[str, Any]]],
    loss: Loss,
    most_tokens: int,
    num_ids: int,
    positions: int,
) -> list[list[Row]]:
    """Returns the rows as arrays with one set of columns; raises ConfigError or ValueError, which
    names the row.

    most_tokens  of a row: a pack
    num_ids      rows of the embedding
    positions    of the model: a row begins at 0, wherever it stands in its pack
    """
    if not groups:
        raise ValueError("there are no rows, so there is nothing to learn.")
    brought = {name for group in groups for row in group for name in row}
    columns = brought - {"input_ids", "labels"}
    if unknown := sorted(columns - COLUMNS.keys()):
        raise ConfigError(
            f"the rows bring {', '.join(unknown)}, which no loss declares: name the column in the "
            "loss class's `own_columns`, or leave it out."
        )
    if loss.step_mean:
        raise ConfigError(
            f"loss={type(loss).__name__} needs {loss.step_mean.column} of a whole step before its "
            "gradients, and the rows of a training client come call by call: use automodel-lite "
            "train --config-name kto, or a client with loss.kind=apo_zero."
        )
    check_columns(loss, columns)
    numbers = itertools.count()
    checked = [
        [_checked_row(row, columns, loss, num_ids, next(numbers)) for row in group]
        for group in groups
    ]
    if "answers" in loss.required:
        _check_pairs(checked)
    rows = [row for group in checked for row in group]
    for number, row in enumerate(rows):
        if (length := len(row["input_ids"])) > most_tokens:
            raise ValueError(
                f"row {number} has {length:,} tokens, and a pack holds "
                f"packed_sequence.packed_sequence_size={most_tokens}: shorten the row, or make "
                "packs larger."
            )
        if length > positions:
            raise ValueError(
                f"row {number} has {length:,} tokens, and the model has "
                f"max_position_embeddings={positions}: shorten the row."
            )
    if not any((row["labels"] != IGNORE_INDEX).any() for row in rows):
        raise ValueError(
            f"no label in {counted(len(rows), 'row')}, so there is nothing to learn: labels[i] is "
            f"the target of position i, {IGNORE_INDEX} where there is none."
        )
    return checked


def _check_pairs(groups: Sequence[Sequence[Row]]) -> None:
    """Raises ValueError for a group that is not a chosen and a rejected row: what is compared with
    what follows from the groups.
    """
    for number, group in enumerate(groups):
        found = [np.unique(row["answers"][row["labels"] != IGNORE_INDEX]).tolist() for row in group]
        if sorted(found) != [[CHOSEN], [REJECTED]]:
            raise ValueError(
                f"group {number} of {counted(len(group), 'row')} must be one pair, [chosen, "
                f"rejected], whose labels have answers={CHOSEN} in the one and {REJECTED} in the "
                "other."
            )


def _checked_row(
    row: Mapping[str, Any], columns: set[str], loss: Loss, num_ids: int, number: int
) -> Row:
    """Returns the row's arrays; columns that it does not bring get their padding."""
    whole = {name for name in columns if COLUMNS[name].padding == -math.inf}
    if missing := sorted({"input_ids", "labels", *loss.required, *whole} - row.keys()):
        raise ValueError(f"row {number} lacks {', '.join(missing)}.")
    ids = np.asarray(row["input_ids"])
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"row {number}: input_ids must be a flat list of at least one id.")
    arrays = {}
    for name in ["input_ids", "labels", *sorted(columns)]:
        column = COLUMNS[name]
        value = np.asarray(row[name]) if name in row else np.full(len(ids), column.padding)
        if len(value) != len(ids):
            raise ValueError(
                f"row {number} has {len(ids)} input_ids and {len(value)} {name}: a row's sequences "
                "are of equal length."
            )
        if not np.isfinite(value).all():
            raise ValueError(
                f"row {number}: {name} is not finite at position "
                f"{int(np.argmin(np.isfinite(value).reshape(len(ids), -1).all(1)))}: look at what "
                "computed it, or leave the row out."
            )
        arrays[name] = np.ascontiguousarray(value, column.stored)
    ids = arrays["input_ids"]
    labels = arrays["labels"]
    has_label = labels != IGNORE_INDEX
    checked = {"input_ids": ids, "labels": labels[has_label]}
    if IDS in arrays:
        checked[IDS] = arrays[IDS][arrays[IDS] != NO_TARGET]
    for name, used in checked.items():
        if (arrays[name] != np.asarray(row[name])).any():
            raise ValueError(f"row {number}: {name} must be whole numbers.")
        outside = used[(used < 0) | (used >= num_ids)]
        if len(outside):
            raise ValueError(
                f"row {number} has the id {outside[0]} in {name}, and the model's embedding has "
                f"{num_ids} rows: tokenize with the client's own tokenizer."
            )
    is_own = bool((labels == ids)[has_label].all())
    if has_label.sum() > 1 and is_own and not (labels[:-1] == ids[1:])[has_label[:-1]].all():
        raise ValueError(
            f"row {number}: its labels are its own ids. labels[i] is the target of position i: "
            "shift them by one, input_ids[1:] and -100 behind the last."
        )
    return arrays


def pack_rows(
    groups: Sequence[Sequence[Row]], loss: Loss, packer: Packer, num_ranks: int, grain: int
) -> PackedRows:
    """Packs rows that `check_rows` has returned; every rank makes the same packs.

    num_ranks  data-parallel ranks: few rows are spread over all of them, in shorter packs
    grain      of the length of packs; 0 = packs of the configured size (compiled graphs)
    Raises ValueError for answers that belong together and do not fit a pack.
    """
    rows = [row for group in groups for row in group]
    trees = []
    paths: dict[bytes, list[np.ndarray]] = {}
    targets = []
    num_tokens = 0
    most_tokens = packer.packed_sequence_size
    for tree in (tree for group in groups for tree in _grow(group, loss, packer)):
        length = len(tree["input_ids"])
        targets.append(targets_of(tree))
        for path in _paths(tree):
            ids = np.ascontiguousarray(tree["input_ids"][path])
            paths.setdefault(ids.tobytes(), []).append(num_tokens + path)
        placed = tree | {"row_place": np.arange(num_tokens, num_tokens + length)}
        num_tokens += length
        if length > most_tokens and not PAIRED.isdisjoint(tree):
            raise ValueError(
                f"answers that the loss compares have {length:,} tokens together, and a pack holds "
                f"packed_sequence.packed_sequence_size={most_tokens}: make packs larger."
            )
        trees += cut_tree(placed, most_tokens) if length > most_tokens else [placed]
    packs = _packs(flatten(trees), packer, num_ranks, grain)
    return PackedRows(packs, rows, paths, num_tokens, np.concatenate(targets))


def _grow(group: Sequence[Row], loss: Loss, packer: Packer) -> list[Row]:
    """Returns the trees of a group, whose rows share no label where the loss separates them."""
    shares = packer.tree != "off"
    if not shares and PAIRED.isdisjoint(group[0]):
        return [dict(row) for row in group]
    return grow_trees(group, shares=shares, separates=loss.separates_rows)


def _paths(tree: Row) -> list[np.ndarray]:
    """Returns where the tokens of each row of a tree stand in it."""
    length = len(tree["input_ids"])
    if "branches" not in tree:
        return [np.arange(length)]
    starts = [0, *np.flatnonzero(tree["branches"]).tolist()]
    paths = [np.zeros(0, np.int64)]
    for start, end in zip(starts, [*starts[1:], length]):
        depth = max(0, int(tree["branches"][start]) - 1)
        paths.append(np.concatenate([paths[-1][:depth], np.arange(start, end)]))
    return paths[1:]


def _packs(
    documents: TokenizedDocuments, packer: Packer, num_ranks: int, grain: int
) -> PackedDataset:
    """Returns the packs: as short as can be where there is one for each rank at most."""
    plan_of = partial(
        plan_packs,
        documents.lengths,
        strategy=packer.strategy,
        seed=packer.seed,
        slot_multiple=packer.slot_multiple,
    )
    most_tokens = packer.packed_sequence_size
    multiple = packer.slot_multiple
    if grain and not packer.is_ragged:
        slots = round_up(documents.lengths, multiple)
        step = math.lcm(grain, multiple)
        least = max(int(slots.max()), ceil_div(int(slots.sum()), num_ranks))
        for size in range(round_up(least, step), most_tokens, step):
            if len(plan := plan_of(size)) <= num_ranks:
                return PackedDataset(documents, plan, packer.padding_idx)
    return PackedDataset(documents, plan_of(most_tokens), packer.padding_idx)
