"""Each piece of memory that Python asks for is refused in turn: what is written is whole or absent, what
is raised names the memory and blames no document, and another start goes on with equal results.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.config.check import check_config
from automodel_lite.data.cache import build_once, find_damage
from automodel_lite.parts.losses import label_values
from automodel_lite.run.checkpoint_folder import MARK
from automodel_lite.run.durable import read_json, write_named
from automodel_lite.run.export import _replace_folder
from recipes import prepare_data as prepare
from recipes import train_ft
from tests.faults import each_failed_allocation
from tests.runs import composed, losses_by_step, quick_config
from tests.test_client import folder, open_client
from tests.test_faults_of_disks import build, reference_job

__all__ = ["folder"]  # the fixture


def growths(quick: float, dense: float) -> pytest.MarkDecorator:
    slow = pytest.param(dense, id="dense", marks=pytest.mark.slow)
    return pytest.mark.parametrize("growth", [pytest.param(quick, id="sparse"), slow])


def names_memory(raised: str) -> bool:
    """A sentence of ours without it would blame a file or a setting. CPython itself makes other
    errors of a few: `stat: path should be string, not PosixPath`, `can't allocate read lock`.
    """
    return "MemoryError" in raised or not re.search(
        r"^automodel_lite\.errors\.", raised, re.MULTILINE
    )


def silently(operate: Callable[[Path], object], root: Path) -> None:
    with redirect_stdout(io.StringIO()):
        operate(root)


@growths(1.5, 1.02)
def test_an_entry_of_the_cache_is_whole_or_absent(tmp_path: Path, growth: float) -> None:
    def operate(root: Path) -> Path:
        return build_once(root, "tokens", "chats", {"made": "by"}, build).folder

    num_faults = 0
    for root, raised in each_failed_allocation(tmp_path, operate, growth=growth):
        num_faults += 1
        assert not raised or names_memory(raised), raised
        entries = [path for path in root.glob("tokens/chats-*") if path.is_dir()]
        assert all(find_damage(entry) is None for entry in entries)
        assert find_damage(operate(root)) is None
        assert not list(root.glob("tokens/.chats*"))
    assert num_faults > 5


@growths(1.15, 1.01)
def test_a_file_that_is_written_again_has_the_old_text_or_the_new(
    tmp_path: Path, growth: float
) -> None:
    def before(root: Path) -> None:
        write_named(root / "sub/a.yaml", "old: 1\n")

    def operate(root: Path) -> None:
        write_named(root / "sub/a.yaml", "new: 2\n")

    num_faults = 0
    for root, raised in each_failed_allocation(tmp_path, operate, before, growth):
        num_faults += 1
        assert not raised or names_memory(raised), raised
        file = root / "sub/a.yaml"
        assert file.read_text() in ("old: 1\n", "new: 2\n")
        operate(root)
        assert [path.name for path in file.parent.iterdir()] == ["a.yaml"], raised
        assert file.read_text() == "new: 2\n"
    assert num_faults > 4


@growths(1.3, 1.01)
def test_an_export_that_is_replaced_is_the_old_one_or_the_new(
    tmp_path: Path, growth: float
) -> None:
    def write(folder: Path, step: int) -> None:
        with _replace_folder(folder, step) as temporary:
            temporary.mkdir()
            (temporary / "model.safetensors").write_text(f"step {step}")

    def operate(root: Path) -> None:
        write(root / "hf", 2)

    def before(root: Path) -> None:
        write(root / "hf", 1)
        (root / "hf/mine.txt").write_text("mine")

    num_faults = 0
    for root, raised in each_failed_allocation(tmp_path, operate, before, growth):
        num_faults += 1
        assert not raised or names_memory(raised), raised
        hf = root / "hf"
        step = read_json(hf / MARK)["step"]
        assert (hf / "model.safetensors").read_text() == f"step {step}"
        assert (hf / "mine.txt").read_text() == "mine"
        operate(root)
        assert read_json(hf / MARK)["step"] == 2
        assert [path.name for path in root.iterdir()] == ["hf"]
    assert num_faults > 8


@growths(2.5, 1.05)
@pytest.mark.parametrize("form", ["chats", "trees"])
def test_what_prepare_writes_is_whole_or_absent(tmp_path: Path, form: str, growth: float) -> None:
    """No document is called bad and left out, though half of them may be."""
    rows = [{"prompt": f"p {n}", "responses": ["a" * n, "b" * n]} for n in range(1, 9)]
    if form == "chats":
        texts = ("What?", "So.", "And?", "Then.")
        turns = [
            {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)
        ]
        rows = [{"messages": turns[: 2 + 2 * (n % 2)]} for n in range(24)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["dataset=files", "~dataset.num_chats", f"dataset.path={tmp_path / 'a.jsonl'}"]
    sizes = ["training.global_batch_size=1", "packed_sequence.tree=auto"]
    settings = composed(
        "smoke", *data, "dataset.val_frac=0.25", *sizes, "tokenize.max_bad_frac=0.5"
    )

    def operate(root: Path) -> None:
        settings.cache_dir = str(root)
        assert prepare.main(check_config(settings)) == 0

    def files_in(root: Path) -> dict[str, bytes]:
        files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    whole = tmp_path / "whole"
    silently(operate, whole)
    num_faults = 0
    for root, raised in each_failed_allocation(tmp_path / "n", operate, growth=growth):
        num_faults += 1
        assert not raised or names_memory(raised), raised
        assert files_in(root).items() <= files_in(whole).items(), raised
        silently(operate, root)
        assert files_in(root) == files_in(whole)
    assert num_faults > 5


@growths(3.0, 1.1)
def test_label_values_are_whole_or_go_on_where_they_were(
    folder: str, tmp_path: Path, growth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_values, "SAVE_EVERY_S", -1.0)
    with reference_job(folder, tmp_path) as (packs, values_in, operate):
        whole = operate(tmp_path / "whole")
        num_faults = 0
        for root, raised in each_failed_allocation(tmp_path / "n", operate, growth=growth):
            num_faults += 1
            assert not raised or names_memory(raised), raised
            np.testing.assert_array_equal(operate(root), whole)
            entry = values_in(root).folder("train", packs.rows)
            assert find_damage(entry) is None
            names = {path.name.removeprefix(entry.name) for path in entry.parent.iterdir()}
            assert names == {"", ".lock", ".owner"}
        assert num_faults > 3


@growths(3.0, 1.1)
def test_a_state_of_a_client_that_is_replaced_is_the_old_one_or_the_new(
    folder: str, tmp_path: Path, growth: float
) -> None:
    with open_client(folder, tmp_path / "runs") as client:

        def save(root: Path, extra: str) -> Path:
            return client.save_state(extra, root / "state", overwrite=True)

        def operate(root: Path) -> Path:
            return save(root, "new")

        num_faults = 0
        states = each_failed_allocation(
            tmp_path / "n", operate, lambda root: save(root, "old"), growth
        )
        for root, raised in states:
            num_faults += 1
            assert not raised or names_memory(raised), raised
            assert client.load_state(root / "state") in (["new"] if not raised else ["old", "new"])
            operate(root)
            assert client.load_state(root / "state") == "new"
            assert [path.name for path in root.iterdir()] == ["state"]
        assert num_faults > 5


@growths(8.0, 1.4)
def test_a_run_goes_on_with_equal_losses(tmp_path: Path, growth: float) -> None:
    def operate(root: Path) -> None:
        where = f"cache_dir={root / 'cache'}"
        assert train_ft.main(quick_config(root / "run", "training.max_steps=4", where)) == 0

    silently(operate, tmp_path)
    whole = losses_by_step(tmp_path / "run")
    num_faults = 0
    for root, raised in each_failed_allocation(tmp_path / "n", operate, growth=growth, first=9000):
        num_faults += 1
        assert not raised or names_memory(raised), raised
        silently(operate, root)
        assert losses_by_step(root / "run") == whole
    assert num_faults > 2
