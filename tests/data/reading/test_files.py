"""Files of every kind, folders, globs, splits and hub names as documents."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from automodel_lite.data.reading import paths
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import ConfigError, DataError


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return str(path)


# ---------------------------------------------------------------------------------------------------------- files
ROWS = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)]


DOCUMENTS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(5)]


def documents(path: str, **options: Any) -> list[dict]:
    rows = FilesDataset(path, **options).train
    return [rows[i] for i in range(len(rows))]


def write_csv(path: Path, delimiter: str) -> None:
    lines = [
        delimiter.join(["question", "answer"]),
        *(delimiter.join(row.values()) for row in ROWS),
    ]
    path.write_text("\n".join(lines) + "\n")


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "no_last_break.jsonl": lambda path: path.write_bytes(LINES.rstrip()),
    "blank_lines.jsonl": lambda path: path.write_bytes(b"\n" + LINES.replace(b"\n", b"\n \r\n\n")),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "pretty.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
    "inside.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "lines.json": lambda path: path.write_bytes(LINES),
    "a.csv": lambda path: write_csv(path, ","),
    "a.tsv": lambda path: write_csv(path, "\t"),
    "a.parquet": lambda path: datasets.Dataset.from_list(ROWS).to_parquet(path),
    "folder_of_arrow": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "dict_of_arrow": lambda path: datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS)}
    ).save_to_disk(path),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(pyarrow.compress(LINES, "zstd", asbytes=True)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_every_kind_give_the_same_documents(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert documents(str(tmp_path / name)) == DOCUMENTS


def test_globs_folders_and_lists_keep_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "b.jsonl", ROWS[3:])
    (folder / "a.json").write_text(json.dumps(ROWS[:3]))
    (folder / "README.md").write_text("not data")
    assert documents(str(folder)) == DOCUMENTS
    assert documents(str(folder / "*.json*")) == DOCUMENTS
    assert documents([str(folder / "a.json"), str(folder / "b.jsonl")]) == DOCUMENTS
    rows = FilesDataset(str(folder)).train
    assert [rows.where(i) for i in (0, 2, 3, 4)] == [
        "a.json[1]",
        "a.json[3]",
        "b.jsonl:1",
        "b.jsonl:2",
    ]


@pytest.mark.parametrize(
    ("unit", "texts", "places"),
    [
        ("file", ["one\ntwo\n\n\nthree"], ["a.txt:1"]),
        ("paragraph", ["one\ntwo", "three"], ["a.txt:1", "a.txt:5"]),
        ("line", ["one", "two", "three"], ["a.txt:1", "a.txt:2", "a.txt:5"]),
    ],
)
def test_text_files_are_plain_text(
    tmp_path: Path, unit: str, texts: list[str], places: list[str]
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    found = FilesDataset(str(tmp_path / "a.txt"), text_unit=unit)
    assert [found.train[i] for i in range(len(found.train))] == [{"text": text} for text in texts]
    assert [found.train.where(i) for i in range(len(found.train))] == places
    assert f"a document is a {unit} of text, median " in found.description


def test_an_encoding_can_be_given(tmp_path: Path) -> None:
    """Excel writes cp1252; the error names the cure."""
    (tmp_path / "a.csv").write_bytes("question,answer\nGrüße?,Öl\n".encode("cp1252"))
    with pytest.raises(
        DataError, match=r"a.csv:2: byte 0xfc is not UTF-8; in cp1252 .* it is 'ü'.*encoding=cp1252"
    ):
        documents(str(tmp_path / "a.csv"))
    assert documents(str(tmp_path / "a.csv"), encoding="cp1252") == [
        {"prompt": "Grüße?", "completion": "Öl"}
    ]
    (tmp_path / "a.txt").write_bytes("Grüße".encode("latin-1"))
    assert documents(str(tmp_path / "a.txt"), encoding="latin-1") == [{"text": "Grüße"}]
    with pytest.raises(
        ConfigError, match=r"dataset.encoding=utf-16 cannot be read line by line: convert"
    ):
        documents(str(tmp_path / "a.txt"), encoding="utf-16")
    with pytest.raises(ConfigError, match=r"dataset.encoding=utf-9 is unknown"):
        documents(str(tmp_path / "a.txt"), encoding="utf-9")


def test_what_is_not_a_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to would be waited for, for ever; a disk would be searched for an hour."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"dataset.path=.*a.jsonl is neither a file nor a folder"):
        documents(str(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match=r"is a folder without data: it has no .jsonl"):
        documents(str(tmp_path))
    with pytest.raises(ConfigError, match=r"dataset.path= is empty"):
        documents("")
    monkeypatch.setattr(paths, "MAX_ENTRIES", 3)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x")
    with pytest.raises(
        ConfigError, match=r"holds over 3 files and folders: name the one with the data"
    ):
        documents(str(tmp_path))


def test_validation_documents(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    other = jsonl(tmp_path / "b.jsonl", ROWS[:2])
    third = jsonl(tmp_path / "c.jsonl", ROWS[::-1])
    by_name = FilesDataset(path, val_path={"one": other, "two": third})
    assert {name: len(rows) for name, rows in by_name.val.items()} == {"one": 2, "two": 5}
    split = FilesDataset(path, val_frac=0.4, seed=3)
    again = FilesDataset(path, val_frac=0.4, seed=3)
    val = [split.val["val"][i]["prompt"] for i in range(2)]
    assert sorted(val + [split.train[i]["prompt"] for i in range(3)]) == [
        "q0",
        "q1",
        "q2",
        "q3",
        "q4",
    ]
    assert val == [again.val["val"][i]["prompt"] for i in range(2)]
    with pytest.raises(ConfigError, match="set only one of them"):
        FilesDataset(path, val_frac=0.4, val_path=other)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset.path=.*/none.jsonl does not exist \(looked in "
    ):
        FilesDataset(str(tmp_path / "none.jsonl"))
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"unknown kind of file"):
        FilesDataset(str(tmp_path / "a.doc"))


def test_files_have_no_splits(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"dataset.val_split=test: .*a.jsonl has no splits"):
        FilesDataset(path, val_split="test")
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")}
    ).save_to_disk(tmp_path / "saved")
    saved = FilesDataset(str(tmp_path / "saved"), val_split="test")
    assert (len(saved.train), len(saved.val["val"])) == (5, 5)
    with pytest.raises(
        ConfigError, match=r"dataset.split=dev is not in .*saved, which has train, test"
    ):
        FilesDataset(str(tmp_path / "saved"), split="dev")


def test_hub_names_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(
        ConfigError,
        match=r"dataset.path=org/set is not a local file .* \(Couldn't reach the hub\)\.",
    ):
        FilesDataset("org/set")


def test_hub_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, name, split: datasets.Dataset.from_list(ROWS)
    )
    loaded = FilesDataset("org/set", name="main")
    assert (
        loaded.description == "org/set/main: 5 documents, columns question,answer → question_answer"
    )
    assert loaded.train.where(2) == "org/set/main[3]"
    assert loaded.train[2] == DOCUMENTS[2]


def test_groups_are_held_out_whole(tmp_path: Path) -> None:
    """A trajectory whose other steps are trained on would be no held-out document."""
    rows = [
        {"prompt": f"q{i}", "completion": "a", **({"group": f"g{i % 5}"} if i % 4 else {})}
        for i in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = FilesDataset(str(tmp_path / "a.jsonl"), val_frac=0.3)
    train, val = ({x["prompt"] for x in documents} for documents in (data.train, data.val["val"]))
    assert len(train) + len(val) == 40
    assert train.isdisjoint(val)
    groups = [
        {row.get("group") for row in rows if row["prompt"] in of} - {None} for of in (train, val)
    ]
    assert groups[0] & groups[1] == set()
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({**row, "group": "x"}) for row in rows))
    with pytest.raises(ConfigError, match=r"val_frac=0.3 of 1 groups leaves none to train on"):
        FilesDataset(str(tmp_path / "b.jsonl"), val_frac=0.3)
