"""Folders drawn at random, with links, twins, replaced files and held-out splits, beside an independent reader."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from automodel_lite.data.reading.files import FilesDataset
from tests.properties.explore import explore

NAMES = ["a", "b[1]", "b1", "c*", "cx", "train-0", "test-0", "valid", "latest", "README", "d::e"]
ENDINGS = [".jsonl", ".jsonl.gz", ".txt", ".parquet", ".json", ".zip", ".md"]
READ = [".jsonl", ".jsonl.gz", ".txt", ".parquet", ".json"]


@st.composite
def folders(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Files with a text each; some are links to others, in a folder below, or replaced after a first reading."""
    files = [
        {
            "name": draw(st.sampled_from(NAMES)),
            "ending": draw(st.sampled_from(ENDINGS)),
            "below": draw(st.sampled_from(["", "", "sub", ".hidden"])),
            "how": draw(st.sampled_from(["file", "file", "hard link", "link", "to nothing"])),
            "is_replaced": draw(st.booleans()),
        }
        for _ in range(draw(st.integers(1, 6)))
    ]
    return files


def write(path: Path, text: str) -> None:
    rows = [{"text": text}]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json.dumps(rows[0]).encode(), mtime=0))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text(json.dumps(rows[0]) if path.suffix == ".jsonl" else text)


def made(root: Path, files: list[dict[str, Any]]) -> dict[Path, str]:
    """Writes the folder; returns what each path holds in the end, as whoever wrote it knows."""
    held: dict[Path, str] = {}
    for number, one in enumerate(files):
        path = root / one["below"] / f"{one['name']}{one['ending']}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in held or path.is_symlink():
            continue
        same = [
            other
            for other in held
            if other.name.endswith(one["ending"]) and other.parent.name != ".hidden"
        ]
        if one["how"] == "to nothing":
            path.symlink_to(root / "nothing")
        elif one["how"] != "file" and same:
            os.link(same[0], path) if one["how"] == "hard link" else path.symlink_to(same[0])
            held[path] = held[same[0]]
        else:
            write(path, f"text {number}")
            held[path] = f"text {number}"
    return held


def expected(root: Path, held: dict[Path, str]) -> list[str]:
    """What should be trained on, by rules written down once more: each text of what can be read, once."""
    readable = {
        p: t
        for p, t in held.items()
        if any(p.name.endswith(e) for e in READ) and ".hidden" not in p.parts
    }
    readable = {p: t for p, t in readable.items() if p.name != "README.txt"}
    readable = {
        p: t
        for p, t in readable.items()
        if not (p.suffix == ".gz" and p.with_suffix("") in readable)
    }
    is_held_out = {p: p.name.startswith(("test-", "valid.")) for p in readable}
    if not all(is_held_out.values()):
        readable = {p: t for p, t in readable.items() if not is_held_out[p]}
    return sorted(set(readable.values()))


@pytest.mark.parametrize(
    "num_cases",
    [30, pytest.param(80, marks=pytest.mark.system), pytest.param(3000, marks=pytest.mark.slow)],
)
def test_a_folder_trains_what_it_holds(
    num_cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))

    def texts(path: Path) -> list[str]:
        rows = FilesDataset(str(path)).train
        return [rows[index]["text"] for index in range(len(rows))]

    def attempt(files: list[dict[str, Any]]) -> None:
        root = tmp_path / "data"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        held = made(root, files)
        want = expected(root, held)
        found = texts(root)
        assert sorted(found) == want, (sorted(found), want)
        for path, text in held.items():
            if any(path.name.endswith(ending) for ending in READ):
                assert texts(path) == [text], path  # a name is a name, whatever is in it
        # Replaced by a file of the same size and times, in place.
        for one, (path, text) in zip(files, list(held.items())):
            if one["is_replaced"] and any(path.name.endswith(ending) for ending in READ):
                before = path.stat()
                write(path, text.replace("text", "next"))
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
                assert texts(path) == [text.replace("text", "next")]
                return

    explore(folders(), attempt, num_cases)
