"""Trees in the data feed are documents: resumed, mixed, repacked and sampled as any others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from automodel_lite.config.schema import MeshConfig
from automodel_lite.data.feeding.mixture import Mixture
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.feeding.source import Cursor, PackSource, StepBatches
from automodel_lite.data.prepare import build_packer, check_sizes, prepare_data
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.thd import to_thd
from tests.recipes.test_trees import answered_prompts, settings
from tests.runs import config_of

MESH, COSTS, START = init_mesh(MeshConfig()), CostModel(1.0, 0.1), Cursor()


def data_of(tmp_path: Path, *overrides: str) -> PackSource:
    path = answered_prompts(tmp_path / "a.jsonl", 24)
    more = ["training.global_batch_size=2", f"cache_dir={tmp_path / 'cache'}", *overrides]
    config = config_of("smoke", tmp_path / "run", *settings(path, *more))
    return prepare_data(config, check_sizes(config, 1), build_packer(config))


def plain(step: StepBatches) -> list:
    return [
        {name: values.tolist() for name, values in batch.items() if name != "qkv_format"}
        for batch in step.micro_batches
    ]


def steps_of(data: PackSource, cursor: Cursor = START) -> Iterator[StepBatches]:
    return data.steps(cursor, MESH, COSTS)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["packed_sequence.repack_each_epoch=true"],
        ["packed_sequence.strategy=best_fit"],
    ],
    ids=["same packs", "repacked", "best_fit"],
)
def test_planned_trees_resume_anywhere(tmp_path: Path, overrides: list[str]) -> None:
    data = data_of(tmp_path, *overrides)
    whole = list(islice(steps_of(data), 12))
    assert any(to_thd(batch).attention.tree is not None for step in whole for batch in step.micro_batches)
    assert whole[-1].epoch > 0
    for stop in (1, 4, 7):
        rest = islice(steps_of(data_of(tmp_path, *overrides), whole[stop - 1].after), 12 - stop)
        assert [plain(step) for step in rest] == [plain(step) for step in whole[stop:]]


def test_streamed_trees_resume_anywhere(tmp_path: Path) -> None:
    stream = ["dataset=streaming", f"dataset.path={tmp_path / 'a.jsonl'}", "dataset.num_shards=2"]
    data = data_of(tmp_path, *stream)
    whole = list(islice(steps_of(data), 8))
    assert any(to_thd(batch).attention.tree is not None for step in whole for batch in step.micro_batches)
    for stop in (1, 3, 6):
        rest = islice(steps_of(data, whole[stop - 1].after), 8 - stop)
        assert [plain(step) for step in rest] == [plain(step) for step in whole[stop:]]


@pytest.mark.parametrize("repack", ["true", "false"])
def test_every_label_of_a_tree_once_an_epoch(tmp_path: Path, repack: str) -> None:
    """As many labels, weighted, as the rows have: nothing of a tree is lost or taken twice by packing."""

    def num_labels(*overrides: str) -> list[float]:
        steps = islice(steps_of(data_of(tmp_path, *overrides)), 60)
        found = [0.0, 0.0]
        for step in steps:
            if step.epoch < 2:
                found[step.epoch] += sum(to_thd(batch).num_label_tokens for batch in step.micro_batches)
        return found

    trees = num_labels(f"packed_sequence.repack_each_epoch={repack}")
    rows = num_labels(f"packed_sequence.repack_each_epoch={repack}", "packed_sequence.tree=off")
    assert torch.tensor(trees).tolist() == torch.tensor(rows).tolist()
    assert trees[0] == trees[1]


def test_a_mixture_draws_whole_trees(tmp_path: Path) -> None:
    """Half of one set and all of another: each tree that is drawn has its rows, and resumes as they do."""
    one, other = (answered_prompts(tmp_path / f"{name}.jsonl", 24) for name in "ab")
    config = config_of("smoke", tmp_path / "run", *settings(one, f"cache_dir={tmp_path / 'cache'}"))

    def mixed() -> PlannedPacks:
        half = {"dataset": FilesDataset(str(one)), "repeat": 0.5}
        sources = {"half": half, "whole": {"dataset": FilesDataset(str(other))}}
        return PlannedPacks.prepared(config, Mixture(sources), build_packer(config), BatchShape(2, 1, 1))

    data = mixed()
    rows = data.tokens.train
    assert (rows.row_lengths < rows.lengths).sum() == len(rows) == 24 + 12
    assert rows.row_lengths.max() <= data.longest < rows.lengths.min()
    whole = list(islice(steps_of(data), 10))
    rest = list(islice(steps_of(mixed(), whole[5].after), 4))
    assert [plain(step) for step in rest] == [plain(step) for step in whole[6:]]
