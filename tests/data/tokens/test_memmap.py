"""Token files: written and read back, Megatron's as they are, labels that end at boundaries."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import DocumentReader
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.datasets.memmap import MEGATRON_MAGIC, MemmapCorpus, write_memmap
from tests.data.templates import MARKED, byte_tokenizer

_ = -100
DOCUMENTS = [[5, 6, 7], [8], [9, 1]]
EXPECTED = [([5, 6, 7], [6, 7, _]), ([8], [_]), ([9, 1], [1, _])]


def as_lists(rows: DocumentReader) -> list[tuple[list[int], list[int]]]:
    return [(rows[i]["input_ids"].tolist(), rows[i]["labels"].tolist()) for i in range(len(rows))]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    write_memmap(tmp_path / "a", DOCUMENTS, dtype)
    corpus = MemmapCorpus(str(tmp_path / "a.bin"))
    assert as_lists(corpus.rows) == EXPECTED
    assert corpus.rows.lengths.tolist() == [3, 1, 2]
    assert corpus.rows[0]["input_ids"].dtype == dtype
    assert corpus.description == "a.bin: 3 documents, 6 tokens, mapped as they are"


def test_rows_are_views_of_the_file(tmp_path: Path) -> None:
    write_memmap(tmp_path / "a", DOCUMENTS, "uint16")
    rows = MemmapCorpus(str(tmp_path / "a")).rows
    assert not rows[0]["input_ids"].flags.owndata
    assert len(pickle.dumps(rows)) < 1000
    assert as_lists(pickle.loads(pickle.dumps(rows))) == EXPECTED


def test_a_separator_ends_documents(tmp_path: Path) -> None:
    np.array([5, 6, 0, 7, 0, 8], np.uint16).tofile(tmp_path / "a.bin")
    rows = MemmapCorpus(str(tmp_path / "a.bin"), dtype="uint16", separator_id=0).rows
    assert as_lists(rows) == [([5, 6, 0], [6, 0, _]), ([7, 0], [0, _]), ([8], [_])]


def megatron_pair(path: Path, sequences: list[list[int]], bounds: list[int], code: int = 8) -> None:
    """Written from the layout of Megatron's indexed datasets: tokens uint16 (code 8)."""
    tokens = np.array([token for sequence in sequences for token in sequence], np.uint16)
    lengths = [len(sequence) for sequence in sequences]
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    tokens.tofile(path.with_suffix(".bin"))
    path.with_suffix(".idx").write_bytes(
        MEGATRON_MAGIC
        + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
        + np.array(lengths, np.int32).tobytes()
        + np.array(pointers, np.int64).tobytes()
        + np.array(bounds, np.int64).tobytes()
    )


def test_megatron_pairs(tmp_path: Path) -> None:
    # the first document has two sequences
    megatron_pair(tmp_path / "a", [[5, 6], [7], [8], [9, 1]], [0, 2, 3, 4])
    assert as_lists(MemmapCorpus(str(tmp_path / "a.bin")).rows) == EXPECTED


def test_broken_megatron_indices(tmp_path: Path) -> None:
    megatron_pair(tmp_path / "a", DOCUMENTS, [0, 1, 2, 3])
    index = tmp_path / "a.idx"
    good = index.read_bytes()
    for content, message in (
        (good[:20], "is too short for a Megatron index"),
        (good[:-3], "is cut off: it should hold 3 sequences"),
        (b"X" + good[1:], "is not a Megatron index"),
    ):
        index.write_bytes(content)
        with pytest.raises(DataError, match=message):
            MemmapCorpus(str(tmp_path / "a.bin"))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset.path=.*none: there is no file .*none.bin"):
        MemmapCorpus(str(tmp_path / "none"))
    np.array([1, 2, 3], np.uint16).tofile(tmp_path / "a.bin")
    for described in ({}, {"dtype": "uint16"}, {"separator_id": 0}):
        with pytest.raises(
            ConfigError,
            match=r"a.bin has no a.idx: set dataset.dtype=uint16 or uint32 and dataset.sep",
        ):
            MemmapCorpus(str(tmp_path / "a.bin"), **described)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dataset.separator_id=70000 is not a token of uint16"):
        MemmapCorpus(str(tmp_path / "a.bin"), dtype="uint16", separator_id=70000)
    with pytest.raises(DataError, match="6 bytes are not a whole number of uint32 tokens"):
        MemmapCorpus(str(tmp_path / "a.bin"), dtype="uint32", separator_id=0)
    with pytest.raises(
        DataError, match="document 0 holds the token 70000; uint16 holds up to 65535"
    ):
        write_memmap(tmp_path / "b", [[70000]], "uint16")
    with pytest.raises(ConfigError, match="dtype=uint32 must be one of uint8, int8, int16, int32"):
        write_memmap(tmp_path / "c", [[1]], "uint32")


def test_a_corpus_is_written_where_it_is_read(tmp_path: Path) -> None:
    write_memmap(str(tmp_path / "corpus.v1"), DOCUMENTS, np.uint16)  # type: ignore[arg-type]
    assert as_lists(MemmapCorpus(str(tmp_path / "corpus.v1")).rows) == EXPECTED


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_memmap(tmp_path / "a", [[5], [900]], "uint16")
    with pytest.raises(
        DataError,
        match="train: document 1 holds the token 900, and the tokenizer has ids up to 260",
    ):
        tokenize_documents(
            MemmapCorpus(str(tmp_path / "a")), TokenizeJob(byte_tokenizer(MARKED)), tmp_path
        )


def test_packs_are_read_from_the_file(tmp_path: Path) -> None:
    write_memmap(tmp_path / "a", DOCUMENTS, "uint16")
    corpus = MemmapCorpus(str(tmp_path / "a"))
    data = tokenize_documents(corpus, TokenizeJob(byte_tokenizer(MARKED)), tmp_path)
    assert data.counts["train"].num_label_tokens == 3
    packs = PackedDataset(data.train, plan_packs(data.train.lengths, 4, strategy="next_fit"))
    assert [pack["input_ids"].tolist() for pack in map(packs.__getitem__, range(2))] == [
        [5, 6, 7, 8],
        [9, 1, 0, 0],
    ]
    assert [pack["labels"].tolist() for pack in map(packs.__getitem__, range(2))] == [
        [6, 7, _, _],
        [1, _, _, _],
    ]


def test_a_file_that_is_cut_short_while_it_is_mapped(tmp_path: Path) -> None:
    """Reading on would end the process by SIGBUS."""
    write_memmap(tmp_path / "a", [[1, 2, 3]] * 10_000, "uint16")
    rows = MemmapCorpus(str(tmp_path / "a")).rows
    assert rows[9_999]["input_ids"].tolist() == [1, 2, 3]
    os.truncate(tmp_path / "a.bin", 100)
    with pytest.raises(DataError, match=r"a.bin: the file was truncated while it was being read"):
        rows[9_999]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.idx", b"\x93NUMPY", r"a.idx: is too short"),
        (
            "a.bin",
            b"1234",
            r"a.bin: its index belongs to another file: documents are outside the 2 tokens",
        ),
    ],
)
def test_damaged_companions_are_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    write_memmap(tmp_path / "a", [[1, 2, 3]] * 10, "uint16")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        MemmapCorpus(str(tmp_path / "a"))
