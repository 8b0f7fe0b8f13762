"""Complete or absent, whatever happens at whatever moment; and no pickle on the way back."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cuda._pin_memory_utils
from torch import nn

from automodel_lite.config.schema import CheckpointConfig, Config
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.parallel.control import Control
from automodel_lite.run import checkpoint_folder, durable, sharded_files
from automodel_lite.run.checkpoint import Checkpointer
from automodel_lite.run.checkpoint_folder import steps_to_delete
from automodel_lite.run.folder import RunFolder
from tests.ranks import run_ranks


class Trained:
    """A model and its optimizer, some steps old."""

    def __init__(self, num_steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step(num_steps)

    def step(self, num_steps: int) -> Trained:
        for _ in range(num_steps):
            self.model(torch.ones(2, 5)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def values(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        moments = [s[k] for s in states for k in ("exp_avg", "exp_avg_sq", "step")]
        return [t.detach().clone() for t in [*self.model.parameters(), *moments]]


def checkpointer(folder: Path, said: list[str] | None = None, **options: Any) -> Checkpointer:
    config = Config(name="test", checkpoint=CheckpointConfig(**options))
    alone = Control(None)
    return Checkpointer(RunFolder(folder), config, alone, alone, (said if said is not None else []).append)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, mode: str) -> None:
    trained = Trained(3)
    saves = checkpointer(tmp_path, mode=mode)
    saves.save(3, trained.model, trained.optimizer, {"step": 3})
    want = trained.values()
    trained.step(2)  # an asynchronous save must not see these
    saves.finish()
    fresh = Trained()
    state = checkpointer(tmp_path).load_newest(fresh.model, fresh.optimizer)
    assert state == {"step": 3}
    assert same(fresh.values(), want)


def test_asynchronous_saves_use_the_same_copies(tmp_path: Path) -> None:
    """torch's own stager closed itself after its first use on 2.11: the second save was a KeyError."""
    trained, saves, pointers = Trained(0), checkpointer(tmp_path, mode="async"), []
    for step in (1, 2, 3):
        trained.step(1)
        saves.save(step, trained.model, trained.optimizer, {"step": step})
        assert saves.is_busy() or saves.newest
        wanted = trained.values()
        trained.step(1)  # what is written must not change with it
        saves.finish()
        pointers.append([copy.data_ptr() for copy in saves._copies.values()])
        assert saves.newest_name == f"step_{step:08d}"
        loaded = Trained(0)
        checkpointer(tmp_path).load_newest(loaded.model, loaded.optimizer)
        assert same(loaded.values(), wanted)
    assert pointers[0] == pointers[1] == pointers[2]


def test_a_host_without_room_for_copies_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says: list[str] = []
    trained = Trained(1)
    saves = checkpointer(tmp_path, says, mode="async")

    def no_memory(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        saves.save(1, trained.model, trained.optimizer, {"step": 1})
        saves.finish()
    assert "step 1 is not saved: CUDA error: out of memory; will retry" in says[0]
    saves.save(2, trained.model, trained.optimizer, {"step": 2}, wait=True)
    assert saves.newest_name == "step_00000002"


def test_loading_uses_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(2)
    checkpointer(tmp_path).save(2, trained.model, trained.optimizer, {"step": 2})
    files = {p.suffix for p in tmp_path.rglob("step_*/**/*") if p.is_file()}
    assert files == {".json", ".safetensors", ".yaml"}

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle on the load path")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, forbidden)
    fresh = Trained()
    assert checkpointer(tmp_path).load_newest(fresh.model, fresh.optimizer) == {"step": 2}
    assert same(fresh.values(), trained.values())


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


# -------------------------------------------------------------------------------------------- a fault at every write
OPERATIONS = [(builtins, "open"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "unlink")]
SHARDS = (sharded_files, "save_file")


class Faults:
    """Counts what touches the disk below a folder, and does something at the n-th: no space, or the end of the process.

    Only there: the process also removes temporary files of others whenever the garbage collector comes by.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, at: int, what: Callable[[], None]) -> None:
        self.count, self.folder, self.at, self.what, self.is_on = 0, folder, at, what, False
        for module, name in [*OPERATIONS, SHARDS]:
            monkeypatch.setattr(module, name, self._wrap(getattr(module, name), name))

    def _wrap(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            writes = name != "open" or (len(args) > 1 and str(args[1])[0] in "wx")
            where = args[1] if name == "save_file" else kwargs.get("dir_fd", args[0])
            if self.is_on and writes and _touches(self.folder, where):
                self.count += 1
                if self.count == self.at:
                    self.what()
            return real(*args, **kwargs)

        return call


def _touches(folder: Path, where: Any) -> bool:
    """`where` is a path, or the descriptor of an open file (fsync) or folder (deletion of a tree)."""
    path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else where
    return Path(path).is_relative_to(folder)


def _no_space() -> None:
    raise OSError(28, "No space left on device")


def _count_operations(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, tmp_path / "count", -1, lambda: None)
        _two_saves(tmp_path / "count", faults)
    return faults.count


def _two_saves(folder: Path, faults: Faults | None, mode: str = "sync") -> tuple[Checkpointer, list[str]]:
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
        assert saves.is_due(3, is_planned=False) == any("not saved" in sentence for sentence in said), at
        saves.save(3, trained.model, trained.optimizer, {"step": 3}, wait=True)  # the disk has space again
        fresh = Trained()
        assert checkpointer(folder).load_newest(fresh.model, fresh.optimizer) == {"step": 3}
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_00000003"], at


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


def test_no_save_begins_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 1000)
    said: list[str] = []
    trained = Trained(1)
    saves = checkpointer(tmp_path, said)
    assert not saves.save(1, trained.model, trained.optimizer, {"step": 1})
    assert "no space: the checkpoint needs 1 MiB, 0 MiB are free; will retry" in said[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "value", ["weight", "model.0.", "float32", '"step": 2', "rank_00000", "tensors", "state.json", "config"]
)
def test_names_in_a_checkpoint_are_nobodys_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """`SORT_KEY=weight` in the environment once made a checkpoint that did not load."""
    monkeypatch.setenv("SORT_KEY", value)
    trained = Trained(2)
    saves = checkpointer(tmp_path)
    assert saves.save(2, trained.model, trained.optimizer, {"step": 2})
    fresh = Trained()
    assert checkpointer(tmp_path).load_newest(fresh.model, fresh.optimizer) == {"step": 2}
    assert same(fresh.values(), trained.values())


def test_bytes_of_a_shard_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TOKENS_PER_STEP=<the size of a file>` once made a run start from step 0."""
    trained = Trained(2)
    checkpointer(tmp_path / "a").save(2, trained.model, trained.optimizer, {"step": 2})
    manifest = json.loads((tmp_path / "a/checkpoints/step_00000002/COMPLETE.json").read_text())
    for number, (name, entry) in enumerate(manifest["files"].items()):
        monkeypatch.setenv(f"TOKENS_{number}", f" {entry['bytes']}}}")
        monkeypatch.setenv(f"KEY_{number}", entry["crc32"])
        monkeypatch.setenv(f"NAME_KEY_{number}", name)
    assert checkpointer(tmp_path / "b").save(2, trained.model, trained.optimizer, {"step": 2})
    again = json.loads((tmp_path / "b/checkpoints/step_00000002/COMPLETE.json").read_text())
    assert again["files"]["tensors/rank_00000.safetensors"] == manifest["files"]["tensors/rank_00000.safetensors"]
    assert checkpointer(tmp_path / "b").load_newest(trained.model, trained.optimizer) == {"step": 2}


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


def test_weights_that_do_not_read_back_get_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sharded_files.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        real(tensors, path)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(sharded_files, "save_file", save_file)
    trained, said = Trained(2), list[str]()
    assert not checkpointer(tmp_path, said).save(2, trained.model, trained.optimizer, {"step": 2})
    assert "rank_00000.safetensors does not read back as it was written" in said[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


# ------------------------------------------------------------------------------------------------- damage, fallback
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
        (_lead_out, "step_00000002 is skipped: its manifest names '../../../etc/passwd', which leads out of it"),
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


def test_a_linked_folder_is_no_checkpoint(tmp_path: Path) -> None:
    trained = Trained(1)
    checkpointer(tmp_path / "a").save(1, trained.model, trained.optimizer, {"step": 1})
    (tmp_path / "b/checkpoints").mkdir(parents=True)
    (tmp_path / "b/checkpoints/step_00000001").symlink_to(tmp_path / "a/checkpoints/step_00000001")
    with pytest.raises(ConfigError, match=r"no loadable checkpoint \(step_00000001 is skipped: it is a link\)"):
        checkpointer(tmp_path / "b").load_newest(trained.model, trained.optimizer)


@pytest.mark.parametrize("damage", [_lose_the_manifest, _cut, _lead_out])
def test_damaged_manifests_alone_mean_stop_and_not_step_0(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    trained = Trained(1)
    saves = checkpointer(tmp_path)
    for step in (1, 2):
        saves.save(step, trained.model, trained.optimizer, {"step": step})
        damage(tmp_path / f"checkpoints/step_0000000{step}")
    with pytest.raises(ConfigError, match=r"no loadable checkpoint .*step_00000002.*step_00000001.*: restore one"):
        checkpointer(tmp_path).load_newest(trained.model, trained.optimizer)


# ------------------------------------------------------------------------------------------------------------ the fence
class _Lost:
    """A folder that is another job's from the n-th look on."""

    def __init__(self, at: int) -> None:
        self.count, self.at = 0, at

    def __call__(self) -> None:
        self.count += 1
        if self.count >= self.at:
            raise RunStoppedError("the folder is another job's")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_job_that_lost_its_folder_saves_nothing_and_stops(tmp_path: Path, mode: str, at: int) -> None:
    """Before anything is written, and again before the rename; what the other job is writing stays."""
    theirs = tmp_path / "checkpoints/.tmp-theirs-step_00000002"
    theirs.mkdir(parents=True)
    trained = Trained(2)
    saves = checkpointer(tmp_path, mode=mode)
    saves.fence = _Lost(at)

    def save() -> None:
        saves.save(2, trained.model, trained.optimizer, {"step": 2})
        saves.finish()

    with pytest.raises(RunStoppedError, match="another job's"):
        save()
    assert saves.newest is None
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    assert theirs.is_dir()


# -------------------------------------------------------------------------------------------------------- retention
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
    assert sorted(p.name for p in saves.folder.iterdir()) == ["step_00000002", "step_00000004"]


# ------------------------------------------------------------------------------------------------------- resharding
def _sharded(rank: int, world_size: int, folder: str, save: bool, mode: str) -> list[list[float]]:
    """A sharded model with uneven shapes: saved after two steps, or loaded. Returns whole values."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    trained = Trained()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in trained.model:
        fully_shard(layer, mesh=mesh)
    fully_shard(trained.model, mesh=mesh)
    trained.optimizer = torch.optim.AdamW(trained.model.parameters(), lr=0.1)
    groups = [Control(dist.new_group(backend="gloo")) for _ in range(2)]
    config = Config(name="test", checkpoint=CheckpointConfig(mode=mode))
    saves = Checkpointer(RunFolder(folder), config, *groups, lambda text: None)
    if save:
        trained.step(2)
        saves.save(2, trained.model, trained.optimizer, {"step": 2})
        whole = trained.values()
        saves.finish()
        assert saves.newest is not None
    else:
        assert saves.load_newest(trained.model, trained.optimizer) == {"step": 2}
        whole = trained.values()
    return [(t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist() for t in whole]


@pytest.mark.parametrize(("writers", "mode"), [(1, "sync"), (2, "async"), (4, "sync")])
def test_any_number_of_ranks_reads_what_any_wrote(tmp_path: Path, writers: int, mode: str) -> None:
    want = run_ranks(_sharded, writers, str(tmp_path), True, mode)[0]
    for readers in (1, 2, 4):
        for got in run_ranks(_sharded, readers, str(tmp_path), False, mode):
            assert got == want


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    return
