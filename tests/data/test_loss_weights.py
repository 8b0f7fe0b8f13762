"""Weights of labels: from a file of tokens, or rows of a stream, to the loss and what it is divided by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import COLUMNS, Column
from automodel_lite.data.packing.packs import PackedDataset, Packer, join_packs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import TokenizedDocuments, flatten
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.models.fused_head import linear_cross_entropy
from automodel_lite.models.loss import (
    CrossEntropy,
    FusedLinearCrossEntropy,
    Loss,
    LossInputs,
    LossOutput,
)
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.datasets.stream_packing import PackStream
from automodel_lite.thd import ThdBatch, to_thd
from tests.attention.families import build
from tests.data.templates import MARKED, byte_tokenizer

_ = -100
WEIGHTED = {"input_ids": [1, 2, 3, 4], "labels": [_, 3, 4, _], "loss_weights": [1.0, 3.0, 0.5, 1.0]}
PLAIN = {"input_ids": [5, 6, 7], "labels": [_, 7, _]}


def tokenized(folder: Path, *rows: dict[str, Any]) -> TokenizedDocuments:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = tokenize_documents(
        FilesDataset(str(file)), TokenizeJob(byte_tokenizer(MARKED)), folder / "cache"
    )
    assert isinstance(data.train, TokenizedDocuments)
    return data.train


def batch_of(rows: TokenizedDocuments, size: int = 8) -> ThdBatch:
    packs = PackedDataset(rows, plan_packs(rows.lengths, size, strategy="next_fit"))
    return to_thd(join_packs(packs.__getitems__(range(len(packs)))))


def test_weights_of_a_file_reach_the_batch(tmp_path: Path) -> None:
    batch = batch_of(tokenized(tmp_path, WEIGHTED, PLAIN))
    assert batch.columns["loss_weights"].tolist() == [1.0, 3.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert batch.num_label_tokens == 3.5 + 1


def test_weights_go_with_unshifted_labels(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3, 4], "labels": [_, _, 3, 4], "loss_weights": [9.0, 9.0, 3.0, 0.5]}
    batch = batch_of(tokenized(tmp_path, row))
    assert batch.labels[:4].tolist() == [_, 3, 4, _]
    assert batch.columns["loss_weights"][:4].tolist() == [9.0, 3.0, 0.5, 1.0]


def test_weights_of_packs_stay_with_their_documents(tmp_path: Path) -> None:
    ids, labels = [1, 2, 0, 4, 5, 6], [2, _, _, _, 6, _]
    packed = {"input_ids": ids, "labels": labels, "seq_lens": [2, 3], "seq_lens_padded": [3, 3]}
    rows = tokenized(tmp_path, packed | {"loss_weights": [2.0, 1.0, 7.0, 3.0, 5.0, 1.0]})
    assert [rows[i]["loss_weights"].tolist() for i in range(2)] == [[2.0, 1.0], [3.0, 5.0, 1.0]]


@pytest.mark.parametrize(
    "weights", [[1.0, 2.0], [1.0, -1.0, 1.0, 1.0], "high"], ids=["short", "negative", "text"]
)
def test_wrong_weights_are_an_error(tmp_path: Path, weights: Any) -> None:
    with pytest.raises(
        DataError, match="column loss_weights must be a list of 4 numbers from 0 on"
    ):
        tokenized(tmp_path, WEIGHTED | {"loss_weights": weights})


def test_rows_without_weights_have_no_column(tmp_path: Path) -> None:
    rows = tokenized(tmp_path, PLAIN)
    assert list(rows.columns) == ["input_ids", "labels"]
    batch = batch_of(rows)
    assert batch.columns == {}
    assert batch.num_label_tokens == 1


def test_a_later_row_may_be_the_first_with_weights() -> None:
    assert flatten([PLAIN, WEIGHTED]).columns["loss_weights"].tolist() == [
        1.0,
        1.0,
        1.0,
        1.0,
        3.0,
        0.5,
        1.0,
    ]


def test_a_stream_carries_weights_of_some_rows() -> None:
    packs = list(PackStream(lambda start: ([row] for row in [PLAIN, WEIGHTED][start:]), Packer(4)))
    assert [pack.get("loss_weights") is None for pack in packs] == [True, False]
    batch = to_thd(join_packs(packs))
    assert batch.columns["loss_weights"].tolist() == [1.0] * 4 + [1.0, 3.0, 0.5, 1.0]


def test_a_cache_of_before_a_column_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized(tmp_path, WEIGHTED)
    monkeypatch.setitem(COLUMNS, "colors", Column("int8", "int64", 0))
    tokenized(tmp_path, WEIGHTED)
    assert len(list((tmp_path / "cache").glob("**/loss_weights.bin"))) == 2


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_fused_weights_equal_plain_ones(softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 31, (50,), generator=generator)
    weights = torch.rand(50, generator=generator)
    results = []
    for fused in (True, False):
        generator.manual_seed(1)
        hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (50, 31))
        if fused:
            loss = linear_cross_entropy(hidden, weight, labels, 16, softcap, weights_R=weights)
        else:
            logits = hidden @ weight.t()
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
        loss.backward()
        results.append((loss, hidden.grad, weight.grad))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "loss", [FusedLinearCrossEntropy(16), CrossEntropy()], ids=["fused", "plain"]
)
def test_a_weight_of_two_is_meeting_the_row_twice(loss: Loss) -> None:
    ids = torch.randint(0, 96, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    row = {"input_ids": ids, "labels": [*ids[1:], _]}
    once, twice = flatten([row | {"loss_weights": [2.0] * 9}]), flatten([row, row])
    got, want = (gradients_of(loss, batch_of(rows, 18)) for rows in (once, twice))
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def gradients_of(loss: Loss, batch: ThdBatch) -> list[Tensor]:
    lm = build("llama")
    install(lm, ReferenceAttention())
    (LossModel(lm, loss)(batch).sum / batch.num_label_tokens).backward()
    return [parameter.grad for parameter in lm.parameters() if parameter.grad is not None]


def test_a_loss_that_ignores_a_column_is_refused() -> None:
    class Ignorant(Loss):
        def __call__(self, inputs: LossInputs) -> LossOutput:
            return LossOutput(-inputs.log_probs().sum(), {})

    batch = batch_of(flatten([WEIGHTED]))
    with pytest.raises(ConfigError, match="column loss_weights, which loss=Ignorant does not use"):
        gradients_of(Ignorant(), batch)
