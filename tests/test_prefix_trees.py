"""Index maths of trees, on the drawing of prefix_trees.py and on random trees against a walk token by token."""

from __future__ import annotations

import random

import pytest
import torch

from automodel_lite.prefix_trees import concatenated_ranges, find_nodes, find_pieces
from tests.attention.trees import random_rows, tree_of


def test_the_nodes_of_three_rows() -> None:
    nodes = find_nodes(torch.tensor([0, 11]), torch.tensor([0, 1, 2, 3, 4, 2, 3, 4, 3, 4, 5]))
    assert nodes is not None
    assert nodes.start.tolist() == [0, 5, 8]
    assert nodes.end.tolist() == [5, 8, 11]
    assert nodes.path_lens.tolist() == [5, 5, 6]
    assert nodes.paths.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 0, 1, 5, 8, 9, 10]
    assert nodes.before.tolist() == [-1, 1, 5]
    assert nodes.until.tolist() == [11, 11, 5, 5, 5, 11, 8, 8, 11, 11, 11]
    pieces = find_pieces(nodes)
    assert [x.tolist() for x in pieces] == [[0, 2, 5, 6, 8], [2, 3, 1, 2, 3], [-1, 0, 0, 2, 2]]


def test_a_tree_between_documents() -> None:
    """A slot of 3 tokens of padding, whose positions go on or start over, and an empty slot."""
    cu, lens = torch.tensor([0, 2, 9, 9, 12]), torch.tensor([2, 4, 0, 3])
    for padding in ([2, 3, 4], [0, 1, 2]):
        positions = torch.tensor([0, 1, 0, 1, 2, 1, *padding, 0, 1, 2])
        nodes = find_nodes(cu, positions, lens)
        assert nodes is not None
        assert nodes.start.tolist() == [0, 2, 5, 9]
        assert nodes.end.tolist() == [2, 5, 9, 12]
        assert nodes.paths.tolist() == [0, 1, 2, 3, 4, 2, 5, 6, 7, 8, 9, 10, 11]


def test_documents_without_branches_have_no_nodes() -> None:
    assert find_nodes(torch.tensor([0, 2, 5]), torch.tensor([0, 1, 0, 1, 2])) is None


@pytest.mark.parametrize("positions", [[0, 1, 3, 1], [0, 1, 1, 3], [1, 2, 0, 1]])
def test_positions_that_leave_tokens_out_are_refused(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="position_ids at"):
        find_nodes(torch.tensor([0, 4]), torch.tensor(positions))


@pytest.mark.parametrize("seed", range(40))
def test_random_trees_hold_their_rows(seed: int) -> None:
    """Paths spell the rows, labels too, and `until` hides exactly what is on no path to the query."""
    r = random.Random(seed)
    rows = random_rows(r, 9, r.randint(1, 6), 5)
    ids, _, positions, _ = tree_of(rows)
    nodes = find_nodes(torch.tensor([0, len(ids)]), torch.tensor(positions))
    paths = (
        [list(range(len(ids)))]
        if nodes is None
        else [x.tolist() for x in nodes.paths.split(nodes.path_lens.tolist())]
    )
    assert sorted([ids[i] for i in path] for path in paths) == sorted(row for row, _ in rows)
    if nodes is None:
        return
    visible = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for path, start in zip(paths, nodes.start.tolist()):
        for place, query in enumerate(path):
            if query >= start:
                visible[query, path[: place + 1]] = True
    i = torch.arange(len(ids))
    assert torch.equal(visible, (i[None] <= i[:, None]) & (i[:, None] < nodes.until[None]))


def test_concatenated_ranges() -> None:
    got = concatenated_ranges(torch.tensor([0, 5, 7]), torch.tensor([2, 8, 7]))
    assert got.tolist() == [0, 1, 5, 6, 7]
