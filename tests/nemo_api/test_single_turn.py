from __future__ import annotations

import datasets
import pytest

from automodel_lite.nemo_api.single_turn import SFTSingleTurnPreprocessor
from tests.data.templates import MISTRAL, byte_tokenizer

_ = -100


class Sums:
    def get_context(self, examples: dict[str, list]) -> list[str]:
        return examples["sum"]

    def get_target(self, examples: dict[str, list]) -> list[str]:
        return [f"{total}</s>" for total in examples["total"]]


RAW = datasets.Dataset.from_dict({"sum": ["1+1=", "20+30="], "total": ["2", "50"]})


def rows(**settings: object) -> datasets.Dataset:
    tokenizer = byte_tokenizer(MISTRAL)
    processor = SFTSingleTurnPreprocessor(tokenizer)
    for name, value in settings.items():
        setattr(processor, name, value)
    return processor.process(RAW, Sums())


def ids(text: str) -> list[int]:
    return byte_tokenizer(MISTRAL)(text)["input_ids"]


def test_labels_are_the_target_one_place_ahead() -> None:
    first, second = rows(pad_to_max_length=False)
    assert first["input_ids"] == ids("1+1=2</s>")
    assert first["labels"] == [_, _, _, *ids("2</s>"), _]
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 0]
    assert first["attention_mask"] == [1] * 6
    assert second["labels"] == [_] * 5 + [*ids("50</s>"), _]


def test_rows_are_padded_to_the_longest_rounded_up_to_eight() -> None:
    padded = rows()
    assert [len(row) for row in padded["input_ids"]] == [16, 16]
    assert padded[0]["labels"][6:] == [_] * 10
    assert padded[0]["attention_mask"] == [1] * 6 + [0] * 10
    assert padded[0]["loss_mask"][6:] == [0] * 10


@pytest.mark.parametrize("block_size", [8, 12])
def test_no_row_is_longer_than_the_block(block_size: int) -> None:
    padded = rows(block_size=block_size)
    assert [len(row) for row in padded["labels"]] == [block_size, block_size]


def test_defaults() -> None:
    processor = SFTSingleTurnPreprocessor(byte_tokenizer(MISTRAL))
    assert (processor.block_size, processor.preprocessing_num_workers) == (None, 1)
    assert (processor.overwrite_cache, processor.pad_to_max_length) == (False, True)
