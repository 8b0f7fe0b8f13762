"""Tiny models of the families that packed attention is proved on, and documents to prove it with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.thd import ThdBatch, to_thd

VOCAB = 128
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "pad_token_id": 0,
}
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
}
LATENT |= {
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHUNKS = {
    "attention_chunk_size": 16,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
CHUNKS |= {"num_local_experts": 2, "intermediate_size_mlp": 96}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 2.0, 4.0, 8.0] * 2,
}
LONG |= {"original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
NO_JITTER = {"input_jitter_noise": 0.0, "router_jitter_noise": 0.0}
SINKS = {"intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**BASE),
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen3": lambda: Qwen3Config(**BASE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**BASE, **EXPERTS),
    "mistral_window": lambda: MistralConfig(**BASE, sliding_window=16),
    "phi3": lambda: Phi3Config(**BASE),
    "gemma2_softcap_window": lambda: Gemma2Config(
        **BASE,
        sliding_window=16,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
        layer_types=SLIDING_THEN_FULL,
    ),
    "gemma3_window": lambda: Gemma3TextConfig(
        **BASE, sliding_window=16, layer_types=SLIDING_THEN_FULL
    ),
    "olmo2": lambda: Olmo2Config(**BASE),
    "gpt_oss_sinks_window": lambda: GptOssConfig(
        **BASE | SINKS, sliding_window=16, layer_types=SLIDING_THEN_FULL
    ),
    "deepseek_v3_latent": lambda: DeepseekV3Config(**BASE | LATENT),
    "llama4_chunks": lambda: Llama4TextConfig(**BASE | CHUNKS),
    "llama4_queries_scaled_by_place": lambda: Llama4TextConfig(
        **BASE | CHUNKS, floor_scale=16, attn_scale=0.5
    ),
    "phi3_longrope": lambda: Phi3Config(
        **BASE, original_max_position_embeddings=32, rope_parameters=LONG
    ),
    "llama_dynamic_scaling": lambda: LlamaConfig(
        **BASE | {"max_position_embeddings": 32}, rope_parameters=DYNAMIC
    ),
    "nemotron_drops_arguments": lambda: NemotronConfig(**BASE),
    "phimoe_window_in_mask": lambda: PhimoeConfig(**BASE | SINKS, sliding_window=16, **NO_JITTER),
    "phimoe_longrope": lambda: PhimoeConfig(
        **BASE | SINKS,
        rope_parameters=LONG | {"short_mscale": 1.1, "long_mscale": 1.3},
        **NO_JITTER,
    ),
}

DOCUMENT_LENGTHS = [37, 5, 64, 1, 23, 90]


def build(family: str, attn_implementation: str = "eager") -> PreTrainedModel:
    """A model with the same random weights on every call; larger than the usual init, so that errors show."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family](), attn_implementation=attn_implementation
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.08)
            elif "sinks" in name:
                weight.normal_()
    return model.train()


def documents(lengths: list[int], vocab: int = VOCAB, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(ids, labels) of random documents, int64 [n] each; labels next-token aligned, one in five without loss."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for length in lengths:
        ids = torch.randint(1, vocab, (length,), generator=generator)
        labels = torch.cat([ids[1:], torch.tensor([IGNORE_INDEX])])
        labels[torch.rand(length, generator=generator) < 0.2] = IGNORE_INDEX
        result.append((ids, labels))
    return result


def stream(
    docs: list[tuple[Tensor, Tensor]], multiple: int = 1, total: int | None = None
) -> ThdBatch:
    """One row: each document padded to `multiple`, then padding segments up to `total` tokens."""
    ids, labels, positions, lens, slots = [], [], [], [], []
    for doc_ids, doc_labels in docs:
        length, missing = len(doc_ids), -len(doc_ids) % multiple
        ids += doc_ids.tolist() + [0] * missing
        labels += doc_labels.tolist() + [IGNORE_INDEX] * missing
        positions += range(length + missing)
        lens.append(length)
        slots.append(length + missing)
    if total is not None and total > len(ids):
        missing = total - len(ids)
        ids += [0] * missing
        labels += [IGNORE_INDEX] * missing
        positions += range(missing)
        lens.append(0)
        slots.append(missing)
    row = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "seq_lens": lens,
        "seq_lens_padded": slots,
    }
    return to_thd(join_packs([row]))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients, which are then cleared."""
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads
