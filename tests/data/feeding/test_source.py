"""Planned packs: each document once an epoch, the same in every epoch and with workers, and exact positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from automodel_lite.config.schema import DataloaderConfig, MeshConfig
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import (
    Cursor,
    HostStep,
    Reading,
    adapted,
    has_adapting,
    packing_dataset,
)
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import TokenizedData, members_of
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.parts.datasets.toy_chat import ToyChat
from tests.data.templates import MARKED, byte_tokenizer

SIZE = 1024
COSTS = CostModel(1.0, 0.0)
MESH = init_mesh(MeshConfig())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenizedData:
    folder: Path = tmp_path_factory.mktemp("cache")
    return tokenize_documents(ToyChat(num_chats=60), TokenizeJob(byte_tokenizer(MARKED)), folder)


def source_of(tokens: TokenizedData, num_workers: int, shuffle: bool = True) -> PlannedPacks:
    packer = Packer(SIZE, balance="none")
    packs = packer.packs(tokens.train)
    return PlannedPacks(
        ToyChat(num_chats=60),
        TokenizeJob(byte_tokenizer(MARKED)),
        packer,
        {},
        (),
        BatchShape(4, 2, 1),
        DataloaderConfig(num_workers=num_workers, shuffle=shuffle),
        has_trees=False,
        longest=SIZE,
        tokens=tokens,
        packs_of=lambda epoch: packs,
        seed=3,
    )


def steps_of(
    tokens: TokenizedData, num_workers: int, cursor: Cursor, shuffle: bool = True
) -> Iterator[HostStep]:
    return source_of(tokens, num_workers, shuffle).steps(cursor, MESH, COSTS)


@pytest.fixture(scope="module")
def num_packs(tokens: TokenizedData) -> int:
    return len(source_of(tokens, 0).packs_of(0))


def plain(step: HostStep) -> tuple:
    """Everything that training sees of a step."""
    tensors = [
        [batch[name].tolist() for name in ("input_ids", "labels", "position_ids")]
        for batch in step.micro_batches
    ]
    return step.epoch, step.pack_ids, tensors


def test_every_pack_once_an_epoch(tokens: TokenizedData, num_packs: int) -> None:
    steps = [s for s in islice(steps_of(tokens, 0, Cursor()), 40) if s.epoch == 0]
    assert sorted(number for step in steps for number in step.pack_ids) == list(range(num_packs))
    assert num_packs % 4 != 0  # the last step is short


def test_the_second_epoch_is_equal_and_reading_changes_nothing(tokens: TokenizedData) -> None:
    steps = list(islice(steps_of(tokens, 0, Cursor(), shuffle=False), 40))
    first, second = ([plain(step)[1:] for step in steps if step.epoch == epoch] for epoch in (0, 1))
    assert second == first
    other, _ = ([plain(s)[1:] for s in islice(steps_of(tokens, 0, Cursor(e)), 3)] for e in (1, 0))
    assert other != [plain(s)[1:] for s in islice(steps_of(tokens, 0, Cursor(0)), 3)]


def test_workers_change_nothing(tokens: TokenizedData) -> None:
    alone = [plain(step) for step in islice(steps_of(tokens, 0, Cursor()), 12)]
    assert [plain(step) for step in islice(steps_of(tokens, 2, Cursor()), 12)] == alone


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "stop", ["in the middle", "before the edge", "at the edge", "behind the edge"]
)
def test_resumed_at(tokens: TokenizedData, num_packs: int, num_workers: int, stop: str) -> None:
    per_epoch = -(-num_packs // 4)
    done = {
        "in the middle": 2,
        "before the edge": per_epoch - 1,
        "at the edge": per_epoch,
        "behind the edge": per_epoch + 1,
    }
    whole = list(islice(steps_of(tokens, 0, Cursor()), per_epoch + 4))
    cursor = whole[done[stop] - 1].after
    rest = islice(steps_of(tokens, num_workers, cursor), per_epoch + 4 - done[stop])
    assert [plain(step) for step in rest] == [plain(step) for step in whole[done[stop] :]]
    assert cursor.epoch == (1 if done[stop] >= per_epoch else 0)


def test_a_dataset_of_ones_own_need_not_say_what_it_cannot_do() -> None:
    documents: Any = SimpleNamespace(kind="text")
    assert packing_dataset(documents) is None
    assert members_of(documents) == {"": documents}
    assert not has_adapting(documents)
    reading = Reading(documents, cast(Any, "job"), cast(Any, "packer"))
    assert adapted(cast(Any, None), reading) is reading


def test_a_mixture_adapts_where_one_of_it_does() -> None:
    plain: Any = SimpleNamespace(kind="text")
    images: Any = SimpleNamespace(kind="text", adapt=lambda config, reading: reading)
    mixture: Any = SimpleNamespace(datasets={"a": plain}, combine=lambda datasets, size: datasets)
    assert not has_adapting(mixture)
    mixture.datasets["b"] = images
    assert has_adapting(mixture)
