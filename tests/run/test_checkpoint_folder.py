"""Which checkpoints are complete, and which are kept."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.config.schema import CheckpointConfig
from automodel_lite.errors import ConfigError
from automodel_lite.run import durable
from automodel_lite.run.checkpoint_folder import steps_to_delete
from tests.run.test_checkpoint import Trained, checkpointer, same


def test_no_save_begins_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 1000)
    said: list[str] = []
    trained = Trained(1)
    saves = checkpointer(tmp_path, said)
    assert not saves.save(1, trained.model, trained.optimizer, {"step": 1})
    assert "no space: the checkpoint needs 1 MiB, 0 MiB are free; will retry" in said[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def _write_manifest(path: Path) -> None:
    files = json.loads((path / "COMPLETE.json").read_text())
    for name in files["files"]:
        file = path / name
        files["files"][name] = {"bytes": file.stat().st_size, "crc32": durable.checksum(file)}
    (path / "COMPLETE.json").write_text(json.dumps(files))


def _flip_a_bit(path: Path) -> None:
    file = path / "tensors" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def _cut(path: Path) -> None:
    file = path / "tensors" / "rank_00000.safetensors"
    os.truncate(file, file.stat().st_size - 4)


def _lose_a_shard(path: Path) -> None:
    (path / "tensors" / "rank_00000.safetensors").unlink()


def _lose_the_manifest(path: Path) -> None:
    (path / "COMPLETE.json").unlink()


def _lead_out(path: Path) -> None:
    manifest = json.loads((path / "COMPLETE.json").read_text())
    manifest["files"]["../../../etc/passwd"] = {"bytes": 1, "crc32": None}
    (path / "COMPLETE.json").write_text(json.dumps(manifest))


def _another_shape(path: Path) -> None:
    (path.parents[1] / "config.yaml").write_text("name: test\n")  # no setting has changed
    index = path / "tensors" / "index.json"
    entries = json.loads(index.read_text())
    entries["tensors"]["model.0.weight"]["shape"] = [7, 6]
    index.write_text(json.dumps(entries))
    _write_manifest(path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            _flip_a_bit,
            r"step_00000002 does not load: .*does not match its checksum .*\(tensors/rank_00000.safetensors\)",
        ),
        (_cut, "step_00000002 is skipped: tensors/rank_00000.safetensors has .* bytes instead of"),
        (_lose_a_shard, "step_00000002 is skipped: rank_00000.safetensors is missing"),
        (_lose_the_manifest, "step_00000002 is skipped: COMPLETE.json is missing"),
        (
            _lead_out,
            "step_00000002 is skipped: its manifest names '../../../etc/passwd', which leads out of it",
        ),
        (_another_shape, r"model.0.weight is float32 \[7, 6\], the run's is float32 \[7, 5\]"),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    trained = Trained(1)
    saves = checkpointer(tmp_path)
    saves.save(1, trained.model, trained.optimizer, {"step": 1})
    want = trained.values()
    trained.step(1)
    saves.save(2, trained.model, trained.optimizer, {"step": 2})
    damage(tmp_path / "checkpoints" / "step_00000002")
    words: list[str] = []
    again = checkpointer(tmp_path, words)
    assert again.load_newest(trained.model, trained.optimizer) == {"step": 1}
    assert same(trained.values(), want)
    assert re.search(said, "\n".join(words)), words
    trained.step(1)  # step 2 once more: the damaged one is set aside, the new one takes its place
    assert again.save(2, trained.model, trained.optimizer, {"step": 2})
    assert (tmp_path / "checkpoints" / "unreadable-step_00000002").is_dir()
    assert checkpointer(tmp_path).load_newest(trained.model, trained.optimizer) == {"step": 2}


def test_a_damaged_checkpoint_takes_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    trained = Trained(1)
    saves = checkpointer(tmp_path)
    saves.save(1, trained.model, trained.optimizer, {"step": 1})
    saves.save(9, trained.model, trained.optimizer, {"step": 9})
    _flip_a_bit(tmp_path / "checkpoints" / "step_00000009")
    again = checkpointer(tmp_path)
    again.load_newest(trained.model, trained.optimizer)
    for step in (2, 3):
        again.save(step, trained.model, trained.optimizer, {"step": step})
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003", "unreadable-step_00000009"]


def test_a_linked_folder_is_no_checkpoint(tmp_path: Path) -> None:
    trained = Trained(1)
    checkpointer(tmp_path / "a").save(1, trained.model, trained.optimizer, {"step": 1})
    (tmp_path / "b/checkpoints").mkdir(parents=True)
    (tmp_path / "b/checkpoints/step_00000001").symlink_to(tmp_path / "a/checkpoints/step_00000001")
    with pytest.raises(
        ConfigError, match=r"no loadable checkpoint \(step_00000001 is skipped: it is a link\)"
    ):
        checkpointer(tmp_path / "b").load_newest(trained.model, trained.optimizer)


@pytest.mark.parametrize("damage", [_lose_the_manifest, _cut, _lead_out])
def test_damaged_manifests_alone_mean_stop_and_not_step_0(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    trained = Trained(1)
    saves = checkpointer(tmp_path)
    for step in (1, 2):
        saves.save(step, trained.model, trained.optimizer, {"step": step})
        damage(tmp_path / f"checkpoints/step_0000000{step}")
    with pytest.raises(
        ConfigError, match=r"no loadable checkpoint .*step_00000002.*step_00000001.*: restore one"
    ):
        checkpointer(tmp_path).load_newest(trained.model, trained.optimizer)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (CheckpointConfig(keep_last=2), [50, 60]),
        (CheckpointConfig(keep_last=1, keep_best=2), [20, 40, 60]),
        (CheckpointConfig(keep_last=1, keep_every=30), [30, 60]),
        (CheckpointConfig(keep_last=1, keep_best=1, keep_every=50), [20, 50, 60]),
    ],
)
def test_retention(rules: CheckpointConfig, kept: list[int]) -> None:
    losses = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: float("nan"), 60: 2.5}
    assert sorted(losses.keys() - set(steps_to_delete(losses, rules))) == kept


def test_the_best_one_stays(tmp_path: Path) -> None:
    trained = Trained(1)
    saves = checkpointer(tmp_path, keep_last=1, keep_best=1)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, 4.0)):
        saves.save(step, trained.model, trained.optimizer, {"step": step, "val_loss": loss})
    assert sorted(p.name for p in saves.run.checkpoints.iterdir()) == [
        "step_00000002",
        "step_00000004",
    ]


def test_a_pickle_in_place_of_a_file_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    trained = Trained(2)
    checkpointer(tmp_path).save(2, trained.model, trained.optimizer, {"step": 2})
    (path,) = tmp_path.glob("checkpoints/step_*")
    for name in ("state.json", "tensors/index.json", "tensors/rank_00000.safetensors"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(pickle.dumps(Bomb()))
        _write_manifest(path)
        with pytest.raises(ConfigError, match="no loadable checkpoint"):
            checkpointer(tmp_path).load_newest(trained.model, trained.optimizer)
        (path / name).write_bytes(whole)
    assert not (tmp_path / "exploded").exists()
