"""Mixtures: shares, repeats, caps, order, and each dataset's own counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import TokenizedData, flatten
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from automodel_lite.errors import ConfigError
from automodel_lite.parts.datasets.memmap import MemmapCorpus, write_memmap
from automodel_lite.parts.datasets.mixture import MixedRows, Mixture, choose_documents
from automodel_lite.parts.datasets.streams import StreamingDataset
from automodel_lite.training.classes import classes_of_documents
from tests.data.templates import MARKED, byte_tokenizer


def texts(path: Path, letter: str, count: int, length: int) -> FilesDataset:
    """`count` documents of `length` tokens, the end token included."""
    path.write_text(
        "".join(json.dumps({"text": letter * (length - 1)}) + "\n" for _ in range(count))
    )
    return FilesDataset(str(path), val_frac=0.0)


def mixed(
    tmp_path: Path, sources: dict[str, dict], **options: Any
) -> tuple[TokenizedData, dict[str, int]]:
    data = tokenize_documents(
        Mixture(sources, **options), TokenizeJob(byte_tokenizer(MARKED)), tmp_path
    )
    assert isinstance(data.train, MixedRows)
    return data, data.train.tokens_by_source()


@pytest.mark.parametrize(
    ("small", "large", "stop", "tokens"),
    [
        ({}, {}, "first_exhausted", {"small": 100, "large": 1000}),
        ({"repeat": 3}, {"repeat": 0.5}, "first_exhausted", {"small": 300, "large": 500}),
        ({"weight": 1}, {"weight": 1}, "first_exhausted", {"small": 100, "large": 100}),
        ({"weight": 1}, {"weight": 3}, "first_exhausted", {"small": 100, "large": 300}),
        ({"weight": 1}, {"weight": 1}, "all_exhausted", {"small": 1000, "large": 1000}),
        ({"weight": 0.2}, {"weight": 0.8}, "all_exhausted", {"small": 250, "large": 1000}),
    ],
    ids=[
        "as they are",
        "repeats",
        "half and half",
        "one to three",
        "until all",
        "until all by share",
    ],
)
def test_tokens_of_an_epoch(
    tmp_path: Path, small: dict, large: dict, stop: str, tokens: dict
) -> None:
    sources = {
        "small": {"dataset": texts(tmp_path / "s.jsonl", "s", 10, 10), **small},
        "large": {"dataset": texts(tmp_path / "l.jsonl", "l", 50, 20), **large},
    }
    assert mixed(tmp_path, sources, stop=stop)[1] == tokens


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    sources = {
        "small": {"dataset": texts(tmp_path / "s.jsonl", "s", 10, 10), "weight": 1},
        "large": {"dataset": texts(tmp_path / "l.jsonl", "l", 50, 20), "weight": 1},
    }
    first, again, other = (mixed(tmp_path, sources, seed=seed)[0].train for seed in (1, 1, 2))
    assert [first.row_ids.tolist(), first.source_ids.tolist()] == [
        again.row_ids.tolist(),
        again.source_ids.tolist(),
    ]
    assert first.row_ids.tolist() != other.row_ids.tolist()
    assert set(first.source_ids[:8].tolist()) == {0, 1}  # the order is mixed


def test_each_epoch_draws_its_own_documents(tmp_path: Path) -> None:
    """Of 50 documents 5 an epoch; from the epoch alone, so that a run can continue in any of them."""
    sources = {
        "small": {"dataset": texts(tmp_path / "s.jsonl", "s", 10, 10), "weight": 1},
        "large": {"dataset": texts(tmp_path / "l.jsonl", "l", 50, 20), "weight": 1},
    }
    data, again = (mixed(tmp_path, sources)[0] for _ in range(2))
    drawn = [
        rows.row_ids[rows.source_ids == 1].tolist()
        for rows in (data.train, *map(data.drawn, range(1, 4)))
    ]
    assert all(len(set(documents)) == 5 for documents in drawn)
    assert len({tuple(sorted(documents)) for documents in drawn}) == 4
    assert again.drawn(3).row_ids.tolist() == data.drawn(3).row_ids.tolist()
    assert data.longest == 20


def test_what_is_taken_whole_is_not_drawn_again(tmp_path: Path) -> None:
    data, _ = mixed(
        tmp_path, {"a": {"dataset": texts(tmp_path / "a.jsonl", "a", 4, 10), "repeat": 2}}
    )
    assert data.drawn is None


@pytest.mark.parametrize(
    ("num_tokens", "chosen"),
    [(0, 0), (4, 1), (8, 2), (16, 4), (20, 5), (32, 8)],
)
def test_documents_are_taken_whole_times_and_a_drawn_rest(num_tokens: int, chosen: int) -> None:
    ids = choose_documents(np.full(4, 4), num_tokens, np.random.default_rng(0))
    assert len(ids) == chosen
    counts = np.bincount(ids, minlength=4)
    assert counts.max() - counts.min() <= 1


def test_every_dataset_keeps_its_counts_and_its_validation(tmp_path: Path) -> None:
    sources = {
        "a": texts(tmp_path / "a.jsonl", "a", 10, 10),
        "b": texts(tmp_path / "b.jsonl", "b", 10, 10),
    }
    sources["b"].val = {"val": sources["a"].train, "hard": sources["b"].train}
    data, _ = mixed(tmp_path, {name: {"dataset": dataset} for name, dataset in sources.items()})
    assert set(data.val) == {"b", "b/hard"}
    assert {name: counts.num_tokens for name, counts in data.counts.items()} == {
        "a/train": 100,
        "b/train": 100,
        "b/val/val": 100,
        "b/val/hard": 100,
    }
    assert data.notes[-2:] == (
        "a: 100 tokens an epoch, 50.0% of all, 1.00 x its 100",
        "b: 100 tokens an epoch, 50.0% of all, 1.00 x its 100",
    )


def test_packs_of_a_mixture_hold_its_rows(tmp_path: Path) -> None:
    write_memmap(tmp_path / "c", [[7] * 10] * 5, "uint16")
    sources = {
        "text": {"dataset": texts(tmp_path / "a.jsonl", "a", 10, 10)},
        "corpus": {"dataset": MemmapCorpus(str(tmp_path / "c")), "repeat": 2},
    }
    data, tokens = mixed(tmp_path, sources)
    assert tokens == {"text": 100, "corpus": 100}
    for strategy in ("exact_fill", "wrapped"):
        packs = PackedDataset(
            data.train, plan_packs(data.train.lengths, 25, strategy=strategy, overlong="split")
        )
        ids = np.concatenate([packs[i]["input_ids"].numpy() for i in range(len(packs))])
        assert (ids == 7).sum() == 100


def test_a_tokenizer_is_trained_on_all_sources(tmp_path: Path) -> None:
    sources = {
        letter: {"dataset": texts(tmp_path / f"{letter}.jsonl", letter, 20, 40)} for letter in "xy"
    }
    vocab = train_bpe_tokenizer(Mixture(sources), 280, cache_dir=tmp_path).get_vocab()
    assert "xx" in vocab
    assert "yy" in vocab


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"weight": 1, "repeat": 2},
            "dataset.sources.a has weight=1 and repeat=2: give one of them.",
        ),
        (
            {"weigth": 1},
            "dataset.sources.a: unknown key weigth; a source has dataset, and weight or repeat.",
        ),
        *(
            (
                {"repeat": repeat},
                f"dataset.sources.a.repeat={repeat} must be a number over 0 and at most 1,000.",
            )
            for repeat in (0, -1, float("nan"), float("inf"), 1e9, "two", [1, 2])
        ),
        *(
            ({"weight": weight}, f"dataset.sources.a.weight={weight} must be a number over 0.")
            for weight in (0, -0.5, float("nan"), float("inf"), "half", [1, 2])
        ),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, source: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture({"a": {"dataset": texts(tmp_path / "a.jsonl", "a", 2, 3), **source}})
    assert str(caught.value) == message


def test_weights_that_take_a_set_too_often(tmp_path: Path) -> None:
    sources = {
        "small": {"dataset": texts(tmp_path / "s.jsonl", "s", 10, 10), "weight": 1e9},
        "large": {"dataset": texts(tmp_path / "l.jsonl", "l", 50, 20), "weight": 1},
    }
    with pytest.raises(
        ConfigError,
        match=r"dataset.sources.small: an epoch would take it 10,000,000,000 times: set",
    ):
        mixed(tmp_path, sources, stop="all_exhausted")
    assert mixed(tmp_path, sources)[1] == {"small": 100, "large": 0}


@pytest.mark.parametrize("dataset", [{"path": "a.jsonl"}, "a.jsonl", None])
def test_a_source_needs_a_class(dataset: object) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset.sources.a.dataset=.* must be a block with a _target_, such as"
    ):
        Mixture({"a": {"dataset": dataset}})


def test_a_dataset_in_place_of_a_source_gets_a_sentence(tmp_path: Path) -> None:
    for source in (texts(tmp_path / "a.jsonl", "a", 2, 3), "a.jsonl", None):
        with pytest.raises(ConfigError, match=r"dataset.sources.a: dataset is missing; a source"):
            Mixture({"a": source})  # type: ignore[dict-item]


def test_a_stream_is_no_source(tmp_path: Path) -> None:
    texts(tmp_path / "a.jsonl", "a", 2, 3)
    with pytest.raises(
        ConfigError, match=r"dataset.sources.a is a stream, whose tokens are not known"
    ):
        Mixture({"a": {"dataset": StreamingDataset(str(tmp_path / "a.jsonl"))}})


def test_weights_for_all_or_none(tmp_path: Path) -> None:
    dataset = texts(tmp_path / "a.jsonl", "a", 2, 3)
    with pytest.raises(
        ConfigError, match=r"dataset.sources.b.weight=null: give all datasets weights, or none"
    ):
        Mixture({"a": {"dataset": dataset, "weight": 1}, "b": {"dataset": dataset}})


@pytest.mark.parametrize("documents", [[], [0], [1], [0, 1]], ids=str)
def test_rows_bring_the_columns_of_all_sets(documents: list[int]) -> None:
    """A rank without a pack, or with packs of one set, made fewer parts of its loss than others."""
    row = {"input_ids": [1, 2], "labels": [2, -100]}
    weighted = flatten([row | {"loss_weights": [2.0, 0.0]}])
    stored = flatten([row | {"teacher_ids": [[3, 4], [0, 0]]}])
    rows = MixedRows([weighted, stored], ["a", "b"], np.array([0, 1]), np.array([0, 0]))
    columns = rows.locate(np.array(documents, int))[0].columns
    weights = [[2.0, 0.0], [1.0, 1.0]]
    assert columns["loss_weights"].tolist() == [x for i in documents for x in weights[i]]
    ids = [[[0, 0], [0, 0]], [[3, 4], [0, 0]]]
    assert columns["teacher_ids"].tolist() == [x for i in documents for x in ids[i]]


def labeled(path: Path, labels: list[Any], **options: Any) -> FilesDataset:
    rows = [{"text": "a", "label": label} for label in labels]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FilesDataset(str(path), format="labeled", **options)


def test_sets_of_classes_have_one_number_in_all_datasets(tmp_path: Path) -> None:
    first = labeled(tmp_path / "a.jsonl", [["x", "y"], ["x"]])
    second = labeled(tmp_path / "b.jsonl", [["y"], ["x"], []])
    assert [second.train[i]["label"] for i in range(3)] == [2, 1, 0]
    mixture = Mixture({"a": {"dataset": first}, "b": {"dataset": second}})
    one, two = mixture.datasets.values()
    assert isinstance(one, FilesDataset)
    assert isinstance(two, FilesDataset)
    assert one.found_classes == two.found_classes
    assert one.found_classes is not None
    assert one.found_classes.sets == ((), (0,), (0, 1), (1,))
    assert [one.train[i]["label"] for i in range(2)] == [2, 1]
    assert [two.train[i]["label"] for i in range(3)] == [3, 1, 0]
    assert first.train[0]["label"] == 1  # as it is alone
    assert one.identity != first.identity


def test_a_source_that_lacks_a_class_names_the_list_to_give(tmp_path: Path) -> None:
    def sources(classes: list[str] | None) -> dict[str, dict[str, FilesDataset]]:
        return {
            name: {"dataset": labeled(tmp_path / f"{name}.jsonl", labels, classes=classes)}
            for name, labels in {"one": ["x", "z"], "two": ["x", "y"]}.items()
        }

    with pytest.raises(ConfigError) as refused:
        classes_of_documents(Mixture(sources(None)))
    assert refused.value.key == "dataset.sources.two.dataset.classes"
    assert "2 classes: x, y, and the sets before it 2 classes: x, z" in str(refused.value)
    assert "dataset.sources.<name>.dataset.classes=[x, y, z]" in str(refused.value)
    found = classes_of_documents(Mixture(sources(["x", "y", "z"])))
    assert found is not None
    assert found.names == ("x", "y", "z")
