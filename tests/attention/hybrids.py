"""Tiny models of families that mix tokens in other ways than attention: state spaces, delta rules, convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.attention.families import VOCAB

LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
CONV_THEN_FULL = {"layer_types": ["conv", "full_attention"]}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
DENSE_THEN_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}

SETTINGS: dict[str, Any] = {
    **{
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "d_model": 32,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    },
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 16,
        "query_pre_attn_scalar": 8,
    },
    **{
        "num_experts": 2,
        "num_local_experts": 2,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
    },
    **{
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "topk_group": 1,
        "num_shared_experts": 1,
    },
    **{
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    **{
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    **{
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "mamba_n_groups": 1,
        "n_groups": 1,
    },
    **{
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "lru_width": 32,
    },
    **{"linear_conv_kernel_dim": 4, "linear_head_dim": 8, "linear_num_heads": 4},
}
"""Every family takes those that it knows."""

HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR_THEN_FULL | DENSE_THEN_SPARSE | EXPERTS,
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "falcon_mamba": {"state_size": 8},
    "granitemoehybrid": LINEAR_THEN_FULL,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR_THEN_FULL | DENSE_THEN_SPARSE | EXPERTS | {"q_lora_rank": None},
    "lfm2": CONV_THEN_FULL,
    "lfm2_moe": CONV_THEN_FULL | {"num_dense_layers": 1},
    "lfm3": CONV_THEN_FULL,
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "minimax": LINEAR_THEN_FULL | {"sliding_window": None},
    "nemotron_h": LINEAR_THEN_FULL,
    "olmo_hybrid": LINEAR_THEN_FULL,
    "qwen3_5_moe_text": LINEAR_THEN_FULL,
    "qwen3_5_text": LINEAR_THEN_FULL,
    "qwen3_next": LINEAR_THEN_FULL,
    "qwen3_next-odd-heads": LINEAR_THEN_FULL
    | {"linear_num_value_heads": 3, "linear_num_key_heads": 3},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * 2, "hc_lowrank": 8, "hc_count": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8},
}

ONE_OF_EACH_KIND = [
    "qwen3_next",
    "kimi_linear",
    "nemotron_h",
    "jamba",
    "mamba",
    "lfm2",
    "minimax",
    "recurrent_gemma",
]
"""Gated delta rule, its form with a decay for each channel, Mamba-2, Mamba, Mamba alone, short convolution, lightning
attention, gated linear recurrence.
"""


def build_hybrid(family: str) -> PreTrainedModel:
    """A model with the same random weights on every call, large enough that every layer matters."""
    torch.manual_seed(0)
    model_type = family.partition("-")[0]
    known = AutoConfig.for_model(model_type).to_dict()
    settings = {key: value for key, value in SETTINGS.items() if key in known}
    config = AutoConfig.for_model(model_type, **settings | HYBRIDS[family])
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.2)
    return model.train()


class InFloat64(TorchFunctionMode):
    """Computes in fp64 where transformers asks for fp32: what remains of an error is not rounding.

    A backward pass runs without it: what is written for one has to keep fp64 by itself.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            return args[0].double()
        # no operation takes a type inside a list; to look there took half of the time of tests
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {
            name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()
        }
        return function(*args, **kwargs)
