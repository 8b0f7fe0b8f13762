"""Compiled layers of 14 families, and flex's training of the families that need it: how many graphs, and no new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.graphs import compiled, compiled_graphs
from automodel_lite.models.layers import compile_layers, decoder_layers, recompute_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.kernels.flex import FlexAttention
from automodel_lite.thd import stream_of
from tests.models.test_layers import pack_of

pytestmark = pytest.mark.slow
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
GROUPS = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 16},
    "phi3": TOKENS,
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
    "olmo2": {},
    "gpt_oss": {"head_dim": 8, "sliding_window": 16, **EXPERTS},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "mixtral": EXPERTS,
    "smollm3": TOKENS,
    "deepseek_v3": {"num_experts_per_tok": 2, "moe_intermediate_size": 16, **LATENT, **GROUPS},
    "granite": {},
}
WITH_FLEX = {
    "gemma2": {"head_dim": 16, "sliding_window": 64},
    "gpt_oss": {"head_dim": 16, "sliding_window": 64, **EXPERTS},
    "gemma3_text": {"head_dim": 16, "sliding_window": 64},
    "llama": {},
}


def model_of(
    family: str,
    settings: dict[str, Any],
    num_layers: int,
    kernel: AttentionKernel,
    dtype: torch.dtype = torch.float32,
) -> LossModel:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BASE, "num_hidden_layers": num_layers, **settings})
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if family == "gpt_oss" and dtype == torch.float32:
        # transformers 5.17 takes the grouped product, which in fp32 reads how many tokens each expert has
        lm.set_experts_implementation("batched_mm")
    install(lm, kernel)
    return LossModel(lm, FusedLinearCrossEntropy())


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_need_no_graph_after_the_first_packs(family: str) -> None:
    """12 layers; packs of other documents, validation, growing samples, training again. In bf16, as a GPU computes: the
    experts' grouped product is one operation there, and in fp32 a loop that reads how many tokens each expert has.
    """
    model = model_of(family, FAMILIES[family], 12, ReferenceAttention(), torch.bfloat16)
    first = compiled_graphs()
    compile_layers(decoder_layers(model.lm), backend="aot_eager")
    model(pack_of(20, 17, 11)).sum.backward()
    warm = compiled_graphs()
    for lengths in [(48,), (1, 47), (16, 16, 16), (1,) * 48, (5, 6, 7, 8, 9, 13)]:
        model(pack_of(*lengths)).sum.backward()
    assert compiled_graphs() == warm
    model.eval()
    with torch.no_grad():
        model(pack_of(48))
        for length in (7, 8, 9):
            model.logits(stream_of(torch.arange(length)[None], "cpu"), 1)
        sampled = compiled_graphs()
        for length in (10, 11, 12, 20, 31):
            model.logits(stream_of(torch.arange(length)[None], "cpu"), 1)
    model.train()
    model(pack_of(24, 24)).sum.backward()
    assert compiled_graphs() == sampled
    assert sampled - first <= 24


@pytest.mark.parametrize("family", WITH_FLEX)
def test_flex_trains_the_families_that_need_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, inside compiled layers that are recomputed: gradients of a whole model against those of plain layers
    on the reference kernel, and a bounded number of graphs.
    """
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    gradients = []
    packs = [(300, 200, 12), (512,), (50, 60, 70, 332)]
    for kernel in (
        FlexAttention(compiled(torch_flex.flex_attention, "aot_eager")),
        ReferenceAttention(),
    ):
        model = model_of(family, WITH_FLEX[family], 4, kernel)
        before = compiled_graphs()
        if isinstance(kernel, FlexAttention):
            compile_layers(decoder_layers(model.lm), backend="aot_eager")
            recompute_layers(decoder_layers(model.lm), "full", 1)
        for lengths in packs:
            torch.manual_seed(len(lengths))
            model(pack_of(*lengths)).sum.backward()
        if isinstance(kernel, FlexAttention):
            model.eval()
            with torch.no_grad():
                for length in (200, 130, 300):
                    model.logits(stream_of(torch.arange(length)[None] % 64, "cpu"))
            assert 4 <= compiled_graphs() - before <= 24
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
