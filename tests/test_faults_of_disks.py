"""Each write of a disk fails in turn: the file or folder is as before or complete, the message names
it, and another start succeeds.
"""

from __future__ import annotations

import errno
import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.data.cache import KEY_FILE, build_once, find_damage
from automodel_lite.data.prepare import build_packer, check_sizes, prepare_data
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli import convert
from automodel_lite.parts.losses import label_values
from automodel_lite.parts.losses.label_values import Values, reference_values
from automodel_lite.run.checkpoint_folder import MARK
from automodel_lite.run.durable import write_named
from automodel_lite.run.ending import ending_of
from automodel_lite.run.export import _replace_folder
from automodel_lite.telemetry.ledger import Ledger, read_ledger
from recipes import prepare_data as prepare
from tests.faults import each_fault
from tests.runs import composed
from tests.telemetry.test_ledger import row
from tests.test_client import GROUPS, folder, open_client

__all__ = ["folder"]  # the fixture
NUMBERS = [errno.ENOSPC, errno.EIO]
SAMPLED = [
    pytest.param(errno.EIO, 5, id="every-5"),
    *(pytest.param(number, 1, id=f"each-{number}", marks=pytest.mark.slow) for number in NUMBERS),
]
"""Of operations of some 50 touches: every fifth, and in the slow suite each of them, half a minute of one core."""


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


@contextmanager
def reference_job(
    folder: str, tmp_path: Path
) -> Iterator[tuple[Any, Callable[[Path], Values], Callable[[Path], np.ndarray]]]:
    """Yields the packs of a few rows, and what opens and what computes the log-probabilities of a
    reference in a folder.
    """
    rows = [
        {name: row[name] for name in ("input_ids", "labels")} for group in GROUPS for row in group
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"dataset.path={tmp_path / 'a.jsonl'}", f"model.pretrained={folder}", "name=x"]
    sizes = ["packed_sequence.packed_sequence_size=256", "training.global_batch_size=1"]
    caches = [f"cache_dir={tmp_path / 'tokens'}"]
    config = check_config(compose_config("finetune", [*data, *sizes, *caches]))
    packer = build_packer(config)
    packs = prepare_data(config, check_sizes(config, 1), packer).planned.packs_of(0)
    with open_client(folder, tmp_path / "runs") as client:

        def values_in(root: Path) -> Values:
            return reference_values(client.built, packer, str(root), seed=0)

        def operate(root: Path) -> np.ndarray:
            computed = values_in(root).computed("train", packs.rows, client.engine)
            return np.array(computed["reference_log_probs"])

        yield packs, values_in, operate


@pytest.mark.parametrize(("number", "every"), SAMPLED)
def test_label_values_are_whole_or_go_on_where_they_were(
    folder: str, tmp_path: Path, number: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pack is noted as done; what fails behind the last costs none again."""
    monkeypatch.setattr(label_values, "SAVE_EVERY_S", -1.0)
    with reference_job(folder, tmp_path) as (packs, values_in, operate):
        whole = operate(tmp_path / "whole")
        num_kept = 0
        for root, raised in each_fault(tmp_path / "faults", operate, number, every=every):
            entry = values_in(root).folder("train", packs.rows)
            if raised:
                assert isinstance(raised, ConfigError), repr(raised)
                assert str(raised).startswith(f"{root / 'values'} cannot be written (")
            else:
                assert find_damage(entry) is None
            if (entry.parent / f"{entry.name}.part" / KEY_FILE).is_file():
                done = json.loads((entry.parent / f"{entry.name}.part/progress.json").read_text())
                assert done["packs"] == len(packs)
                num_kept += 1
            np.testing.assert_array_equal(operate(root), whole)
            assert find_damage(entry) is None
            names = {path.name.removeprefix(entry.name) for path in entry.parent.iterdir()}
            assert names == {"", ".lock", ".owner"}
    assert len(packs) == 3
    assert num_kept > 0


@pytest.mark.parametrize(("number", "every"), SAMPLED)
def test_a_state_of_a_client_that_is_replaced_is_the_old_one_or_the_new(
    folder: str, tmp_path: Path, number: int, every: int
) -> None:
    with open_client(folder, tmp_path / "runs") as client:

        def save(root: Path, extra: str) -> Path:
            return client.save_state(extra, root / "state", overwrite=True)

        def operate(root: Path) -> Path:
            return save(root, "new")

        num_raised = 0
        faults = tmp_path / "faults"
        for root, raised in each_fault(
            faults, operate, number, lambda root: save(root, "old"), every=4 * every - 3
        ):
            assert client.load_state(root / "state") in (["new"] if not raised else ["old", "new"])
            if raised:
                num_raised += 1
                assert str(raised).startswith(f"{root / 'state'} is not saved: "), repr(raised)
            operate(root)
            assert client.load_state(root / "state") == "new"
            assert [path.name for path in root.iterdir()] == ["state"]
        assert num_raised > 1


@pytest.mark.parametrize(("number", "every"), SAMPLED)
def test_what_prepare_writes_is_whole_or_absent(
    tmp_path: Path, number: int, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer, rows and their trees, the plan."""
    rows = [{"prompt": f"p {n}", "responses": ["a" * n, "b" * n]} for n in range(1, 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["dataset=files", "~dataset.num_chats", f"dataset.path={tmp_path / 'a.jsonl'}"]
    sizes = ["training.global_batch_size=1", "packed_sequence.tree=auto"]
    settings = composed("smoke", *data, "dataset.val_frac=0.25", *sizes)

    def operate(root: Path) -> None:
        settings.cache_dir = str(root)
        assert prepare.main(check_config(settings)) == 0

    def files_in(root: Path) -> dict[str, bytes]:
        files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    whole = tmp_path / "whole"
    operate(whole)
    num_raised = 0
    for root, raised in each_fault(tmp_path / "faults", operate, number, every=2 * every - 1):
        assert files_in(root).items() <= files_in(whole).items()
        if raised:
            num_raised += 1
            assert isinstance(raised, ConfigError), repr(raised)
            assert str(raised).startswith(f"cache_dir={root} ")
        operate(root)
        assert files_in(root) == files_in(whole)
    assert num_raised > 4


@pytest.mark.parametrize("number", NUMBERS)
def test_a_ledger_has_all_lines_or_says_which_it_lacks(tmp_path: Path, number: int) -> None:
    said: list[str] = []

    def write(root: Path, step: int) -> None:
        said.clear()
        path = root / "ledger.jsonl"
        heads = {line.step: line.chain for line in read_ledger(path)} if step else {}
        ledger = Ledger(path, is_silent=False, say=said.append)
        ledger.open(step, heads.get(step, ""), None, {"ranks": 1})
        for later in range(step + 1, 5):
            ledger.add_step(row(later, [later], 8.0 / later))
        ledger.secure()
        ledger.close()

    def rows_in(root: Path) -> list[dict[str, Any]]:
        return [line.row for line in read_ledger(root / "ledger.jsonl")]

    for step in (0, 2):
        faults = tmp_path / f"from-{step}"

        def operate(root: Path, step: int = step) -> None:
            write(root, step)

        def prepare(root: Path, step: int = step) -> None:
            if step:
                write(root, 0)

        whole = tmp_path / f"whole-{step}"
        whole.mkdir()
        prepare(whole)
        before = rows_in(whole) if step else []
        operate(whole)
        num_faults = 0
        for root, raised in each_fault(faults, operate, number, prepare):
            num_faults += 1
            if raised:
                assert str(root / "ledger.jsonl") in ending_of(raised).text
                assert "Traceback" not in ending_of(raised).text
                if (root / "ledger.jsonl").exists():
                    # the old lines, or those that a continued run keeps
                    assert rows_in(root) == before[: len(rows_in(root))]
                    assert len(rows_in(root)) in (0, step + 1, len(before))
            elif rows_in(root) != rows_in(whole):
                assert said[-1].startswith("WARNING: 1 row of ledger.jsonl lost"), said
                assert rows_in(root) == rows_in(whole)[:-1]
            operate(root)
            assert rows_in(root) == rows_in(whole)
            assert [path.name for path in root.iterdir()] == ["ledger.jsonl"]
        assert num_faults > 8


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
