"""The collaters of the reference, and its preprocessor: literal examples."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from automodel_lite.nemo_api import collaters
from automodel_lite.nemo_api.collaters import (
    SFTSingleTurnPreprocessor,
    _indexed_mask_to_4d_block_causal,
    add_causal_masks_to_batch,
    batchify,
    create_causal_mask_mapping,
    default_collater,
    extract_key_from_dicts,
    find_last_non_pad_token,
    get_pad_token_from_key,
    make_attention_mask_from_labels,
    neat_packed_collater,
    pack_features_for_thd,
    packed_sequence_thd_collater,
    pad_within_micro,
)
from tests.data.templates import MISTRAL, byte_tokenizer


# ------------------------------------------------------------------------------------------ pack_features_for_thd
def test_features_become_one_record() -> None:
    record = pack_features_for_thd(
        [{"input_ids": [1, 2], "labels": [2, -100]}, {"input_ids": [3], "labels": [-100]}]
    )
    assert record == {
        "input_ids": [1, 2, 3],
        "labels": [2, -100, -100],
        "position_ids": [0, 1, 0],
        "seq_lens": [2, 1],
        "seq_lens_padded": [2, 1],
    }
    assert packed_sequence_thd_collater([record])["seq_lens"].tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ([], "requires at least one feature"),
        ([{"input_ids": [], "labels": []}], "cannot pack an empty sequence"),
        (
            [{"input_ids": [1], "labels": [1, 2]}],
            "labels length 2 does not match input_ids length 1",
        ),
    ],
    ids=["none", "empty", "unequal"],
)
def test_features_that_cannot_be_packed(features: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_features_for_thd(features)


# ------------------------------------------------------------------------------------------------ default_collater
def test_default_collater_pads_lists_and_concatenates_tensors() -> None:
    rows = [
        {
            "input_ids": [1, 2, 3],
            "labels": [1, 2, 3],
            "attention_mask": [1, 1, 1],
            "pixels": torch.ones(4),
        },
        {"input_ids": [4], "labels": [4], "attention_mask": [1], "pixels": torch.zeros(4)},
    ]
    batch = default_collater(rows, pad_seq_len_divisible=4)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert batch["padding_mask"].tolist() == [
        [False, False, False, True],
        [False, True, True, True],
    ]
    assert batch["padding_mask"].dtype == torch.bool
    assert batch["pixels"].shape == (2, 4)


def test_default_collater_takes_pad_ids_from_the_sample() -> None:
    pads = {"input_ids": 7, "labels": -1}
    rows = [
        {"input_ids": [1, 2], "labels": [1, 2], "___PAD_TOKEN_IDS___": pads},
        {"input_ids": [3], "labels": [3]},
    ]
    before = copy.deepcopy(rows)
    batch = default_collater(rows)
    assert batch["input_ids"].tolist() == [[1, 2], [3, 7]]
    assert batch["labels"].tolist() == [[1, 2], [3, -1]]
    assert batch["padding_mask"].tolist() == [[False, False], [False, True]]
    assert rows == before


# ----------------------------------------------------------------------------------------------------- the pieces
def test_batchify() -> None:
    assert batchify([1, 2]).tolist() == [[1, 2]]
    assert batchify([1.5], default_tensor_cls=torch.FloatTensor).tolist() == [[1.5]]
    assert batchify(torch.zeros(2, 3)).shape == (2, 3)


def test_extract_key_from_dicts() -> None:
    assert extract_key_from_dicts([{"a": 1}, {"a": 2}], "a") == [1, 2]


@pytest.mark.parametrize(
    ("rows", "pad", "multiple", "want"),
    [
        ([[1], [2, 3]], 0, None, [[1, 0], [2, 3]]),
        ([[1], [2, 3]], 0, 4, [[1, 0, 0, 0], [2, 3, 0, 0]]),
        ([[1, 2, 3, 4]], 0, 4, [[1, 2, 3, 4]]),
        ([[1, 5], [2]], None, None, [[1, 5], [2, 5]]),
    ],
    ids=["longest", "rounded up", "already a multiple", "last value of the first row"],
)
def test_pad_within_micro(rows: list, pad: int | None, multiple: int | None, want: list) -> None:
    assert pad_within_micro(rows, pad, multiple) == want


def test_pad_within_micro_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        pad_within_micro([], 0)


@pytest.mark.parametrize(
    ("values", "want"),
    [([1, 2, 0, 0], 1), ([1, 2, 3], None), ([0, 0], None), ([], None), ([0, 5, 0], 1)],
    ids=str,
)
def test_find_last_non_pad_token(values: list[int], want: int | None) -> None:
    assert find_last_non_pad_token(values, 0) == want


def test_get_pad_token_from_key() -> None:
    assert [
        get_pad_token_from_key(k)
        for k in ("labels", "attention_mask", "loss_mask", "input_ids", "x")
    ] == [
        -100,
        0,
        0,
        0,
        None,
    ]
    assert get_pad_token_from_key("input_ids", {"input_ids": 5}) == 5
    assert get_pad_token_from_key("labels", {"input_ids": 5}) == -100


@pytest.mark.parametrize(
    ("labels", "want"),
    [
        ([-100, 5, 6, -100, -100], [1, 1, 1, 0, 0]),
        ([5, 6], [1, 1]),
        ([-100, -100], [1, 1]),
        ([], []),
    ],
    ids=str,
)
def test_make_attention_mask_from_labels(labels: list[int], want: list[int]) -> None:
    assert make_attention_mask_from_labels(labels) == want


# ------------------------------------------------------------------------------------------------- causal masks
def test_causal_masks_come_from_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake(**arguments: Any) -> str:
        seen.append(arguments)
        return "mask"

    monkeypatch.setattr(collaters, "create_causal_mask", fake)
    monkeypatch.setattr(collaters, "create_sliding_window_causal_mask", fake)
    masks = create_causal_mask_mapping(MistralConfig(sliding_window=4), 2, 3)
    assert masks == {"full_attention": "mask", "sliding_attention": "mask"}
    assert set(seen[0]) == {
        "config",
        "inputs_embeds",
        "attention_mask",
        "past_key_values",
        "position_ids",
    }
    assert seen[0]["inputs_embeds"].shape == (2, 3)
    assert create_causal_mask_mapping(LlamaConfig(), 2, 3) == {"full_attention": "mask"}


def test_causal_masks_are_added_to_a_batch() -> None:
    config = MistralConfig(sliding_window=2)
    config._attn_implementation = "eager"
    batch = add_causal_masks_to_batch({"input_ids": torch.ones(1, 4, dtype=torch.long)}, config)
    visible = batch["causal_mask_mapping"]["sliding_attention"][0, 0] == 0
    assert visible.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


# -------------------------------------------------------------------------------------------------- neat packing
def test_indexed_mask_to_block_causal() -> None:
    mask = _indexed_mask_to_4d_block_causal(torch.tensor([[1, 1, 2, 0]]))
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    "implementation", ["sdpa", "eager", "flash_attention_2", "flash_attention_3"]
)
def test_neat_packed_collater(implementation: str) -> None:
    row = {"input_ids": [1, 2, 3, 0], "labels": [1, 2, 3, -100], "position_ids": [0, 1, 0, 0]}
    batch = neat_packed_collater(
        [row | {"attention_mask": torch.tensor([1, 1, 2, 0])}], implementation
    )
    assert batch["_packed_seq_ids"].tolist() == [[1, 1, 2, 0]]
    assert batch["attention_mask"].shape == ((1, 4) if "flash" in implementation else (1, 1, 4, 4))
    single = neat_packed_collater([row | {"attention_mask": [1, 1, 1, 0]}], implementation)
    assert "_packed_seq_ids" not in single


# ------------------------------------------------------------------------------------------------- preprocessor
class LettersTokenizer:
    """One id a letter; 1 starts a text, 0 pads."""

    all_special_ids = (0, 1)
    pad_token_id = 0

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] + [ord(letter) - 87 for letter in text] for text in texts]}


class Completions:
    def get_context(self, examples: Any) -> list[str]:
        return examples["context"]

    def get_target(self, examples: Any) -> list[str]:
        return examples["target"]


def test_single_turn_preprocessor() -> None:
    raw = datasets.Dataset.from_dict({"context": ["ab", "abcdefgh"], "target": ["c", "d"]})
    preprocessor = SFTSingleTurnPreprocessor(LettersTokenizer())
    assert (preprocessor.block_size, preprocessor.preprocessing_num_workers) == (None, 1)
    assert (preprocessor.overwrite_cache, preprocessor.pad_to_max_length) == (False, True)
    preprocessor.pad_to_max_length = False
    row = preprocessor.process(raw, Completions())[0]
    assert row["input_ids"] == [1, 10, 11, 12]
    assert row["labels"] == [-100, -100, 12, -100]
    assert row["loss_mask"] == [0, 0, 1, 0]
    assert row["attention_mask"] == [1, 1, 1, 1]


@pytest.mark.parametrize(("block_size", "length"), [(None, 16), (6, 6)])
def test_single_turn_preprocessor_pads_to_eight(block_size: int | None, length: int) -> None:
    raw = datasets.Dataset.from_dict({"context": ["ab", "abcdefgh"], "target": ["c", "d"]})
    preprocessor = SFTSingleTurnPreprocessor(LettersTokenizer())
    preprocessor.block_size = block_size
    rows = preprocessor.process(raw, Completions())
    assert {len(row[key]) for row in rows for key in row} == {length}
    assert rows[0]["labels"][:6] == [-100, -100, 12, -100, -100, -100]
    assert rows[0]["attention_mask"][:6] == [1, 1, 1, 1, 0, 0]


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


def test_an_empty_context_gives_as_many_labels_as_ids() -> None:
    raw = datasets.Dataset.from_dict({"sum": ["", "1+1="], "total": ["2", "2"]})
    processor = SFTSingleTurnPreprocessor(byte_tokenizer(MISTRAL))
    processor.pad_to_max_length = False
    first, second = processor.process(raw, Sums())
    assert first["input_ids"] == ids("2</s>")
    assert first["labels"] == [ids("</s>")[0], _]
    assert len(second["labels"]) == len(second["input_ids"]) == 6
