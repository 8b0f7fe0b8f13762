"""Rows that share a beginning become one row, a tree, in which the beginning is stored, and
computed, once.

    rows of a chat     q a | q b c | q b d e        sorted: rows with like beginnings are neighbors
    tree               q a q b c b d e              each row, from the last token that it shares
                       with the one before
    branches           0 0 1 0 0 2 0 0              1 + the position at which a branch begins
                       (prefix_trees.py)
    loss_weights       1 1 …                        rows that train a label: where q b is trained on
                       twice, 2
    row_labels         0 0 1 …                      what labels on the path, times their weights, do
                       not tell of the number that a row trains

Sorted rows are a tree in depth-first order, because what two neighbors share is on the path of all
rows between them. A row may be the beginning of another: it ends in a branch of one token. A tree
that is too large for a pack is cut between rows when it is written; what a later part repeats of
the path has its labels in the first part alone, so that every label counts once.

Legend: N rows, M branches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.tokens.token_rows import (
    ALONE,
    PAIRED,
    TREES,
    RowsWriter,
    TokenizedDocuments,
    flatten,
    load_rows,
)
from automodel_lite.errors import counted

LEAST_SHARED = 64
"""Tokens that neighbors must share: a branch costs a copied token, a segment of attention and a
piece of each scan.
"""
BLOCK_TREES = 1000
OF_ROW = "of_row"
"""The number of the row at its labels: what rows do not share when a loss takes them whole."""

Row = Mapping[str, np.ndarray]
Tree = dict[str, np.ndarray]


def grow_trees(
    rows: Sequence[Row],
    least_shared: int = LEAST_SHARED,
    shares: bool = True,
    most_tokens: int | None = None,
    separates: bool = False,
) -> list[Tree]:
    """Rows of one source -> trees of those whose beginnings are alike, and the other rows as they
    are.

    A tree has the columns of a row, `branches`, `row_labels`, and `loss_weights` where a label is
    trained on by more rows than one.
    Rows with labels that are not the next token, or with weights of their own, stay rows: a shared
    token has one label and one value of each column.

    shares       False: what is put together for other reasons (`PAIRED`) holds each row whole
    most_tokens  of a pack: longer rows stay rows, which the packer drops or cuts with their own
                 labels; what is compared stays together, and is dropped whole
    separates    rows share no label, also where they are equal
    """
    if len(rows) < 2:
        return [dict(row) for row in rows]
    for row in rows:
        ids = row["input_ids"]
        labels = row["labels"]
        has_label = labels[:-1] != IGNORE_INDEX
        # the last label may be of a token that the row lacks: the last token that rows share is
        # copied, so no other row has this label
        is_next = bool((labels[:-1] == ids[1:])[has_label].all())
        if not is_next or "loss_weights" in row:
            return [dict(row) for row in rows]
    is_paired = not PAIRED.isdisjoint(rows[0])
    compared = rows
    if separates:
        compared = [
            {**row, OF_ROW: np.where(row["labels"] == IGNORE_INDEX, 0, number)}
            for number, row in enumerate(rows, start=1)
        ]
    least_shared = 0 if is_paired else max(1, least_shared)
    keys = [_sort_key(row) for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    # rows, and the tokens that each shares with the one before
    groups: list[tuple[list[int], list[int]]] = []
    before = -1
    for number in order:
        if most_tokens and len(rows[number]["input_ids"]) > most_tokens and not is_paired:
            groups.insert(0, ([number], [0]))
            continue
        shared = _shared(compared[before], compared[number]) if before >= 0 and shares else 0
        if before >= 0 and shared >= least_shared:
            groups[-1][0].append(number)
            groups[-1][1].append(shared)
        else:
            groups.append(([number], [0]))
        before = number
    # Trees stand where their first row stood, so that the order of the data stays what it was.
    groups.sort(key=lambda group: min(group[0]))
    return [
        dict(rows[ids[0]]) if len(ids) == 1 else _tree([rows[i] for i in ids], shared)
        for ids, shared in groups
    ]


def _sort_key(row: Row) -> bytes:
    """Returns bytes by which rows sort as their ids do (big-endian); where these are places of
    images, as ids and images: two images of one size have the same ids.
    """
    ids = row["input_ids"].astype(">u4")
    if "image" not in row:
        return ids.tobytes()
    return np.stack([ids, row["image"]], 1).astype(">u8").tobytes()


def _shared(one: Row, other: Row) -> int:
    """Tokens at the beginning that are equal, in all columns but labels; of the last, which is
    copied, in its id.
    """
    shared = min(len(one["input_ids"]), len(other["input_ids"]))
    for name in one.keys() - {"labels"}:
        unequal = one[name][:shared] != other[name][:shared]
        differs = unequal if unequal.ndim == 1 else unequal.any(1)
        if differs.any():
            shared = int(differs.argmax()) + (name != "input_ids")
    return shared


def _tree(rows: Sequence[Row], shared: Sequence[int]) -> Tree:
    """Makes a tree of sorted rows; `shared`: the tokens that each shares with the one before."""
    # the last shared token is copied: it has a label in each row
    firsts = [max(0, tokens - 1) for tokens in shared]
    own = {
        name: np.concatenate([row[name][first:] for row, first in zip(rows, firsts)])
        for name in rows[0]
    }
    ids = own["input_ids"]
    labels = np.full(len(ids), IGNORE_INDEX, np.int32)
    weights = np.zeros(len(ids), np.float32)
    branches = np.zeros(len(ids), np.int32)
    paths = [np.zeros(0, np.int64)]
    end = 0
    for row, first in zip(rows, firsts):
        start = end
        end = end + len(row["input_ids"]) - first
        paths.append(np.concatenate([paths[-1][:first], np.arange(start, end)]))
        if start:
            branches[start] = first + 1
        trained = paths[-1][row["labels"] != IGNORE_INDEX]
        labels[trained] = row["labels"][row["labels"] != IGNORE_INDEX]
        weights[trained] += 1
    # Each row's count stands where its own tokens begin, as the difference to what its path shows
    # so far.
    row_labels = np.zeros(len(ids), np.int32)
    for row, path, first in zip(rows, paths[1:], firsts):
        shown = weights[path].sum() + row_labels[path].sum()
        row_labels[path[first]] = (row["labels"] != IGNORE_INDEX).sum() - shown
    tree = own | {"labels": labels, "branches": branches, "row_labels": row_labels}
    return (
        tree
        if weights.max(initial=0) <= 1
        else tree | {"loss_weights": np.where(weights == 0, 1, weights)}
    )


def cut_tree(tree: Row, most_tokens: int) -> list[Tree]:
    """Cuts a tree, no row of which is longer, into parts of at most `most_tokens`, each some of its
    rows.
    """
    # 1. The branches of the tree in their order, and the depth at which each leaves the path of the
    # one before it.
    starts = [0, *np.flatnonzero(tree["branches"]).tolist()]
    ends = [*starts[1:], len(tree["input_ids"])]
    depths = [0, *(tree["branches"][starts[1:]] - 1).tolist()]
    # 2. Branches go into a part while it has room. The first branch of another part brings its
    # whole path: `depth` tokens that are there already. Of each branch: where its tokens stand, and
    # how many repeat a path.
    parts: list[list[tuple[np.ndarray, int]]] = []
    path = np.zeros(0, np.int64)
    num_tokens = most_tokens
    for start, end, depth in zip(starts, ends, depths):
        own = np.arange(start, end)
        if num_tokens + len(own) > most_tokens:
            parts.append([(np.concatenate([path[:depth], own]), depth)])
            num_tokens = depth
        else:
            parts[-1].append((own, 0))
        path = np.concatenate([path[:depth], own])
        num_tokens = num_tokens + len(own)
    # 3. Repeated labels count in the part where they stood first; here they are 0, and the weight
    # that they had is noted as the row's.
    made = []
    for runs in parts:
        taken = np.concatenate([run for run, _ in runs])
        repeated = runs[0][1]
        part = {name: values[taken] for name, values in tree.items()}
        is_label = part["labels"][:repeated] != IGNORE_INDEX
        weights = part.get("loss_weights", np.ones(len(taken)))[:repeated]
        part["row_labels"][:repeated] += (is_label * weights).astype(np.int32)
        part["labels"][:repeated] = IGNORE_INDEX
        part["branches"][: len(runs[0][0])] = 0  # the first row is there whole
        made.append(part)
    return made


def trees_of(
    rows: Sequence[Row], mode: str, most_tokens: int | None, separates: bool = False
) -> list[Tree]:
    """Returns the rows and trees that a stream packs for one document.

    A stream does not look for rows of other documents that begin alike. `separates` as in
    `grow_trees`.
    """
    is_paired = bool(rows) and not PAIRED.isdisjoint(rows[0])
    grown: list[Tree] = [dict(row) for row in rows]
    if mode != "off" or is_paired:
        grown = grow_trees(rows, shares=mode != "off", most_tokens=most_tokens, separates=separates)
    if most_tokens is None or is_paired:  # what is compared stays together
        return grown
    parts = []
    for row in grown:
        parts += cut_tree(row, most_tokens) if "branches" in row else [row]
    return parts


def write_trees(
    folder: Path,
    rows: TokenizedDocuments,
    mode: str,
    most_tokens: int | None,
    separates: bool = False,
) -> None:
    """Writes trees of `rows` to a folder, and to TREES what they save.

    mode         auto: of rows of one group; all: of any rows; off: of none
    most_tokens  of a pack: larger trees are cut between rows; those that an objective compares
                 never are
    separates    as in `grow_trees`
    """
    # Rows with one key may share a tree: any that begin alike, or those of one group.
    if mode == "all" and PAIRED.isdisjoint(rows.columns):
        names = [name for name in ("input_ids", "image") if name in rows.columns]
        keys: list[Any] = []
        for start, stop in zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist()):
            end = min(stop, start + LEAST_SHARED)
            keys.append(_sort_key({name: rows.columns[name][start:end] for name in names}))
    else:
        groups = [ALONE] * len(rows) if rows.groups is None else rows.groups.tolist()
        keys = [("alone", i) if group == ALONE else group for i, group in enumerate(groups)]
    # The rows that may share a tree, in the order of their first ones.
    found: dict[Any, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    # Grown and written in blocks, so that not all trees are in memory; counted as they go by.
    is_cut = most_tokens is not None and PAIRED.isdisjoint(rows.columns)
    writer = RowsWriter(folder)
    num_trees = 0
    num_cut = 0
    num_parts = 0
    num_repeated = 0
    grown = (
        tree
        for group in found.values()
        for tree in grow_trees(
            [rows[i] for i in group],
            shares=mode != "off",
            most_tokens=most_tokens,
            separates=separates,
        )
    )
    while block := list(islice(grown, BLOCK_TREES)):
        parts = []
        for tree in block:
            cut = cut_tree(tree, most_tokens or 0) if is_cut and "branches" in tree else [tree]
            parts += cut
            num_trees += "branches" in tree
            if len(cut) > 1:
                num_cut = num_cut + 1
                num_parts = num_parts + len(cut)
                num_repeated += sum(len(part["input_ids"]) for part in cut) - len(tree["input_ids"])
        flat = flatten(parts)
        writer.append(flat.columns, flat.lengths)
    writer.close()
    note = (
        f"{counted(num_cut, 'tree', 'is')} over packed_sequence.packed_sequence_size={most_tokens} "
        f"and cut into {num_parts:,}, which repeat {num_repeated:,} tokens of their beginnings"
    )
    saved = rows.num_tokens - load_rows(folder).num_tokens + num_repeated
    facts = {"num_trees": num_trees, "num_saved_tokens": saved, "note": note if num_cut else ""}
    (folder / TREES).write_text(json.dumps(facts))
