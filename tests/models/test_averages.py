"""Means over documents and turns before the step's, and DFT, beside plain transformers in fp64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from automodel_lite import TrainingClient
from automodel_lite.errors import ConfigError
from automodel_lite.models.loss import (
    CrossEntropy,
    FusedLinearCrossEntropy,
    Loss,
    label_units,
)
from automodel_lite.parts.losses.dft import Dft
from automodel_lite.parts.losses.policy import ImportanceSampling
from automodel_lite.thd import to_thd
from tests.attention.families import VOCAB
from tests.models.test_policy import gradients, plain, save_model
from tests.ranks import run_ranks
from tests.runs import losses, train
from tests.tiers import only_in_ci

Row = dict[str, Any]
LOSSES: dict[str, Loss] = {
    "documents": FusedLinearCrossEntropy(average="documents"),
    "turns": FusedLinearCrossEntropy(average="turns", chunk_tokens=8),
    "turns, logits": CrossEntropy(average="turns"),
    "dft": Dft(),
    "dft of turns": Dft(average="turns"),
}
_ = -100


def row_of(ids: list[int], *turns: tuple[int, int], weights: list[float] | None = None) -> Row:
    """A row that trains the labels of some turns: places in it, half open."""
    labels = [_] * len(ids)
    for start, stop in turns:
        labels[start:stop] = ids[start + 1 : stop + 1]
    return {"input_ids": ids, "labels": labels, **({"loss_weights": weights} if weights else {})}


def make_groups(is_weighted: bool) -> list[list[Row]]:
    """Rows of one to three turns; those of a group share a beginning, two are equal."""
    draw = np.random.default_rng(3)
    groups = []
    for length, num_rows in ((70, 3), (12, 2), (66, 2)):
        begin = draw.integers(2, VOCAB, length).tolist()
        group = []
        for number in range(num_rows):
            ids = begin + draw.integers(2, VOCAB, 10 + 5 * number).tolist()
            turns = [(length - 1, length + 2 + number), (length + 4 + number, length + 9 + number)]
            weights = None
            if is_weighted:
                weights = draw.integers(0, 4, len(ids)).astype(float).tolist()
                if number == 1:  # a turn that counts nothing
                    weights[turns[0][0] : turns[0][1]] = [0.0] * (turns[0][1] - turns[0][0])
            group.append(row_of(ids, *turns[: 1 + number % 2], weights=weights))
        groups.append([*group, dict(group[0])])
    if is_weighted:
        ids = draw.integers(2, VOCAB, 9).tolist()
        groups.append([row_of(ids, (2, 5), weights=[0.0] * 9)])  # a row that counts nothing
    return groups


def textbook(loss: Any, row: Row, new: Tensor) -> tuple[Tensor, float]:
    """The loss of one row from the log-probabilities of its labels, and what it counts."""
    places = np.flatnonzero(np.array(row["labels"]) != _)
    weights = torch.tensor(row.get("loss_weights", [1.0] * len(row["labels"])))[places].double()
    values = -new.detach().exp() * new if isinstance(loss, Dft) else -new
    if loss.average == "labels":
        return (values * weights).sum(), float(weights.sum())
    cuts = np.flatnonzero(np.diff(places) != 1) + 1 if loss.average == "turns" else []
    total, count = values.sum() * 0, 0
    for own in np.split(np.arange(len(places)), cuts):
        if weights[own].sum() > 0:
            total = total + (values[own] * weights[own]).sum() / weights[own].sum()
            count += 1
    return total, count


Truth = tuple[float, float, dict[str, np.ndarray]]


def truths(folder: str, groups: list[list[Row]]) -> dict[str, Truth]:
    """Of each loss: its sum, what it counts, and its gradients, a row at a time in fp64."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = [row for group in groups for row in group]
    found = [plain(lm, row) for row in rows]
    by_name = {}
    for name, loss in LOSSES.items():
        values, counts = zip(*(textbook(loss, row, new) for row, new in zip(rows, found)))
        lm.zero_grad()
        torch.stack(values).sum().backward(retain_graph=True)
        grads = {n: p.grad.numpy().copy() for n, p in lm.named_parameters() if p.grad is not None}
        by_name[name] = (torch.stack(values).sum().item(), sum(counts), grads)
    return by_name


def errors(rank: int, world: int, folder: str, *overrides: str) -> dict[str, float]:
    """The largest relative difference of each loss and its gradients from the truth."""
    chosen = (f"model.pretrained={folder}", "packed_sequence.packed_sequence_size=128")
    found = {}
    with TrainingClient("finetune", *chosen, "training.num_threads=1", *overrides) as client:
        for kind in ("plain", "weighted"):
            groups = make_groups(kind == "weighted")
            for name, (total, count, wanted) in truths(folder, groups).items():
                largest = max(float(np.abs(grad).max()) for grad in wanted.values())
                rows = [row for group in groups for row in group]
                for how, given in {"rows": rows, "trees": groups}.items():
                    out = client.forward_backward(given, LOSSES[name])
                    got = gradients(client)
                    client.zero_grad()
                    assert out.num_items == count, (kind, name, how)
                    off = [np.abs(grad.numpy() - wanted[n]).max() for n, grad in got.items()]
                    error = max(abs(out.loss - total) / abs(total), float(max(off)) / largest)
                    found[f"{kind} {name} {how}"] = error
    return found


def test_averages_are_their_textbook_forms(tmp_path: Path) -> None:
    found = errors(0, 1, save_model("llama", tmp_path))
    assert len(found) == 4 * len(LOSSES)
    assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize(
    "layout",
    ["mesh.cp=2", *only_in_ci("mesh.dp_shard=2", "mesh.strategy=ddp")],
)
def test_two_ranks_average_as_one(layout: str, tmp_path: Path) -> None:
    for found in run_ranks(errors, 2, save_model("llama", tmp_path), layout):
        assert max(found.values()) < 2e-5, found


def test_units_of_labels() -> None:
    """Documents of 5 and 2 tokens in slots of 6 and 2; the second label of the first is a turn of its own."""
    row = {
        "input_ids": [1, 2, 3, 4, 5, 0, 6, 7],
        "labels": [2, 3, _, 5, _, _, 7, 8],
        "position_ids": [0, 1, 2, 3, 4, 0, 0, 1],
        "loss_weights": [1.0, 3.0, 1.0, 2.0, 1.0, 1.0, 0.0, 0.0],
    }
    batch = {name: torch.tensor(values) for name, values in row.items()}
    batch |= {"seq_lens": torch.tensor([5, 2]), "seq_lens_padded": torch.tensor([6, 2])}
    whole = to_thd(batch, with_mixers=False)
    documents = label_units(whole, "documents")
    assert documents[0].tolist() == [0, 0, 0, 1, 1]
    assert documents[2].tolist() == [6.0, 0.0]
    assert label_units(whole, "turns")[0].tolist() == [0, 0, 1, 2, 2]
    loss = FusedLinearCrossEntropy(average="turns")
    assert loss.num_items(whole) == 2
    weights = loss.prepare(whole).columns["average_weights"]
    assert weights.tolist() == [0.25, 0.75, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def settings(folder: str, path: Path, average: str) -> list[str]:
    rows = [row for group in make_groups(False) for row in group]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = [f"model.pretrained={folder}", f"dataset.path={path}", f"loss.average={average}"]
    chosen += ["packed_sequence.packed_sequence_size=128", "training.num_threads=1", "name=x"]
    chosen += ["training.num_epochs=null", "training.max_steps=1", "checkpoint.export_hf=false"]
    return [*chosen, "training.global_batch_size=64"]


@pytest.mark.parametrize(
    ("average", "layout"),
    [
        ("documents", []),
        ("turns", ["packed_sequence.tree=all", "training.micro_batch_size=2"]),
        ("turns", ["packed_sequence=none"]),
    ],
    ids=str,
)
def test_a_run_averages_over_documents_and_turns(
    average: str, layout: list[str], tmp_path: Path
) -> None:
    """Its loss, and its validation of the same rows before any step, which also has the mean over labels."""
    folder = save_model("llama", tmp_path / "model")
    chosen = settings(folder, tmp_path / "rows.jsonl", average)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "val.jsonl").write_text("\n".join(reversed(lines)))
    chosen += [f"dataset.val_path={tmp_path}/val.jsonl", "optimizer.lr=1e-12", *layout]
    rows = train("finetune", tmp_path / "run", *chosen)
    total, count, _ = truths(folder, make_groups(False))[average]
    assert losses(rows)[0][0] == pytest.approx(total / count, rel=1e-5)
    found = next(row for row in rows if "val_loss/val" in row)
    assert found["val_loss/val"] == pytest.approx(total / count, rel=1e-5)
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    given = [row for group in make_groups(False) for row in group]
    by_label = -torch.cat([plain(lm, row) for row in given]).mean().item()
    assert found["val_cross_entropy/val"] == pytest.approx(by_label, rel=1e-5)


@pytest.mark.parametrize("cut", ["packed_sequence.overlong=split", "packed_sequence=wrapped"])
def test_documents_that_are_averaged_are_not_cut(cut: str, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    chosen = settings(folder, tmp_path / "rows.jsonl", "documents")
    with pytest.raises(
        ConfigError, match=r"rows of loss=FusedLinearCrossEntropy stay whole, .* use"
    ):
        train("finetune", tmp_path / "run", cut, *chosen)


def test_policies_average_over_turns(tmp_path: Path) -> None:
    """By the same weights; `rows` is another name of documents there."""
    row = row_of(list(range(2, 14)), (3, 5), (7, 11))
    row |= {"advantages": [0.0 if x == _ else 2.0 for x in row["labels"]]}
    folder = save_model("llama", tmp_path)
    with TrainingClient("policy", f"model.pretrained={folder}", "training.num_threads=1") as client:
        found = {}
        for average in ("documents", "rows", "turns"):
            out = client.forward_backward([row], ImportanceSampling(average=average))
            found[average] = (out.num_items, pytest.approx(out.loss))
            client.zero_grad()
    assert found == {"documents": (1, -2.0), "rows": (1, -2.0), "turns": (2, -4.0)}
