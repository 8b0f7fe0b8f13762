"""PackLoader: each document once an epoch, the same in every epoch and with workers, and exact positions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.config.schema import DataloaderConfig
from automodel_lite.data.loader import BatchShape, Cursor, PackLoader, StepBatches, epoch_order
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokenize import tokenize_documents
from automodel_lite.data.toy_chat import ToyChat
from tests.data.templates import MARKED, byte_tokenizer


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder: Path = tmp_path_factory.mktemp("cache")
    rows = tokenize_documents(ToyChat(num_chats=60), byte_tokenizer(MARKED), cache_dir=folder).train
    return PackedDataset(rows, plan_packs(rows.lengths, 1024))


def loader_of(packs: PackedDataset, num_workers: int, shuffle: bool = True) -> PackLoader:
    def order_of(epoch: int) -> tuple[PackedDataset, np.ndarray]:
        return packs, epoch_order(len(packs), 3, epoch, shuffle)

    return PackLoader(order_of, BatchShape(4, 2, 1), 0, DataloaderConfig(num_workers=num_workers))


def plain(step: StepBatches) -> tuple:
    """Everything that training sees of a step."""
    tensors = [
        [batch[name].tolist() for name in ("input_ids", "labels", "position_ids")] for batch in step.micro_batches
    ]
    return step.epoch, step.pack_ids, tensors


def test_every_pack_once_an_epoch(packs: PackedDataset) -> None:
    steps = [s for s in islice(loader_of(packs, 0).steps(Cursor()), 40) if s.epoch == 0]
    assert sorted(number for step in steps for number in step.pack_ids) == list(range(len(packs)))
    assert len(packs) % 4 != 0  # the last step is short


def test_the_second_epoch_is_equal_and_reading_changes_nothing(packs: PackedDataset) -> None:
    steps = list(islice(loader_of(packs, 0, shuffle=False).steps(Cursor()), 40))
    first, second = ([plain(step)[1:] for step in steps if step.epoch == epoch] for epoch in (0, 1))
    assert second == first
    other, _ = ([plain(s)[1:] for s in islice(loader_of(packs, 0).steps(Cursor(e)), 3)] for e in (1, 0))
    assert other != [plain(s)[1:] for s in islice(loader_of(packs, 0).steps(Cursor(0)), 3)]


def test_workers_change_nothing(packs: PackedDataset) -> None:
    alone = [plain(step) for step in islice(loader_of(packs, 0).steps(Cursor()), 12)]
    assert [plain(step) for step in islice(loader_of(packs, 2).steps(Cursor()), 12)] == alone


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", ["in the middle", "before the edge", "at the edge", "behind the edge"])
def test_resumed_at(packs: PackedDataset, num_workers: int, stop: str) -> None:
    per_epoch = -(-len(packs) // 4)
    done = {
        "in the middle": 2,
        "before the edge": per_epoch - 1,
        "at the edge": per_epoch,
        "behind the edge": per_epoch + 1,
    }
    whole = list(islice(loader_of(packs, 0).steps(Cursor()), per_epoch + 4))
    cursor = whole[done[stop] - 1].after
    rest = islice(loader_of(packs, num_workers).steps(cursor), per_epoch + 4 - done[stop])
    assert [plain(step) for step in rest] == [plain(step) for step in whole[done[stop] :]]
    assert cursor.epoch == (1 if done[stop] >= per_epoch else 0)
