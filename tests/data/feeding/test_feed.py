"""Reading ahead changes neither the batches nor the position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from resource import RLIMIT_FSIZE, setrlimit
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from automodel_lite.config.schema import DataloaderConfig
from automodel_lite.data.feeding.feed import DeviceFeed, worker_options
from automodel_lite.data.feeding.source import Cursor, HostStep
from automodel_lite.errors import RunStoppedError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def steps(num_steps: int, read: list[int]) -> Iterator[HostStep]:
    for step in range(num_steps):
        read.append(step)
        row = torch.full((1, 4), step)
        batch = {
            "input_ids": row,
            "labels": row,
            "position_ids": torch.arange(4)[None],
            "seq_lens": torch.tensor([[4]]),
            "seq_lens_padded": torch.tensor([[4]]),
            "qkv_format": "thd",
        }
        yield HostStep([batch, batch], [step], 0, Cursor(0, step + 1), 0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("staged", [False, True], ids=["read when asked", "read ahead"])
def test_every_step_once_in_order(device: str, staged: bool) -> None:
    read: list[int] = []
    feed = DeviceFeed(steps(5, read), lambda batch: batch, torch.device(device))
    for step in range(5):
        ready = next(feed)
        assert ready.batches.after == Cursor(0, step + 1)
        assert read[-1] == step
        if staged and step < 4:
            feed.stage()
            feed.stage()  # once is enough
            assert read[-1] == step + 1
        assert [part.input_ids.tolist() for part in ready.inputs] == [[step] * 4] * 2
        assert {part.input_ids.device.type for part in ready.inputs} == {device}
        assert [batch.num_tokens for batch in ready.micro_batches] == [4, 4]
    assert read == list(range(5))


def test_what_is_placed_is_what_the_device_gets() -> None:
    feed = DeviceFeed(
        steps(1, []),
        lambda batch: batch.map_tensors(lambda tensor: tensor + 7),
        torch.device("cpu"),
    )
    ready = next(feed)
    assert ready.inputs[0].input_ids.tolist() == [7] * 4
    assert ready.micro_batches[0].input_ids.tolist() == [0] * 4
    assert ready.batches.wait_s == 0.5


def test_the_end_of_the_steps_is_the_end_of_the_feed() -> None:
    feed = DeviceFeed(steps(2, []), lambda batch: batch, torch.device("cpu"))
    seen = []
    for ready in feed:
        seen.append(ready.batches.after.packs)
        feed.stage()
    assert seen == [1, 2]


class Card(torch.Tensor):
    """Poses as a tensor of a GPU, or as a page-locked one."""

    used_on: ClassVar[list[str]] = []

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Any) -> None:
        Card.used_on.append(stream.name)


class Pinned(torch.Tensor):
    pass


class Stream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events, self.is_idle = name, events, False

    def query(self) -> bool:
        return self.is_idle

    def wait_stream(self, other: Stream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


def test_a_gpu_gets_its_batches_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy out of other memory waits for the device; one in the stream of the computation waits for its end."""
    events: list[str] = []
    to_dtype = torch.Tensor.to
    compute, copies = Stream("compute", events), Stream("copies", events)
    current = [compute]

    @contextmanager
    def running(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def move(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(device, torch.device):
            return to_dtype(tensor, device)
        how = "locked" if isinstance(tensor, Pinned) else "other"
        events.append(f"{current[-1].name}: {how} memory, {'goes on' if non_blocking else 'waits'}")
        return tensor.as_subclass(Card)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", running)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.as_subclass(Pinned))
    monkeypatch.setattr(torch.Tensor, "to", move)
    feed = DeviceFeed(steps(2, []), lambda batch: batch, torch.device("cuda"))
    feed.stage()
    assert set(events) == {"copies: locked memory, goes on"}
    ready = next(feed)
    assert events[-1] == "compute waits for copies"
    # the memory of each copy is kept until the step has used it
    assert len(Card.used_on) == len(events) - 1 > 0
    assert set(Card.used_on) == {"compute"}
    assert ready.batches.wait_s == 0.0  # the GPU was at work all the time
    compute.is_idle = True
    assert next(feed).batches.wait_s == 0.5


class Unsendable(Dataset):
    """A batch for which the worker's shared memory has no room, as in a container of 64 MB."""

    def __getitem__(self, number: int) -> torch.Tensor:
        setrlimit(RLIMIT_FSIZE, (100, -1))
        return torch.zeros(1000)

    def __len__(self) -> int:
        return 1


def test_a_batch_that_a_worker_cannot_hand_over_is_told() -> None:
    options = worker_options(DataloaderConfig(num_workers=1)) | {"timeout": 20}
    batches = iter(StatefulDataLoader(Unsendable(), batch_size=None, **options))
    with pytest.raises(RunStoppedError) as stopped:
        next(batches)
    assert str(stopped.value).startswith("a data worker cannot hand over a batch (unable to ")
    assert "File too large (27)): make room in /dev/shm" in str(stopped.value)
    assert "Traceback" not in str(stopped.value)
