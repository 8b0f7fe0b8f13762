"""A packed forward and backward equals one forward per document through transformers' own eager attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.thd import ThdBatch
from tests.attention.families import DOCUMENT_LENGTHS, FAMILIES, build, documents, gradients, stream
from tests.attention.hybrids import InFloat64

LARGEST_ERROR = 1e-9
"""fp64, relative to the largest logit or gradient."""


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)


def packed_step(model: torch.nn.Module, batch: ThdBatch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(**batch.model_inputs()).logits[0]
    loss = summed_loss(logits, batch.labels) / batch.num_label_tokens
    loss.backward()
    return logits.detach(), loss.detach()


def separate_step(model: torch.nn.Module, docs: list) -> tuple[list[torch.Tensor], torch.Tensor]:
    num_label_tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in docs)
    logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in docs]
    loss = sum(summed_loss(x, labels) for x, (_, labels) in zip(logits, docs)) / num_label_tokens
    loss.backward()
    return [x.detach() for x in logits], loss.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family: str) -> None:
    docs = documents(DOCUMENT_LENGTHS)
    model = build(family)
    model.set_experts_implementation("eager")  # the grouped product has no fp64
    model.double()
    with InFloat64():
        want_logits, want_loss = separate_step(model, docs)
    want_grads = gradients(model)
    install(model, ReferenceAttention())
    for multiple, total in ((1, None), (8, 256)):
        batch = stream(docs, multiple, total)
        with InFloat64():
            logits, loss = packed_step(model, batch)
        grads = gradients(model)
        starts = batch.cu_seqlens_padded.tolist()
        largest = max(x.abs().max() for x in want_logits)
        for start, want in zip(starts, want_logits):
            assert (logits[start : start + len(want)] - want).abs().max() < LARGEST_ERROR * largest
        assert abs(loss - want_loss) < LARGEST_ERROR * want_loss
        assert grads.keys() == want_grads.keys()
        for name, want in want_grads.items():
            assert (grads[name] - want).abs().max() < LARGEST_ERROR, name
