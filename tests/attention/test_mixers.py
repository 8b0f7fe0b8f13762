"""Hybrid models on packed documents: logits and all gradients equal one forward per document."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from automodel_lite.attention.documents import mixers_of
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.document_rows import document_rows
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import compile_layers, decoder_layers, recompute_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.thd import ThdBatch
from tests.attention.families import build, documents, gradients, stream
from tests.attention.hybrids import HYBRIDS, ONE_OF_EACH_KIND, InFloat64, build_hybrid

LARGEST_ERROR = 1e-10
"""fp64, relative to the largest logit or gradient."""

LENGTHS = [37, 5, 70, 1, 23]

FAMILIES = [
    pytest.param(family, marks=() if family in ONE_OF_EACH_KIND else pytest.mark.slow)
    for family in sorted(HYBRIDS)
]


def separate(
    model: PreTrainedModel, docs: list[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in docs]
    for of_document, (_, labels) in zip(logits, docs):
        summed_loss(of_document, labels).backward(retain_graph=True)
    return [x.detach() for x in logits], gradients(model)


def packed(model: PreTrainedModel, batch: ThdBatch) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(**batch.model_inputs()).logits[0]
    summed_loss(logits, batch.labels).backward()
    return logits.detach(), gradients(model)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORE_INDEX)


def largest_errors(
    got: tuple[Tensor, dict[str, Tensor]],
    want: tuple[list[Tensor], dict[str, Tensor]],
    batch: ThdBatch,
) -> tuple[float, float]:
    """Of logits and of gradients, relative to the largest logit and the largest gradient."""
    largest = max(x.abs().max() for x in want[0])
    starts = batch.cu_seqlens_padded.tolist()
    logits = max(
        (got[0][start : start + len(x)] - x).abs().max() / largest
        for start, x in zip(starts, want[0])
    )
    assert got[1].keys() == want[1].keys()
    largest = max(x.abs().max() for x in want[1].values())
    return float(logits), float(
        max((got[1][name] - x).abs().max() / largest for name, x in want[1].items())
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family: str) -> None:
    model, docs = build_hybrid(family), documents(LENGTHS)
    install(model, ReferenceAttention())
    check_packing_isolation(model)
    plain = build_hybrid(family).double()
    with InFloat64():
        want = separate(plain, docs)
        model.double()
        for multiple, total in ((1, None), (8, 192)):
            batch = stream(docs, multiple, total)
            assert max(largest_errors(packed(model, batch), want, batch)) < LARGEST_ERROR


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_recomputed_layers_keep_documents_apart(family: str, how: str) -> None:
    """Mamba's model gives no arguments to its layers: the documents come back with the context of the first forward."""
    model, batch = build_hybrid(family), stream(documents(LENGTHS))
    install(model, ReferenceAttention())
    want = packed(model, batch)
    recompute_layers(decoder_layers(model), how, 1)
    logits = model(**batch.model_inputs()).logits[0]
    # between forward and backward of the first
    other = model(**stream(documents([9, 4])).model_inputs()).logits
    summed_loss(logits, batch.labels).backward()
    got = gradients(model)
    assert all(torch.allclose(got[name], x, rtol=1e-5, atol=1e-5) for name, x in want[1].items())
    assert other.shape[1] == 13


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_transformers_own_checkpointing_keeps_documents_apart(family: str) -> None:
    model, batch = build_hybrid(family), stream(documents(LENGTHS))
    install(model, ReferenceAttention())
    want = packed(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = packed(model, batch)
    assert all(torch.allclose(got[1][name], x, rtol=1e-5, atol=1e-5) for name, x in want[1].items())


def test_a_mixer_recomputed_without_its_documents_is_refused() -> None:
    model, batch = build_hybrid("mamba"), stream(documents(LENGTHS))
    install(model, ReferenceAttention())
    mixer = next(mixers_of(model))
    forward = mixer.forward
    mixer.forward = lambda x, **kwargs: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    logits = model(**batch.model_inputs()).logits[0]
    with pytest.raises(ConfigError, match=r"is recomputed without its documents"):
        summed_loss(logits, batch.labels).backward()


def test_compiled_layers_need_no_graph_for_other_documents() -> None:
    model = build_hybrid("lfm2")
    install(model, ReferenceAttention())
    batches = [stream(documents(lengths)) for lengths in ([9, 7, 4], [3, 16, 1], [20])]
    want = [packed(model, batch) for batch in batches]
    compile_layers(decoder_layers(model), backend="eager")
    for batch, (logits, grads) in zip(batches, want):
        got = packed(model, batch)
        assert torch.allclose(got[0], logits, rtol=1e-4, atol=1e-4)
        assert all(
            torch.allclose(got[1][name], x, rtol=1e-4, atol=1e-4) for name, x in grads.items()
        )


def test_which_modules_are_mixers() -> None:
    names = {
        family: [type(mixer).__name__ for mixer in mixers_of(build_hybrid(family))]
        for family in ONE_OF_EACH_KIND
    }
    assert names == {
        "qwen3_next": ["Qwen3NextGatedDeltaNet"],
        "kimi_linear": ["KimiLinearDeltaAttention"],
        "nemotron_h": ["NemotronHMamba2Mixer"],
        "jamba": ["JambaMambaMixer"],
        "mamba": ["MambaMixer", "MambaMixer"],
        "lfm2": ["Lfm2ShortConv"],
        "minimax": ["MiniMaxLightningAttention"],
        "recurrent_gemma": ["RecurrentGemmaRecurrentBlock", "RecurrentGemmaRecurrentBlock"],
    }


def needs_mixer_metadata(model: PreTrainedModel) -> bool:
    return LossModel(model, FusedLinearCrossEntropy()).needs_mixer_metadata


def test_which_models_take_rows() -> None:
    """Those whose mixers are not attention; the others need none and get the same without."""
    for family in ONE_OF_EACH_KIND:
        model = build_hybrid(family)
        assert not needs_mixer_metadata(model)
        install(model, ReferenceAttention())
        assert needs_mixer_metadata(model)
    llama, batch = build("llama"), stream(documents(LENGTHS))
    install(llama, ReferenceAttention())
    assert not needs_mixer_metadata(llama)
    logits, grads = packed(llama, replace(batch, mixers=None))
    want = packed(llama, batch)
    assert torch.equal(logits, want[0])
    assert all(torch.equal(grads[name], x) for name, x in want[1].items())


def test_a_mixer_that_is_missed_is_noticed() -> None:
    """The conventions are not the judge: a mixer without a mask or a cache among its arguments leaks, and is refused."""
    model = build_hybrid("lfm2")

    class Hidden(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner.forward

        def forward(self, hidden_states: Tensor, **of_other_layers: object) -> Tensor:
            return self.inner(hidden_states)

    layer = decoder_layers(model)[0]
    layer.conv = Hidden(layer.conv)  # type: ignore[arg-type]
    install(model, ReferenceAttention())
    with pytest.raises(ConfigError, match="documents of a pack see each other"):
        check_packing_isolation(model)


def test_rows_of_documents() -> None:
    rows = document_rows(torch.tensor([0, 5, 7, 11]))
    assert [x.tolist() for x in rows.rows] == [
        [[0, 1, 2, 3, 4], [7, 8, 9, 10, 10], [5, 6, 6, 6, 6]]
    ]
    assert rows.to_stream.tolist() == [0, 1, 2, 3, 4, 10, 11, 5, 6, 7, 8]
    assert rows.seq_idx.tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2]]


def test_documents_of_other_lengths_do_not_share_rows() -> None:
    lens = torch.tensor([1000, 10, 990, 12, 11])
    rows = document_rows(torch.nn.functional.pad(lens.cumsum(0), (1, 0))).rows
    assert [tuple(x.shape) for x in rows] == [(2, 1000), (3, 12)]


@pytest.mark.parametrize("seed", range(3))
def test_rows_hold_little_padding(seed: int) -> None:
    lens = (torch.randn(200, generator=torch.Generator().manual_seed(seed)) + 5).exp().long() + 1
    rows = document_rows(torch.nn.functional.pad(lens.cumsum(0), (1, 0)))
    assert sum(x.numel() for x in rows.rows) < 1.1 * lens.sum() + 256 * len(rows.rows)
    assert len(rows.rows) < 20
    stream = torch.arange(int(lens.sum()))
    assert torch.equal(rows.map_rows(lambda x: x[0] + 1, [stream]), stream + 1)
