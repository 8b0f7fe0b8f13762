"""Complete or absent, whatever happens at whatever moment; and no pickle on the way back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cuda._pin_memory_utils
from torch import nn

from automodel_lite.config.schema import CheckpointConfig, Config
from automodel_lite.errors import RunStoppedError
from automodel_lite.parallel.control import Control
from automodel_lite.run.checkpoint import Checkpointer
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
    return Checkpointer(
        RunFolder(folder), config, alone, alone, (said if said is not None else []).append
    )


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


def test_a_host_without_room_for_copies_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, name, forbidden)
    fresh = Trained()
    assert checkpointer(tmp_path).load_newest(fresh.model, fresh.optimizer) == {"step": 2}
    assert same(fresh.values(), trained.values())


@pytest.mark.parametrize(
    "value",
    ["weight", "model.0.", "float32", '"step": 2', "rank_00000", "tensors", "state.json", "config"],
)
def test_names_in_a_checkpoint_are_nobodys_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """`SORT_KEY=weight` in the environment once made a checkpoint that did not load."""
    monkeypatch.setenv("SORT_KEY", value)
    trained = Trained(2)
    saves = checkpointer(tmp_path)
    assert saves.save(2, trained.model, trained.optimizer, {"step": 2})
    fresh = Trained()
    assert checkpointer(tmp_path).load_newest(fresh.model, fresh.optimizer) == {"step": 2}
    assert same(fresh.values(), trained.values())


def test_bytes_of_a_shard_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert (
        again["files"]["tensors/rank_00000.safetensors"]
        == manifest["files"]["tensors/rank_00000.safetensors"]
    )
    assert checkpointer(tmp_path / "b").load_newest(trained.model, trained.optimizer) == {"step": 2}


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
def test_a_job_that_lost_its_folder_saves_nothing_and_stops(
    tmp_path: Path, mode: str, at: int
) -> None:
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


@pytest.mark.parametrize(
    ("writers", "mode"),
    [pytest.param(1, "sync", marks=pytest.mark.system), (2, "async"), (4, "sync")],
)
def test_any_number_of_ranks_reads_what_any_wrote(tmp_path: Path, writers: int, mode: str) -> None:
    want = run_ranks(_sharded, writers, str(tmp_path), True, mode)[0]
    for readers in (1, 2, 4):
        for got in run_ranks(_sharded, readers, str(tmp_path), False, mode):
            assert got == want


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    return
