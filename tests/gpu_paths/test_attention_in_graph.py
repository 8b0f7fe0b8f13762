"""Layers compiled with their attention, torch's operation, which gets a CPU kernel here: the reference's numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from automodel_lite.attention.documents import IN_GRAPH
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.layers import KEPT_FRAC, compile_layers, decoder_layers, recompute_layers
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.kernels.varlen import VarlenAttention
from automodel_lite.thd import AttentionOptions, Segments, ThdBatch, stream_of
from tests.gpu_paths.test_graphs import FAMILIES as OF_GRAPHS
from tests.gpu_paths.test_graphs import model_of
from tests.models.test_layers import pack_of

pytestmark = pytest.mark.slow


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *more: Any
) -> Tensor:
    is_causal, scale, window = more[:3]
    assert max_q >= int(cu_q.diff().max())
    options = AttentionOptions(scale, None if is_causal else window[0] + 1)
    return ReferenceAttention()(q, k, v, Segments(cu_q, cu_k, max_q, max_k), options)


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q = args[0]
    assert all(x.is_contiguous() for x in args[:3])
    lse, state = torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)
    return attend(*args).contiguous(), lse, state


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Any:
    cu_q, cu_k, max_q, max_k, is_causal, _, scale, window, *_ = rest  # from 2.15 on a backend, too
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def differentiate() -> Any:
        made = attend(*leaves, cu_q, cu_k, max_q, max_k, is_causal, scale, window)
        return torch.autograd.grad(made, leaves, grad)

    with ThreadPoolExecutor(1) as threads:  # in this one, autograd is off inside an operation
        return threads.submit(differentiate).result()


@pytest.fixture(scope="module", autouse=True)
def kernels_of_a_cpu() -> None:
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


PACKS = [
    (20, 17, 11),
    (48,),
    (1, 47),
    (16, 16, 16),
    (1,) * 48,
    (5, 6, 7, 8, 9, 13),
    (2, 46),
    (24, 24),
    (47, 1),
]
PACKS += [(3,) * 16, (30, 10, 8), (8, 40)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
    "qwen3": {"head_dim": 8},
}
LLAMA4 = {
    "head_dim": 8,
    "attention_chunk_size": 16,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
}


def gradients(model: LossModel, packs: list[ThdBatch]) -> Tensor:
    for batch in packs:
        model(batch).sum.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compiled(
    family: str, settings: dict[str, Any], recompute: str = "none", **more: Any
) -> LossModel:
    """As a run makes it: called uncompiled once, by the isolation probe."""
    model = model_of(family, settings, 4, VarlenAttention(), **more)
    check_packing_isolation(model.lm)
    compile_layers(
        decoder_layers(model.lm), "aot_eager", KEPT_FRAC if recompute == "selective" else 1.0
    )
    if recompute != "selective":  # which the graphs do themselves
        recompute_layers(decoder_layers(model.lm), recompute, 1)
    return model


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_one_graph_with_attention(family: str, recompute: str) -> None:
    """One graph for all layers and packs (four where attention is left out), another for validation."""
    packs = [pack_of(*lengths) for lengths in PACKS]
    model = compiled(family, FAMILIES[family], recompute)
    before = compiled_graphs()
    found = gradients(model, packs)
    assert compiled_graphs() - before == 1
    model.eval()
    with torch.no_grad():
        for batch in packs:
            model(batch)
    assert compiled_graphs() - before == 2
    for kernel in (VarlenAttention(), ReferenceAttention()):
        want = gradients(model_of(family, FAMILIES[family], 4, kernel), packs)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)


def test_what_an_operation_cannot_do_stays_outside() -> None:
    """Trees of documents, and layers of Llama 4 that see chunks or scale their queries: a few graphs more."""
    rows = torch.arange(48).view(3, 16)
    tree = stream_of(list(rows), "cpu", {2: torch.cat([torch.arange(12), torch.arange(8, 12)])})
    packs = [pack_of(20, 28), tree, pack_of(40, 8), tree]
    for family, settings in (("llama", {}), ("llama4_text", LLAMA4)):
        model = compiled(family, settings)
        before = compiled_graphs()
        found = gradients(model, packs)
        assert compiled_graphs() - before <= 16
        want = gradients(model_of(family, settings, 4, ReferenceAttention()), packs)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        inside = [m.packed_as.is_plain for m in model.lm.modules() if "packed_as" in vars(m)]
        assert inside == ([True] * 4 if family == "llama" else [False] * 4)


def test_a_kernel_that_is_installed_again_is_right_at_once() -> None:
    """What layers know is forgotten with it: none of them runs in a graph on what it knew before."""
    model = compiled("mistral", FAMILIES["mistral"])
    install(model.lm, VarlenAttention())
    packs = [pack_of(*lengths) for lengths in PACKS[:3]]
    want = gradients(model_of("mistral", FAMILIES["mistral"], 4, ReferenceAttention()), packs)
    torch.testing.assert_close(gradients(model, packs), want, rtol=1e-4, atol=1e-6)


class OwnKernel(ReferenceAttention):
    """One that has softcaps and sinks, as torch's operation has not."""

    name, is_one_operation = "thd_own", True

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Tensor:
        return super().__call__(*args)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_an_operation_gets_softcaps_and_sinks(family: str) -> None:
    packs, found = [pack_of(20, 28), pack_of(40, 8)], []
    for kernel in (OwnKernel(), ReferenceAttention()):
        model = model_of(family, OF_GRAPHS[family], 2, kernel)
        check_packing_isolation(model.lm)
        compile_layers(decoder_layers(model.lm), "aot_eager")
        found.append(gradients(model, packs))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_layer_that_fails_leaves_no_boundaries_behind() -> None:
    model = compiled("llama", {})
    with pytest.raises(RuntimeError):
        decoder_layers(model.lm)[0](torch.zeros(1, 2, 3))
    assert IN_GRAPH.sizes is None
