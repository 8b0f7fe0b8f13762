"""A path names the files that it names: nothing else is read, and what is left out is said."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.reading.paths import find_files, stamp
from automodel_lite.errors import ConfigError
from automodel_lite.parts.datasets.mixture import Mixture
from automodel_lite.parts.datasets.streams import StreamingDataset


@pytest.fixture(autouse=True)
def _cache_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))


def write(path: Path, *texts: str) -> Path:
    """A file of texts, of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} for text in texts]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".txt":
        path.write_text("\n".join(texts))
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix.lower() == ".gz" else lines)
    return path


def texts_of(path: Any, **options: Any) -> list[str]:
    rows = FilesDataset(path if isinstance(path, list) else str(path), **options).train
    return [rows[index]["text"] for index in range(len(rows))]


@pytest.mark.parametrize(
    ("name", "trap"),
    [
        ("part[1].parquet", "part1.parquet"),
        ("star*.txt", "starx.txt"),
        ("a?.jsonl", "ab.jsonl"),
        ("a::b.parquet", "c.txt"),
    ],
)
def test_a_name_is_taken_before_a_pattern(tmp_path: Path, name: str, trap: str) -> None:
    write(tmp_path / trap, "trap")
    assert texts_of(write(tmp_path / name, "meant")) == ["meant"]


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_replaced_file_gives_its_new_rows(tmp_path: Path, name: str) -> None:
    """Of the same size and the same times, as `cp -p` and `rsync -t` leave them, in the same place or in another."""
    path = write(tmp_path / name, "old row 1", "old row 2")
    before = FilesDataset(str(path))
    old = os.stat(path)
    assert texts_of(path)[0].startswith("old row 1")
    new = write(tmp_path / f"new{''.join(Path(name).suffixes)}", "new row 1", "new row 2")
    os.utime(new, ns=(old.st_atime_ns, old.st_mtime_ns))
    shutil.copyfile(new, path)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert texts_of(path)[0].startswith("new row 1")
    assert FilesDataset(str(path)).identity != before.identity
    assert stamp(path).is_same(stamp(new))


def test_what_a_folder_holds_is_taken_or_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("b.jsonl", "c.JSONL.GZ", "sub/d.txt"):
        write(data / name, name)
    shutil.copy(data / "b.jsonl", tmp_path / "twin.jsonl")
    (data / "b.jsonl.gz").write_bytes(gzip.compress((data / "b.jsonl").read_bytes()))
    for name in (
        "README.txt",
        "LICENSE.txt",
        "x.lz4",
        "y.jsonl.zip",
        "notes.md",
        ".hidden.jsonl",
        ".git/z.jsonl",
    ):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text("?")
    write(tmp_path / "elsewhere" / "e.jsonl", "e")
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (data / "gone.jsonl").symlink_to(tmp_path / "nothing")
    (data / "again.jsonl").symlink_to(data / "b.jsonl")
    files, note, *_ = find_files([str(data)], "dataset.path")
    assert sorted(file.name for file in files) == ["again.jsonl", "c.JSONL.GZ", "d.txt"]
    assert set(note.removeprefix("left out: ").removesuffix(")").split("), ")) == {
        "1 linked folders (linked",
        "1 links to nothing (gone.jsonl",
        "2 hidden (.git, .hidden.jsonl",
        "3 of other kinds (notes.md, x.lz4, y.jsonl.zip",
        "1 compressed twins of others (b.jsonl.gz",
        "2 about the data (LICENSE.txt, README.txt",
        f"1 named twice ({data / 'b.jsonl'}",
    }
    assert "; left out: " in FilesDataset(str(data)).description
    assert "2 about the data (LICENSE.txt, README.txt)" in FilesDataset(str(data)).description


def test_a_folder_and_its_file_are_one(tmp_path: Path) -> None:
    path = write(tmp_path / "data" / "a.jsonl", "a")
    assert texts_of([str(tmp_path / "data"), str(path)]) == ["a"]
    os.link(path, tmp_path / "data" / "b.jsonl")
    assert texts_of(tmp_path / "data") == ["a"]


def test_held_out_splits_of_a_folder_are_not_trained(tmp_path: Path) -> None:
    for name in (
        "train-0.jsonl",
        "test-0.jsonl",
        "valid/part-0.jsonl",
        "latest.jsonl",
        "contest.jsonl",
    ):
        write(tmp_path / "data" / name, name)
    assert sorted(texts_of(tmp_path / "data")) == ["contest.jsonl", "latest.jsonl", "train-0.jsonl"]
    assert (
        "2 of held-out splits (test-0.jsonl, part-0.jsonl)"
        in FilesDataset(str(tmp_path / "data")).description
    )
    assert texts_of(tmp_path / "data" / "test-0.jsonl") == ["test-0.jsonl"]
    assert texts_of(tmp_path / "data" / "valid") == ["valid/part-0.jsonl"]


LEAKS = {
    "the same file": lambda data: data / "a.jsonl",
    "a hard link": lambda data: (
        os.link(data / "a.jsonl", data.parent / "h.jsonl") or data.parent / "h.jsonl"
    ),
    "a link": lambda data: (
        os.symlink(data / "a.jsonl", data.parent / "s.jsonl") or data.parent / "s.jsonl"
    ),
    "a copy": lambda data: shutil.copy(data / "a.jsonl", data.parent / "c.jsonl"),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_training_and_validation_never_share_a_file(tmp_path: Path, kind: str) -> None:
    data = tmp_path / "data"
    write(data / "a.jsonl", "a"), write(data / "b.jsonl", "b")
    val = str(LEAKS[kind](data))
    for dataset in (FilesDataset, StreamingDataset):
        with pytest.raises(ConfigError, match=r"dataset.path=.*a.jsonl is also validated on, as "):
            dataset(str(data / "a.jsonl"), val_path=val)
    whole = FilesDataset(str(data), val_path=val)  # the folder was meant without it
    assert [whole.train[i]["text"] for i in range(len(whole.train))] == ["b"]
    assert "1 held out for validation (a.jsonl)" in whole.description


def test_sources_of_a_mixture_never_share_a_file(tmp_path: Path) -> None:
    a, b = (str(write(tmp_path / name, "x", "y", name)) for name in ("a.jsonl", "b.jsonl"))
    apart = {"one": {"dataset": FilesDataset(a, val_frac=0.4)}, "two": {"dataset": FilesDataset(b)}}
    assert len(Mixture(apart).datasets) == 2
    for held in ({"val_path": a}, {}):
        sources = {
            "one": {"dataset": FilesDataset(a, val_frac=0 if held else 0.4)},
            "two": {"dataset": FilesDataset(b, **held)},
        }
        sources |= {} if held else {"three": {"dataset": FilesDataset(a)}}
        with pytest.raises(
            ConfigError,
            match=r"dataset.sources.\w+ trains on .*a.jsonl, which dataset.sources.\w+ val",
        ):
            Mixture(sources)
