"""Rows that begin alike become trees: as few tokens as possible, and the same labels, weights and rows."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.packing.packs import Packer, join_packs
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import (
    LabelSpans,
    RowsWriter,
    TokenizedData,
    flatten,
    load_rows,
)
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.data.tokens.trees import cut_tree, grow_trees
from automodel_lite.prefix_trees import find_nodes
from automodel_lite.thd import to_thd
from tests.attention.trees import labelled, random_rows
from tests.data.templates import MARKED, QWEN3, byte_tokenizer

_ = -100


def rows_of(rows: list[tuple[list[int], list[int]]]) -> list[dict[str, np.ndarray]]:
    return [
        {"input_ids": np.array(ids, np.int32), "labels": np.array(labels, np.int32)}
        for ids, labels in rows
    ]


def spelled(tree: dict[str, Any]) -> list[list[int]]:
    """The rows of a tree, by the paths of a pack that holds it."""
    pack = Packer(len(tree["input_ids"])).pack_of(flatten([tree]))
    nodes = find_nodes(torch.tensor([0, len(tree["input_ids"])]), pack["position_ids"])
    ids = torch.tensor(tree["input_ids"])
    if nodes is None:
        return [ids.tolist()]
    return [ids[path].tolist() for path in nodes.paths.split(nodes.path_lens.tolist())]


def test_three_rows_are_the_tree_of_the_drawing() -> None:
    rows = rows_of([labelled([7, 8], 1), labelled([7, 9, 2, 3], 2), labelled([7, 9, 4], 1)])
    (tree,) = grow_trees(rows, least_shared=1)
    assert tree["input_ids"].tolist() == [7, 8, 7, 9, 2, 3, 9, 4]
    assert tree["labels"].tolist() == [8, _, 9, 2, 3, _, 4, _]
    assert tree["branches"].tolist() == [0, 0, 1, 0, 0, 0, 2, 0]
    assert "loss_weights" not in tree


def test_a_label_that_two_rows_train_weighs_two() -> None:
    (tree,) = grow_trees(
        rows_of([labelled([1, 2, 3, 4], 1), labelled([1, 2, 3, 5], 2)]), least_shared=2
    )
    assert tree["input_ids"].tolist() == [1, 2, 3, 4, 3, 5]
    assert tree["labels"].tolist() == [2, 3, 4, _, 5, _]
    assert tree["loss_weights"].tolist() == [1, 2, 1, 1, 1, 1]


def test_a_last_label_may_be_of_a_token_that_its_row_lacks() -> None:
    """Answers as they were sampled: an end token is a label alone. One is the beginning of another."""
    rows = rows_of([([1, 2, 3], [_, 3, 7]), ([1, 2, 3, 4], [_, 3, 4, 7]), ([1, 2, 3], [_, 3, 8])])
    (tree,) = grow_trees(rows, least_shared=1)
    assert tree["input_ids"].tolist() == [1, 2, 3, 3, 3, 4]
    assert tree["labels"].tolist() == [_, 3, 7, 8, 4, 7]
    assert tree["branches"].tolist() == [0, 0, 0, 3, 3, 0]
    assert tree["loss_weights"].tolist() == [1, 3, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            [([1, 2, 3, 4], [9, 9, 9, _]), ([1, 2, 3, 5], [_] * 4)],
            "labels that are not the next token",
        ),
        ([([1, 2, 3], [2, 3, _]), ([1, 9, 3], [9, 3, _])], "too little is shared"),
    ],
    ids=["labels of one's own", "short beginnings"],
)
def test_rows_that_stay_rows(rows: list, why: str) -> None:
    assert len(grow_trees(rows_of(rows), least_shared=2)) == 2, why


@pytest.mark.parametrize("seed", range(30))
def test_random_trees_keep_rows_and_labels(seed: int) -> None:
    """Whole, and cut into parts for small packs: every row and every label is there as often as before."""
    r = random.Random(seed)
    rows = random_rows(r, 9, r.randint(1, 6))
    if r.random() < 0.5:
        rows += [rows[0]]
    trees = grow_trees(rows_of(rows), least_shared=1)
    size = max(max(len(ids) for ids, _ in rows), r.randint(10, 80))
    parts = [
        part for tree in trees for part in (cut_tree(tree, size) if "branches" in tree else [tree])
    ]
    assert all(len(part["input_ids"]) <= size for part in parts)
    for held in (trees, parts):
        assert sorted(row for tree in held for row in spelled(tree)) == sorted(
            ids for ids, _ in rows
        )
        trained = sum(labels != IGNORE_INDEX for _, row in rows for labels in row)
        weights = [tree.get("loss_weights", np.ones(len(tree["labels"]))) for tree in held]
        assert trained == sum(
            w[tree["labels"] != IGNORE_INDEX].sum() for w, tree in zip(weights, held)
        )


def test_runs_are_the_column(tmp_path: Path) -> None:
    """What is written in pieces, in runs, reads as it was; documents without the column have its padding."""
    writer, r = RowsWriter(tmp_path), np.random.default_rng(0)
    columns = {name: [] for name in ("branches", "loss_weights")}
    for piece in range(6):
        n = int(r.integers(0, 9))
        given = {
            "branches": r.integers(0, 2, n),
            "loss_weights": r.integers(0, 3, n).astype(np.float32),
        }
        given = given if piece % 2 else {}
        writer.append({"input_ids": np.arange(n), "labels": np.arange(n), **given}, np.array([n]))
        columns["branches"] += list(given.get("branches", [0] * n))
        columns["loss_weights"] += list(given.get("loss_weights", [1.0] * n))
    writer.close()
    rows = load_rows(tmp_path)
    for name, want in columns.items():
        column = rows.columns[name]
        assert isinstance(column, LabelSpans)
        for start in range(len(want) + 1):
            for stop in range(len(want) + 1):
                assert column[start:stop].tolist() == want[start:stop]


def test_rows_beside_the_groups_are_alone(tmp_path: Path) -> None:
    writer = RowsWriter(tmp_path)
    for groups in (None, np.array([7, 7]), None):
        writer.append({"input_ids": np.arange(2), "labels": np.arange(2)}, np.array([1, 1]), groups)
    writer.close()
    groups = load_rows(tmp_path).groups
    assert groups is not None
    assert groups.tolist() == [-1, -1, 7, 7, -1, -1]


QUESTIONS = [
    "How many seas are there on the round earth, and how deep is each of them, pray?",
    "Why so?",
    "And then?",
]


def chat(answers: list[str]) -> dict[str, Any]:
    turns = zip(QUESTIONS, answers)
    return {
        "messages": [
            x
            for q, a in turns
            for x in ({"role": "user", "content": q}, {"role": "assistant", **think(a)})
        ]
    }


def think(answer: str) -> dict[str, str]:
    return {"content": answer, "reasoning_content": f"Hm, {answer}? Let me see."}


def tokenized(
    folder: Path,
    lines: list[dict],
    tree: str,
    family: Any = QWEN3,
    size: int | None = None,
    **tokenize: Any,
) -> TokenizedData:
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    job = TokenizeJob(byte_tokenizer(family), TokenizeConfig(**tokenize), tree, size)
    data_format = "preference" if "chosen" in lines[0] else None
    files = FilesDataset(str(folder / "data.jsonl"), format=data_format)
    return tokenize_documents(files, job, folder / "cache")


def num_labels(rows: Any) -> float:
    found = [rows[i] for i in range(len(rows))]
    return sum(
        float(
            (np.ones(len(x["labels"])) if "loss_weights" not in x else x["loss_weights"])[
                x["labels"] != IGNORE_INDEX
            ].sum()
        )
        for x in found
    )


def test_the_turns_of_a_reasoning_chat_are_one_tree(tmp_path: Path) -> None:
    lines = [chat(["Seven.", "They are.", "Salt."]), chat(["Five.", "So they say.", "Fog."])]
    off, auto = (tokenized(tmp_path, lines, tree) for tree in ("off", "auto"))
    assert len(off.train) == 6
    assert len(auto.train) == 2
    assert auto.counts["train"].num_trees == 2
    assert auto.counts["train"].num_saved_tokens == off.train.num_tokens - auto.train.num_tokens
    assert "2 trees of rows that begin alike save" in auto.notes[0]
    assert (
        auto.counts["train"].num_label_tokens
        == off.counts["train"].num_label_tokens
        == num_labels(auto.train)
    )
    assert auto.fingerprint != off.fingerprint
    folder = auto.train.flat.folder
    assert folder
    stored = sum(file.stat().st_size for file in folder.glob("*.bin"))
    assert stored < 1.1 * 8 * auto.train.num_tokens
    again = pickle.loads(pickle.dumps(auto.train))
    assert again[1]["branches"].tolist() == auto.train[1]["branches"].tolist()


def test_responses_and_groups_share_their_prompts(tmp_path: Path) -> None:
    prompt = (
        "Tell me about the ships that came over the sea, from which harbor, and with what cargo."
    )
    lines: list[dict] = [
        {"prompt": prompt, "responses": ["Three ships came.", "None.", "Many ships came."]}
    ] * 2
    answers = tokenized(tmp_path / "a", lines, "auto", MARKED).train
    assert len(answers) == 2
    assert len(spelled(dict(answers[0]))) == 3
    lines = [
        {"prompt": prompt, "completion": text, "group": name}
        for text, name in (("a", "x"), ("b", "y"), ("c", "x"))
    ]
    groups = tokenized(tmp_path / "g", lines, "auto", MARKED).train
    assert [len(spelled(dict(groups[i]))) for i in range(len(groups))] == [2, 1]
    assert len(tokenized(tmp_path / "g", lines, "all", MARKED).train) == 1


def test_a_tree_over_a_pack_is_cut_said_and_counted(tmp_path: Path) -> None:
    lines = [chat(["Seven.", "They are.", "Salt."])]
    whole = tokenized(tmp_path, lines, "auto")
    assert whole.train.lengths[0] > 280 > whole.train.row_lengths[0]
    cut = tokenized(tmp_path, lines, "auto", size=280)
    assert len(cut.train) > 1
    assert cut.train.lengths.max() <= 280
    assert num_labels(cut.train) == num_labels(whole.train)
    assert (
        "train: 1 tree is over packed_sequence.packed_sequence_size=280 and cut into"
        in cut.notes[-1]
    )
    packs = Packer(280).packs(cut.train)
    assert sum(
        to_thd(join_packs([packs[i]])).num_label_tokens for i in range(len(packs))
    ) == num_labels(whole.train)


@pytest.mark.parametrize(
    ("shares", "ids"), [(True, [1, 2, 3, 4, 3, 5]), (False, [1, 2, 3, 4, 1, 2, 3, 5])]
)
def test_answers_that_are_compared_are_one_unit(shares: bool, ids: list[int]) -> None:
    """Whatever they share; where columns differ, only a copied token may be the last that is shared."""
    rows = rows_of([labelled([1, 2, 3, 4], 3), labelled([1, 2, 3, 5], 3)])
    for which, row in enumerate(rows, start=1):
        row["answers"] = np.where(row["labels"] == _, 0, which).astype(np.int32)
    (pair,) = grow_trees(rows, shares=shares)
    assert pair["input_ids"].tolist() == ids
    assert sorted(pair["answers"][pair["labels"] != _].tolist()) == [1, 2]
    (apart,) = grow_trees(
        [rows[0], {**rows[1], "input_ids": rows[1]["input_ids"] + 4, "labels": np.full(4, _)}]
    )
    assert apart["branches"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("tree", ["auto", "off", "all"])
def test_pairs_that_name_a_group_stay_pairs(tmp_path: Path, tree: str) -> None:
    """Answers are compared within their own pair; the column is said to be of no use."""
    prompt = "Tell me about the ships that came over the sea, from which harbor, with what cargo: "
    lines = [
        {"prompt": f"{prompt}{i}", "chosen": f"Ship {i} came.", "rejected": "None did."}
        for i in range(3)
    ]
    want = tokenized(tmp_path / "without", lines, tree, MARKED)
    got = tokenized(tmp_path / "with", [{**line, "group": "x"} for line in lines], tree, MARKED)
    assert len(got.train) == len(want.train) == 3
    for i in range(3):
        for name, values in want.train[i].items():
            assert got.train[i][name].tolist() == values.tolist()
    assert "NOTE: train: ignored, as nothing uses them: group" in "\n".join(got.notes)


def test_half_a_pair_is_no_pair(tmp_path: Path) -> None:
    """An answer whose other one trains nothing would be compared with that of another pair."""
    asked = [{"role": "user", "content": "Which ship?"}]
    lines = [
        {
            "chosen": [*asked, {"role": "assistant", "content": f"Ship {i}.", "weight": weight}],
            "rejected": [*asked, {"role": "assistant", "content": "None."}],
        }
        for i, weight in enumerate([1, 0, 1])
    ]
    data = tokenized(tmp_path, lines, "auto", MARKED, max_bad_frac=0.9)
    found = [set(data.train[i]["answers"].tolist()) for i in range(len(data.train))]
    assert found == [{0, 1, 2}] * 2
    assert data.counts["train"].num_fully_masked == 2


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_a_row_over_a_pack_takes_no_label_from_the_rows_that_it_begins_as(
    tmp_path: Path, overlong: str
) -> None:
    """What an over-long row shares with others is trained on as often as without trees."""
    shared = (
        "Many ships came over the sea that year, from every harbor, and this is what each said: "
    )
    lines: list[dict] = [
        {"prompt": "Tell.", "completion": shared + text, "group": "x"}
        for text in ("a.", "b" * 150, "bb.", "c" * 300, "cc.")
    ]
    sums = []
    for tree in ("off", "auto"):
        rows = tokenized(tmp_path, lines, tree, MARKED, size=200).train
        packs = Packer(200, overlong=overlong).packs(rows)
        sums.append(sum(to_thd(join_packs([packs[i]])).num_label_tokens for i in range(len(packs))))
    assert sums[0] == sums[1] > 0
