"""Planned packs: enough steps to learn or a sentence, labels that cutting leaves, trees that resume anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from automodel_lite.config.check import check_config
from automodel_lite.config.schema import MeshConfig, TokenizeConfig
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.planned import PlannedPacks, check_masked
from automodel_lite.data.feeding.source import Cursor, HostStep, PackSource
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.prepare import build_packer, check_sizes, prepare_data
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.token_rows import RowCounts, flatten
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.parts.datasets.mixture import Mixture
from automodel_lite.thd import to_thd
from tests.recipes.test_trees import answered_prompts, settings
from tests.runs import composed, config_of


def plan_of(folder: Path, *overrides: str) -> tuple[int, int]:
    """(steps, packs per step) of 60 chats of some 40 tokens."""
    row = {
        "messages": [
            {"role": "user", "content": "Name a city."},
            {"role": "assistant", "content": "Paris. " * 4},
        ]
    }
    (folder / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 60)
    chosen = [
        "model=llama_smoke",
        "tokenizer=bpe",
        f"dataset.path={folder}/chats.jsonl",
        f"cache_dir={folder}/cache",
    ]
    config = check_config(composed("finetune", *chosen, "name=x", *overrides))
    data = prepare_data(config, check_sizes(config, 1), build_packer(config))
    plan = data.plan(config.training)
    return plan.max_steps, plan.shape.global_batch_size


def test_small_sets_get_three_epochs_and_small_steps(tmp_path: Path) -> None:
    steps, packs = plan_of(tmp_path, "packed_sequence.packed_sequence_size=64")
    assert steps >= 50
    assert packs < 8


def test_too_few_steps_are_an_error_with_the_cure(tmp_path: Path) -> None:
    whole = ["packed_sequence.packed_sequence_size=4096"]
    with pytest.raises(
        ConfigError,
        match=r"1 pack makes 3 steps of 1 in 3 epochs \(.*under 10,000 documents\), too few",
    ):
        plan_of(tmp_path, *whole)
    with pytest.raises(
        ConfigError,
        match=r"training.global_batch_size=1 or training.num_epochs=10 or training.allow",
    ):
        plan_of(tmp_path, *whole, "training.global_batch_size=8", "training.num_epochs=1")
    assert plan_of(tmp_path, *whole, "training.num_epochs=10") == (10, 1)
    assert plan_of(tmp_path, *whole, "training.allow_few_steps=true") == (3, 1)
    assert plan_of(tmp_path, *whole, "training.max_steps=4") == (4, 8)


_ = -100


SHORT = {"input_ids": [1, 2, 3], "labels": [_, 3, _]}


# its answer is behind the fourth token
LATE = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [_, _, _, _, 6, _]}


EARLY = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [2, _, _, _, _, _]}


def test_a_step_of_documents(tmp_path: Path) -> None:
    """60 documents in some 6 packs: three steps per epoch of 24 documents have 2 packs each."""
    whole = ["packed_sequence.packed_sequence_size=256", "training.num_epochs=4"]
    assert plan_of(tmp_path, *whole, "training.global_batch_documents=24") == (12, 2)
    with pytest.raises(
        ConfigError, match=r"\d packs make 8 steps of 30 documents in 4 epochs, too"
    ):
        plan_of(tmp_path, *whole, "training.global_batch_documents=30")


STREAM = ["dataset=streaming", "packed_sequence.packed_sequence_size=64"]


def test_a_stream_has_no_steps_of_documents(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"global_batch_documents=24 needs .*global_batch_size in"
    ):
        plan_of(tmp_path, *STREAM, "training.global_batch_documents=24")


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_of_documents_resume_anywhere(tmp_path: Path, ranks: int) -> None:
    texts = [f"{'word ' * (1 + i * 7 % 23)}{i}" for i in range(90)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    chosen = [f"dataset.path={tmp_path}/a.jsonl", "packed_sequence.packed_sequence_size=64"]
    chosen += ["model=llama_smoke", "tokenizer=bpe", f"cache_dir={tmp_path}/cache", "name=x"]
    batch = ["training.global_batch_documents=16", "training.num_epochs=2"]
    config = check_config(composed("finetune", *chosen, *batch))
    data = prepare_data(config, BatchShape(8, 1, ranks), build_packer(config))
    steps = data.plan(config.training).max_steps
    assert steps == 2 * 6  # 90 / 16
    whole = [*islice(data.steps(Cursor(), MESH, COSTS), steps)]
    plan = data.planned.packs_of(0).plan
    for step in whole:
        sizes = [plan.offsets[pack + 1] - plan.offsets[pack] for pack in step.pack_ids]
        assert abs(sum(sizes) - 16) <= 8
    assert sorted(pack for step in whole[:6] for pack in step.pack_ids) == [*range(len(plan))]
    for done in (1, 4, 6):
        rest = [*islice(data.steps(whole[done - 1].after, MESH, COSTS), steps - done)]
        assert [step.pack_ids for step in rest] == [step.pack_ids for step in whole[done:]]


def test_documents_without_a_label_after_cutting_are_left_out() -> None:
    rows = flatten([SHORT, LATE, EARLY])
    plan = plan_packs(rows.lengths, 4, overlong="truncate", has_labels=rows.has_labels)
    assert sorted(plan.doc_ids.tolist()) == [0, 2]
    counts = plan.counts
    assert (
        counts.masked_documents,
        counts.masked_tokens,
        counts.cut_tokens,
        counts.packed_tokens,
    ) == (1, 4, 4, 7)
    assert counts.left_out_documents == counts.left_out_tokens == 0
    with pytest.raises(
        DataError, match=r"train: 1 of 3 documents has nothing trained on within .*=4: .* allows 0"
    ):
        check_masked("train", plan, {"train": RowCounts(3, 3)}, TokenizeConfig(max_bad_frac=0.05))
    check_masked("train", plan, {"train": RowCounts(3, 3)}, TokenizeConfig(max_bad_frac=0.4))


def test_pieces_without_a_label_are_left_out() -> None:
    rows = flatten([SHORT, LATE, EARLY])
    plan = plan_packs(rows.lengths, 4, overlong="split", has_labels=rows.has_labels)
    pieces = sorted(zip(plan.doc_ids.tolist(), plan.starts.tolist(), plan.stops.tolist()))
    assert pieces == [(0, 0, 3), (1, 4, 6), (2, 0, 4)]
    assert (plan.counts.masked_documents, plan.counts.masked_tokens) == (0, 6)


def test_nothing_is_left_to_train_on() -> None:
    rows = flatten([LATE])
    with pytest.raises(
        DataError, match=r"no document has a label within packed_sequence.packed_sequence_size=4"
    ):
        plan_packs(rows.lengths, 4, overlong="truncate", has_labels=rows.has_labels)


MESH, COSTS, START = init_mesh(MeshConfig()), CostModel(1.0, 0.1), Cursor()


def data_of(tmp_path: Path, *overrides: str) -> PackSource:
    path = answered_prompts(tmp_path / "a.jsonl", 24)
    more = ["training.global_batch_size=2", f"cache_dir={tmp_path / 'cache'}", *overrides]
    config = config_of("smoke", tmp_path / "run", *settings(path, *more))
    return prepare_data(config, check_sizes(config, 1), build_packer(config))


def plain(step: HostStep) -> list:
    return [
        {name: values.tolist() for name, values in batch.items() if name != "qkv_format"}
        for batch in step.micro_batches
    ]


def steps_of(data: PackSource, cursor: Cursor = START) -> Iterator[HostStep]:
    return data.steps(cursor, MESH, COSTS)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["packed_sequence.repack_each_epoch=true"],
        ["packed_sequence.max_packs=5"],
        ["packed_sequence.strategy=best_fit"],
    ],
    ids=["same packs", "repacked", "a sample", "best_fit"],
)
def test_planned_trees_resume_anywhere(tmp_path: Path, overrides: list[str]) -> None:
    data = data_of(tmp_path, *overrides)
    whole = list(islice(steps_of(data), 12))
    assert any(
        to_thd(batch).attention.tree is not None for step in whole for batch in step.micro_batches
    )
    assert whole[-1].epoch > 0
    for stop in (1, 4, 7):
        rest = islice(steps_of(data_of(tmp_path, *overrides), whole[stop - 1].after), 12 - stop)
        assert [plain(step) for step in rest] == [plain(step) for step in whole[stop:]]


def test_the_mask_of_a_tree_is_drawn_with_its_branches(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    drawn, pack = data.lengths(), data.packs_of(0)[0]
    num_real = int(pack["seq_lens_padded"][pack["seq_lens"] > 0].sum())
    assert sum(drawn["pack"]) == num_real
    # A branch is seen by its own tokens only, a prompt by all of its answers.
    ends = [sum(drawn["pack"][: i + 1]) for i in range(len(drawn["pack"]))]
    assert all(end <= until for end, until in zip(ends, drawn["until"], strict=True))
    assert {end == until for end, until in zip(ends, drawn["until"])} == {True, False}
    assert "until" not in data_of(tmp_path, "packed_sequence.tree=off").lengths()


def test_streamed_trees_resume_anywhere(tmp_path: Path) -> None:
    stream = ["dataset=streaming", f"dataset.path={tmp_path / 'a.jsonl'}", "dataset.num_shards=2"]
    data = data_of(tmp_path, *stream)
    whole = list(islice(steps_of(data), 8))
    assert any(
        to_thd(batch).attention.tree is not None for step in whole for batch in step.micro_batches
    )
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
                found[step.epoch] += sum(
                    to_thd(batch).num_label_tokens for batch in step.micro_batches
                )
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
        return PlannedPacks.prepare(
            config, Mixture(sources), build_packer(config), BatchShape(2, 1, 1)
        )

    data = mixed()
    rows = data.tokens.train
    assert (rows.row_lengths < rows.lengths).sum() == len(rows) == 24 + 12
    assert rows.row_lengths.max() <= data.longest < rows.lengths.max()
    whole = list(islice(steps_of(data), 10))
    rest = list(islice(steps_of(mixed(), whole[5].after), 4))
    assert [plain(step) for step in rest] == [plain(step) for step in whole[6:]]
