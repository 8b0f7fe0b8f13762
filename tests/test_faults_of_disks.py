"""Each write of a disk fails in turn: the file or folder is as before or complete, the message names
it, and another start succeeds.
"""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.data.cache import build_once, find_damage
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.extras.cli import convert
from automodel_lite.run.checkpoint_folder import MARK
from automodel_lite.run.durable import write_named
from automodel_lite.run.export import _replace_folder
from tests.faults import each_fault

NUMBERS = [errno.ENOSPC, errno.EIO]


def build(folder: Path) -> None:
    with open(folder / "ids.bin", "wb") as file:
        np.arange(10).tofile(file)
        file.write(b"more")
    (folder / "about.json").write_text("{}")


@pytest.mark.parametrize("number", NUMBERS)
def test_an_entry_of_the_cache_is_whole_or_absent(tmp_path: Path, number: int) -> None:
    def operate(root: Path) -> Path:
        return build_once(root, "tokens", "chats", {"made": "by"}, build).folder

    num_faults = 0
    for root, raised in each_fault(tmp_path, operate, number):
        num_faults += 1
        entries = [path for path in root.glob("tokens/chats-*") if path.is_dir()]
        assert all(find_damage(entry) is None for entry in entries)
        if raised:
            assert isinstance(raised, ValueError), repr(raised)
            assert str(raised).startswith(f"cache_dir={root} ")
        assert find_damage(operate(root)) is None
        assert not list(root.glob("tokens/.chats*"))
    assert num_faults > 8


@pytest.mark.parametrize("number", NUMBERS)
def test_an_unpacked_copy_has_all_rows_or_is_absent(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "a.jsonl.gz"
    rows = [{"text": f"text {n}"} for n in range(300)]
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))

    def operate(root: Path) -> list[str]:
        monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(root))
        read = FilesDataset(str(packed)).train
        return [read[n]["text"] for n in range(len(read))]

    for root, raised in each_fault(tmp_path / "cache", operate, number):
        if raised:
            assert isinstance(raised, ValueError), repr(raised)
            assert str(root) in str(raised)
        assert operate(root) == [row["text"] for row in rows]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_export_that_is_replaced_is_the_old_one_or_the_new(tmp_path: Path, number: int) -> None:
    def write(folder: Path, step: int) -> None:
        with _replace_folder(folder, step) as temporary:
            temporary.mkdir()
            (temporary / "model.safetensors").write_text(f"step {step}")

    def operate(root: Path) -> None:
        write(root / "hf", 2)

    def prepare(root: Path) -> None:
        write(root / "hf", 1)
        (root / "hf" / "mine.txt").write_text("mine")

    def content(root: Path) -> tuple[str, str, int]:
        hf = root / "hf"
        step = json.loads((hf / MARK).read_text())["step"] if hf.is_dir() else 0
        return (hf / "model.safetensors").read_text(), (hf / "mine.txt").read_text(), step

    for root, raised in each_fault(tmp_path, operate, number, prepare):
        text, mine, step = content(root)
        assert mine == "mine"
        assert text == f"step {step}", raised
        assert raised is None or f"{root}/" in str(raised), repr(raised)
        operate(root)
        assert content(root) == ("step 2", "mine", 2)
        assert sorted(path.name for path in root.iterdir()) == ["hf"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_file_that_is_written_again_has_the_old_text_or_the_new(
    tmp_path: Path, number: int
) -> None:
    def prepare(root: Path) -> None:
        write_named(root / "sub/a.yaml", "old: 1\n")

    def operate(root: Path) -> None:
        write_named(root / "sub/a.yaml", "new: 2\n")

    for root, raised in each_fault(tmp_path, operate, number, prepare):
        file = root / "sub/a.yaml"
        assert file.read_text() in ("old: 1\n", "new: 2\n")
        if raised:
            assert str(file) in str(raised), repr(raised)
        operate(root)
        assert [path.name for path in (root / "sub").iterdir()] == ["a.yaml"]
        assert file.read_text() == "new: 2\n"


@pytest.mark.system
def test_what_convert_writes_is_whole_or_absent(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("base_model: m\ndatasets:\n- {path: a.jsonl, type: alpaca}\n")

    def operate(root: Path) -> None:
        convert.convert([str(theirs), "--to", str(root / "mine.yaml")])

    whole = tmp_path / "whole"
    operate(whole)
    for root, raised in each_fault(tmp_path / "faults", operate):
        assert raised is None or str(root / "mine.yaml") in str(raised), repr(raised)
        assert not [path.name for path in root.iterdir() if path.name != "mine.yaml"]
        if not (root / "mine.yaml").exists():
            operate(root)
        assert (root / "mine.yaml").read_text() == (whole / "mine.yaml").read_text()
