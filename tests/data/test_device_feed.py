"""Reading ahead changes neither the batches nor the position."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from automodel_lite.data.loader import Cursor, DeviceFeed, StepBatches

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def steps(num_steps: int, read: list[int]) -> Iterator[StepBatches]:
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
        yield StepBatches([batch, batch], [step], 0, Cursor(0, step + 1), 0.5)


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
    feed = DeviceFeed(steps(1, []), lambda batch: batch.map_tensors(lambda tensor: tensor + 7), torch.device("cpu"))
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
