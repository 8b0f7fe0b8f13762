from __future__ import annotations

import os

import pytest

from automodel_lite.errors import ConfigError, DataError
from automodel_lite.nemo_api.packed_sequence import tokenize_dataset_parallel


class Rows:
    """Tokenizes when read; rows of it are at first without tokens, and it cannot be pickled."""

    def __init__(self, num: int):
        self.num = num
        self.tokenize = lambda i: list(range(i % 5))

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> dict:
        if i == 13_000:
            raise ValueError(f"row {i} is bad")
        return {"input_ids": self.tokenize(i), "number": i, "process": os.getpid()}


@pytest.mark.parametrize(("num", "num_proc"), [(7, 1), (7, 3), (2_501, 2)])
def test_rows_in_order(num: int, num_proc: int) -> None:
    rows = tokenize_dataset_parallel(Rows(num), num_proc)
    assert rows["number"][:] == list(range(num))
    assert rows["input_ids"][:] == [list(range(i % 5)) for i in range(num)]
    assert (os.getpid() in rows["process"][:]) == (num_proc == 1)


def test_the_error_of_a_row() -> None:
    with pytest.raises(ValueError, match="row 13000 is bad"):
        tokenize_dataset_parallel(Rows(13_001), 2)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="num_proc=0 must be at least 1 process"):
        tokenize_dataset_parallel(Rows(3), 0)
    with pytest.raises(DataError, match="there are no rows to tokenize"):
        tokenize_dataset_parallel(Rows(0), 2)
