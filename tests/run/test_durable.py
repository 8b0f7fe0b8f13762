"""A fault at every write: no space, a kill, bytes that do not read back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_lite.run import checkpoint_folder, durable
from automodel_lite.run.checkpoint import Checkpointer
from tests.faults import Faults
from tests.run.test_checkpoint import Trained, checkpointer, same


def _no_space() -> None:
    raise OSError(28, "No space left on device")


def _count_operations(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, tmp_path / "count", -1, lambda: None)
        _two_saves(tmp_path / "count", faults)
    return faults.count


def _two_saves(
    folder: Path, faults: Faults | None, mode: str = "sync"
) -> tuple[Checkpointer, list[str]]:
    """Step 1 in peace, step 2 under faults, with keep_last=1: deletion is part of it."""
    said: list[str] = []
    saves = checkpointer(folder, said, keep_last=1, mode=mode)
    trained = Trained(1)
    saves.save(1, trained.model, trained.optimizer, {"step": 1}, wait=True)
    if faults:
        faults.is_on = True
    trained.step(1)
    saves.save(2, trained.model, trained.optimizer, {"step": 2})
    saves.finish()
    if faults:
        faults.is_on = False
    return saves, said


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_at_any_write_costs_a_warning(tmp_path: Path, mode: str) -> None:
    num_operations = _count_operations(tmp_path)
    assert num_operations >= 15
    for at in range(1, num_operations + 1):
        folder = tmp_path / f"at{at}"
        with pytest.MonkeyPatch.context() as patch:
            saves, said = _two_saves(folder, Faults(patch, folder, at, _no_space), mode)
        complete, skipped = checkpoint_folder.survey(folder / "checkpoints")
        assert complete, at
        assert not skipped, (at, skipped)
        step = checkpoint_folder.step_of(complete[0])
        assert step == 2 or "WARNING" in said[-1], (at, said)
        assert not list((folder / "checkpoints").glob(".tmp-*")), at
        trained = Trained(2)
        assert saves.is_due(3, is_planned=False) == any(
            "not saved" in sentence for sentence in said
        ), at
        # the disk has space again
        saves.save(3, trained.model, trained.optimizer, {"step": 3}, wait=True)
        fresh = Trained()
        assert checkpointer(folder).load_newest(fresh.model, fresh.optimizer) == {"step": 3}
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_00000003"], at


@pytest.mark.system
def test_a_kill_at_any_write_leaves_old_or_new(tmp_path: Path) -> None:
    num_operations = _count_operations(tmp_path)
    found = []
    for at in range(1, num_operations + 1):
        folder = tmp_path / f"at{at}"
        pid = os.fork()
        if pid == 0:
            try:
                _two_saves(folder, Faults(pytest.MonkeyPatch(), folder, at, lambda: os._exit(9)))
            finally:  # never back into the test run that this is a copy of
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9, (at, num_operations)
        fresh = Trained()
        state = checkpointer(folder).load_newest(fresh.model, fresh.optimizer)
        assert state is not None, at
        assert same(fresh.values(), Trained(state["step"]).values()), at
        assert not [p for p in (folder / "checkpoints").iterdir() if p.name.startswith(".")], at
        found.append(state["step"])
    assert found == sorted(found)  # the old one until the rename, the new one from then on
    assert {1, 2} == set(found)


def _lose_a_byte(text: str) -> str:
    return text[:-2] + text[-1]


@pytest.mark.parametrize(
    ("what", "harm"),
    [
        ("index.json", lambda text: text.replace("model.0.weight", "model.0.wait")),
        ("index.json", lambda text: text.replace("[7, 5]", "[5, 7]")),
        ("index.json", _lose_a_byte),
        ("state.json", lambda text: text.replace("2", "3", 1)),
        ("config.yaml", _lose_a_byte),
        ("COMPLETE.json", lambda text: text[:-3]),
        ("COMPLETE.json", lambda text: text.replace('"crc32": "', '"crc32": "0', 1)),
    ],
)
def test_a_checkpoint_that_does_not_read_back_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, harm: Callable[[str], str]
) -> None:
    real = durable.write_file

    def write_file(path: Path, text: str) -> None:
        real(path, harm(text) if path.name == what else text)

    monkeypatch.setattr(durable, "write_file", write_file)
    trained, said = Trained(2), list[str]()
    assert not checkpointer(tmp_path, said).save(2, trained.model, trained.optimizer, {"step": 2})
    assert "WARNING: step 2 is not saved: " in said[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_weights_that_do_not_read_back_get_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = durable.sync

    def sync(path: Path) -> None:
        real(path)
        if path.suffix == ".safetensors":
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)

    monkeypatch.setattr(durable, "sync", sync)
    trained, said = Trained(2), list[str]()
    assert not checkpointer(tmp_path, said).save(2, trained.model, trained.optimizer, {"step": 2})
    assert "rank_00000.safetensors does not read back as it was written" in said[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []
