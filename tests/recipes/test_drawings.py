from __future__ import annotations

import numpy as np
import torch

from automodel_lite.extras.inspection import draw_histogram, draw_mask, draw_pack


def test_a_letter_a_document_and_dots_for_padding() -> None:
    assert draw_pack([3, 4, 0], [4, 4, 8], width=16) == "AAA.BBBB........"
    assert draw_pack([1024, 1024], [1024, 1024], width=8) == "AAAABBBB"


def test_documents_do_not_see_each_other() -> None:
    assert draw_mask([2, 1, 0], [2, 2, 1], width=5) == ["█····", "██···", "··█··", "·····", "·····"]


def test_cells_that_are_seen_in_part() -> None:
    assert draw_mask([3, 5], [3, 5], width=4) == ["█···", "▄█··", "·▄█·", "·▄██"]


def test_branches_do_not_see_each_other() -> None:
    """The rows a b c and a b d: the second b is the copy that predicts d."""
    drawn = draw_mask([5, 0], [5, 1], width=6, positions=torch.tensor([0, 1, 2, 1, 2, 0]))
    assert drawn == ["█·····", "██····", "███···", "█··█··", "█··██·", "······"]


def test_histogram_counts_every_document() -> None:
    lines = draw_histogram(np.array([1, 1, 1, 5, 8]), limit=5, bins=4, width=6)
    assert lines == [
        "1 to 2  ██████ 3",
        "3 to 4         0",
        "5 to 5  ██     1",
        "6 to 6         0  over packed_sequence_size",
        "7 to 8  ██     1  over packed_sequence_size",
    ]
