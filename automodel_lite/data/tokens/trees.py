"""Rows that share a beginning become one row, a tree, in which the beginning is stored, and computed, once.

    rows of a chat     q a | q b c | q b d e        sorted: rows with like beginnings are neighbors
    tree               q a q b c b d e              each row, from the last token that it shares with the one before
    branches           0 0 1 0 0 2 0 0              1 + the position at which a branch begins (paths.py)
    loss_weights       1 1 …                        rows that train a label: where q b is trained on twice, 2
    row_labels         0 0 1 …                      what labels on the path do not tell of the number that a row trains

Sorted rows are a tree in depth-first order, because what two neighbors share is on the path of all rows between them.
A row may be the beginning of another: it ends in a branch of one token. Trees know nothing of the size of packs; one
that is too large for a pack is cut between rows when it is read, and what a later part repeats of the path has its
labels in the first part alone, so that every label counts once.

Legend: N rows, M branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.data.tokens.token_rows import ALONE, RowCounts, Rows, RowsWriter, TokenRows, flatten, load_rows
from automodel_lite.thd import IGNORE_INDEX

LEAST_SHARED = 64
"""Tokens that neighbors must share: a branch costs a copied token, a segment of attention and a piece of each scan."""
MODES = ("auto", "off", "all")
BLOCK_TREES = 1000
PAIRED = "answers"
"""The column of rows that an objective compares: all of one group are one unit of packing, and never cut apart."""

Row = Mapping[str, np.ndarray]
Tree = dict[str, np.ndarray]


def grow_trees(rows: Sequence[Row], least_shared: int = LEAST_SHARED, shares: bool = True) -> list[Tree]:
    """Rows of one source -> trees of those whose beginnings are alike, and the other rows as they are.

    A tree has the columns of a row, `branches`, `row_labels`, and `loss_weights` where a label is trained on by more
    rows than one.
    Rows with labels that are not the next token, or with weights of their own, stay rows: a shared token has one label
    and one value of each column.

    shares  False: what is put together for other reasons (`PAIRED`) holds each row whole
    """
    for row in rows if len(rows) > 1 else ():
        ids, labels = row["input_ids"], row["labels"]
        has_label = labels[:-1] != IGNORE_INDEX
        is_next = bool((labels[:-1] == ids[1:])[has_label].all()) and (not len(ids) or labels[-1] == IGNORE_INDEX)
        if not is_next or "loss_weights" in row:
            return [dict(row) for row in rows]
    if len(rows) < 2:
        return [dict(row) for row in rows]
    least_shared = 0 if PAIRED in rows[0] else max(1, least_shared)
    # Big-endian bytes of ids sort as the ids do.
    keys = [row["input_ids"].astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    groups: list[tuple[list[int], list[int]]] = []  # rows, and the tokens that each shares with the one before
    for before, number in zip([-1, *order], order):
        shared = _shared(rows[before], rows[number]) if before >= 0 and shares else 0
        if before >= 0 and shared >= least_shared:
            groups[-1][0].append(number)
            groups[-1][1].append(shared)
        else:
            groups.append(([number], [0]))
    # Trees stand where their first row stood, so that the order of the data stays what it was.
    groups.sort(key=lambda group: min(group[0]))
    return [dict(rows[ids[0]]) if len(ids) == 1 else _tree([rows[i] for i in ids], shared) for ids, shared in groups]


def _shared(one: Row, other: Row) -> int:
    """Tokens at the beginning that are equal, in all columns but labels; of the last, which is copied, in its id."""
    shared = min(len(one["input_ids"]), len(other["input_ids"]))
    for name in one.keys() - {"labels"}:
        unequal = one[name][:shared] != other[name][:shared]
        differs = unequal if unequal.ndim == 1 else unequal.any(1)
        if differs.any():
            shared = int(differs.argmax()) + (name != "input_ids")
    return shared


def _tree(rows: Sequence[Row], shared: Sequence[int]) -> Tree:
    """Makes a tree of sorted rows; `shared`: the tokens that each shares with the one before."""
    firsts = [max(0, tokens - 1) for tokens in shared]  # the last shared token is copied: it has a label in each row
    own = {name: np.concatenate([row[name][first:] for row, first in zip(rows, firsts)]) for name in rows[0]}
    ids = own["input_ids"]
    labels = np.full(len(ids), IGNORE_INDEX, np.int32)
    weights, branches = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
    paths, end = [np.zeros(0, np.int64)], 0
    for row, first in zip(rows, firsts):
        start, end = end, end + len(row["input_ids"]) - first
        paths.append(np.concatenate([paths[-1][:first], np.arange(start, end)]))
        if start:
            branches[start] = first + 1
        trained = paths[-1][row["labels"] != IGNORE_INDEX]
        labels[trained] = row["labels"][row["labels"] != IGNORE_INDEX]
        weights[trained] += 1
    # Each row's count stands where its own tokens begin, as the difference to what its path shows so far.
    row_labels = np.zeros(len(ids), np.int32)
    for row, path, first in zip(rows, paths[1:], firsts):
        shown = (labels[path] != IGNORE_INDEX).sum() + row_labels[path].sum()
        row_labels[path[first]] = (row["labels"] != IGNORE_INDEX).sum() - shown
    tree = own | {"labels": labels, "branches": branches, "row_labels": row_labels}
    return tree if weights.max(initial=0) <= 1 else tree | {"loss_weights": np.where(weights == 0, 1, weights)}


def cut_tree(tree: Row, most_tokens: int) -> list[Tree]:
    """Parts of a tree of at most `most_tokens`, each some of its rows; a row that is longer is a part of its own."""
    starts = [0, *np.flatnonzero(tree["branches"]).tolist()]
    ends, depths = [*starts[1:], len(tree["input_ids"])], [0, *(tree["branches"][starts[1:]] - 1).tolist()]
    parts: list[list[tuple[np.ndarray, int]]] = []  # of each: where its tokens stand, and how many repeat a path
    path, num_tokens = np.zeros(0, np.int64), most_tokens
    for start, end, depth in zip(starts, ends, depths):
        own = np.arange(start, end)
        if num_tokens + len(own) > most_tokens:
            parts.append([(np.concatenate([path[:depth], own]), depth)])
            num_tokens = depth
        else:
            parts[-1].append((own, 0))
        path, num_tokens = np.concatenate([path[:depth], own]), num_tokens + len(own)
    made = []
    for runs in parts:
        taken, repeated = np.concatenate([run for run, _ in runs]), runs[0][1]
        part = {name: values[taken] for name, values in tree.items()}
        part["row_labels"][:repeated] += part["labels"][:repeated] != IGNORE_INDEX
        part["labels"][:repeated] = IGNORE_INDEX
        part["branches"][: len(runs[0][0])] = 0  # the first row is there whole
        made.append(part)
    return made


def trees_of(rows: Sequence[Row], mode: str, most_tokens: int | None) -> list[Tree]:
    """What becomes of the rows of one document of a stream, whose other documents are not searched for like ones."""
    is_paired = bool(rows) and PAIRED in rows[0]
    grown = grow_trees(rows, shares=mode != "off") if mode != "off" or is_paired else [dict(row) for row in rows]
    is_cut = most_tokens is not None and not is_paired
    parts = [cut_tree(row, most_tokens or 0) if is_cut and "branches" in row else [row] for row in grown]
    return [part for of_tree in parts for part in of_tree]


def write_trees(folder: Path, mode: str) -> RowCounts:
    """Makes trees of the rows of a folder that `RowsWriter` wrote, in place; counts what they save.

    mode  auto: of rows of one group; all: of any rows; off: of none
    """
    rows = load_rows(folder)
    (folder / "groups.bin").unlink(missing_ok=True)
    if mode == "all" and PAIRED not in rows.columns:
        spans = zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist())
        keys: list[Any] = [rows.columns["input_ids"][start:stop][:LEAST_SHARED].tobytes() for start, stop in spans]
    elif rows.groups is not None and (mode == "auto" or PAIRED in rows.columns):
        keys = [("alone", i) if group == ALONE else group for i, group in enumerate(rows.groups.tolist())]
    else:
        return RowCounts()
    # The rows that may share a tree, in the order of their first ones.
    found: dict[Any, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    groups = list(found.values())
    if len(groups) == len(rows):
        return RowCounts()
    trees, writer = folder / "trees", RowsWriter(folder / "trees")
    grown = (tree for group in groups for tree in grow_trees([rows[i] for i in group], shares=mode != "off"))
    num_trees = 0
    while block := list(islice(grown, BLOCK_TREES)):
        num_trees += sum("branches" in tree for tree in block)
        flat = flatten(block)
        writer.append(flat.columns, flat.lengths)
    writer.close()
    saved = rows.num_tokens - load_rows(trees).num_tokens
    for file in trees.iterdir():
        file.replace(folder / file.name)
    trees.rmdir()
    return RowCounts(num_trees=num_trees, num_saved_tokens=saved)


class TreeRows(Rows):
    """Trees, of which those over `most_tokens` are cut between rows; none of what an objective compares."""

    def __init__(self, trees: TokenRows, most_tokens: int | None = None):
        most_tokens = None if PAIRED in trees.columns else most_tokens
        self.trees, self.most_tokens = trees, most_tokens
        # Few trees are cut: these are cut once here for the lengths of their parts, and again when a part is read.
        lengths = trees.lengths
        large = np.flatnonzero(lengths > (most_tokens or lengths.max(initial=0)))
        parts = {int(tree): cut_tree(trees[int(tree)], most_tokens or 0) for tree in large}
        num_parts = np.ones(len(lengths), np.int64)
        num_parts[large] = [len(parts[int(tree)]) for tree in large]
        self._tree = np.arange(len(lengths)).repeat(num_parts)
        firsts = num_parts.cumsum() - num_parts  # of each tree, its first part
        self._part = np.arange(len(self._tree)) - firsts[self._tree]
        self.lengths, self.row_lengths = lengths[self._tree].astype(np.int64), _longest_rows(trees)[self._tree]
        for tree, cut in parts.items():
            first = int(firsts[tree])
            self.lengths[first : first + len(cut)] = [len(part["input_ids"]) for part in cut]
        many, repeated = num_parts[num_parts > 1], self.num_tokens - trees.num_tokens
        if len(many):
            self.note = (
                f"{len(many):,} trees over packed_sequence.packed_sequence_size={most_tokens} are cut into "
                f"{many.sum():,}, which repeat {repeated:,} tokens of their beginnings"
            )

    @property
    def flat(self) -> TokenRows:
        return self.trees

    def with_columns(self, columns: Mapping[str, np.ndarray]) -> TreeRows:
        flat = self.trees.with_columns(columns)
        return TreeRows(flat.flat, self.most_tokens)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        tree, part = int(self._tree[index]), int(self._part[index])
        whole = self.trees[tree]
        is_cut = self.lengths[index] != self.trees.lengths[tree]
        return cut_tree(whole, self.most_tokens or 0)[part] if is_cut else whole

    def __reduce__(self) -> tuple:
        return TreeRows, (self.trees, self.most_tokens)


def _longest_rows(trees: TokenRows) -> np.ndarray:
    """Returns int64 [N]: tokens of the longest row of each tree."""
    branches = trees.columns["branches"]
    # Branches of one token, one after the other, are one run of the column.
    run_lengths = np.diff(np.append(branches.at, branches.num_tokens)) * (branches.values > 0)
    within = np.arange(run_lengths.sum()) - (run_lengths.cumsum() - run_lengths).repeat(run_lengths)
    starts, depths = branches.at.repeat(run_lengths) + within, branches.values.repeat(run_lengths) - 1
    begins = np.concatenate([trees.offsets[:-1], starts])
    order = begins.argsort(kind="stable")
    lengths = np.diff(np.append(begins[order], trees.num_tokens))
    lengths += np.concatenate([np.zeros(len(trees), np.int64), depths])[order]
    return np.maximum.reduceat(lengths, np.flatnonzero(order < len(trees))) if len(trees) else lengths
