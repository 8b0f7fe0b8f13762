"""A tiny random model of any family that transformers ships: a config by overriding sizes, key by key.

Families name their sizes in many ways; one table of names serves them all, and what a family needs besides stands in
SPECIAL. The layers are chosen so that every kind that the family has occurs, and that some share their keys and values
where layers of the family do. Numbers of experts and widths do not divide by 4 ranks or blocks of 16.

Whatever a family measures in tokens (windows, chunks, scales, original lengths of rotations) is less than what the
survey packs, so that it acts, and one that is taken from the stream instead of the document shows.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from automodel_lite.models.source import model_class

VOCAB = 70
WINDOW = 8
LENGTH = 32
"""Positions of a model: more than any document has, less than the stream."""
ORIGINAL = 16
"""Tokens that a rotation was trained on, before it was scaled: one document is longer, others are not."""

_NAMES: dict[str, int | float] = {
    "vocab_size vocab_size_per_layer_input": VOCAB,
    # width, layers, heads
    "hidden_size n_embd d_model word_embed_proj_dim conv_dim conv_dim_out lru_width": 32,
    "num_hidden_layers n_layer n_layers num_layers": 2,
    "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads": 4,
    "num_key_value_heads swa_num_key_value_heads num_global_key_value_heads": 2,
    "head_dim d_kv dim_head swa_head_dim swa_v_head_dim query_pre_attn_scalar": 8,
    "global_head_dim": 16,
    "rotary_dim": 4,
    "hidden_size_per_layer_input laurel_rank": 8,
    "num_kv_shared_layers": 2,
    # feed-forward
    "intermediate_size": 40,
    "ffn_dim ffn_size ffn_hidden_size d_ff dim_ff intermediate_size_mlp dense_intermediate_size": 32,
    "n_inner dff": 64,
    # tokens
    "max_position_embeddings n_positions n_ctx max_seq_len": LENGTH,
    "original_max_position_embeddings block_size": ORIGINAL,
    "sliding_window sliding_window_size attention_chunk_size local_attention floor_scale": WINDOW,
    "max_window_layers pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts num_local_experts n_routed_experts moe_num_experts": 6,
    "num_experts_per_tok num_experts_per_token top_k_experts moe_k moe_topk": 2,
    "moe_intermediate_size": 24,
    "moe_ffn_hidden_size expert_ffn_hidden_size share_expert_dim shared_intermediate_size": 16,
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size": 16,
    "n_shared_experts num_shared_experts zero_expert_num n_group topk_group": 1,
    "first_k_dense_replace num_dense_layers": 1,
    # latent attention
    "kv_lora_rank q_lora_rank o_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads o_groups": 2,
    "index_topk": 64,
    # state spaces, delta rules, convolutions
    "linear_num_value_heads linear_num_heads linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_head_dim linear_key_head_dim linear_value_head_dim": 8,
    "mamba_num_heads mamba_n_heads mamba_head_dim mamba_d_head mamba_d_state": 8,
    "ssm_state_size state_size": 8,
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "mamba_chunk_size chunk_size": 16,
    "mamba_n_groups n_groups": 1,
    "time_step_rank": 4,
    # dropout: what is compared must not be random
    "attention_dropout attn_pdrop attention_probs_dropout_prob resid_pdrop residual_dropout": 0.0,
    "embd_pdrop embedding_dropout dropout hidden_dropout hidden_dropout_prob": 0.0,
    "activation_dropout router_jitter_noise input_jitter_noise": 0.0,
}
"""What families call a size: names that mean the same, and its value."""
SMALL: dict[str, Any] = {name: size for names, size in _NAMES.items() for name in names.split()}

WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
}
LONG_ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
# the second two take keys and values of the first two
SHARING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
ZAMBA |= {"n_mamba_heads": 8, "mamba_headdim": 8}
_ALIKE: dict[str, dict[str, Any]] = {
    "dots1 laguna mellum": SLIDING_THEN_FULL,
    "gemma3n_text gemma4_text gemma4_unified_text": SHARING,
    "lfm2 lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mixtral starcoder2 step3p5": {"sliding_window": WINDOW},
    "qwen2 qwen2_moe qwen3 qwen3_moe": WINDOWED,
    "qwen2_vl_text qwen2_5_vl_text glm4v_text": MROPE,
    "zamba zamba2": ZAMBA,
}
SPECIAL: dict[str, dict[str, Any]] = {
    **{family: its for families, its in _ALIKE.items() for family in families.split()},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {
        **SLIDING_THEN_FULL,
        "rope_parameters": {
            "sliding_attention": {**ROPE, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    "dory": {  # two of its four layers run twice
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "flint": {"mlp_only_layers": [0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": LINEAR_THEN_FULL,
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCAB,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
    },
    "internlm3": {"rope_parameters": DYNAMIC_ROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"q_lora_rank": None},
    "mamba": {"num_heads": None},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "phi3": {"sliding_window": WINDOW, "rope_parameters": LONG_ROPE},
    "phimoe": {
        "sliding_window": WINDOW,
        "rope_parameters": LONG_ROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
    },
    "qwen4_exp_text": {
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    },
    "glm4v_moe_text": {
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    },
    "youtu": {"pad_token_id": None},  # transformers zeroes its row when it loads the checkpoint
    "zaya": {
        "num_experts_per_tok": 1,
        "sliding_window": WINDOW,
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
}
COMPOSITE_KEYS = ("text_config", "vision_config", "audio_config")


def decoder_families() -> list[str]:
    """Every decoder-only causal LM of this transformers: no encoder-decoders, no encoders turned into decoders, and
    of composites the text half.
    """
    names = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = transformers.CONFIG_MAPPING[name]
        if (
            name in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            or name in NO_DECODERS
            or kind.sub_configs.keys() & {*COMPOSITE_KEYS}
        ):
            continue
        if getattr(kind, "is_encoder_decoder", False):
            continue
        names.append(name)
    return names


_COMPOSITES = """
    qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe gemma3 gemma3n gemma4 gemma4_unified mistral3
    mistral_large4 kimi_k25 step3p7 muse_glimmer muse_spark llama4 glm4v glm4v_moe glm46v cohere2_vision internvl
    llava llava_onevision lfm2_vl exaone4_5 ernie4_5_vl_moe hyperclovax_vision_v2 smolvlm voxtral qwen2_audio
    minimax_m3_vl nemotron_h_omni granite_docling aria paligemma got_ocr2 granite_speech deepseek_vl deepseek_vl_hybrid
"""
COMPOSITES = _COMPOSITES.split()
"""Composites whose text half is fine-tuned on text."""
TOWERS: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
    "projector_hidden_size": 32,
    "text_hidden_size": 32,
    "vision_output_dim": 32,
    "output_dim": 32,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
}
"""Sizes of vision and audio towers, whose other names are those of SMALL."""
TOWERS_OF: dict[str, dict[str, Any]] = {
    "gemma3n_vision": {"architecture": "test_resnet"},  # of timm's tiny ones; text does not meet it
    "gemma4_vision": {"position_embedding_size": 16, "pooling_kernel_size": 1},
    "muse_spark_audio": {
        "num_hidden_layers": 1,
        "patch_sizes": [4],
        "hidden_sizes": [32],
        "depths": [1],
    },
    "radio": {"video_temporal_patch_size": 2},
}
_NO_DECODERS = "git trocr moshi musicgen musicgen_melody bert-generation xlnet blt"
NO_DECODERS = set(_NO_DECODERS.split())


def tiny_config(family: str) -> PretrainedConfig:
    """Of a decoder or a composite."""
    kind, special = transformers.CONFIG_MAPPING[family], SPECIAL.get(family, {})
    if not kind.sub_configs.keys() & {*COMPOSITE_KEYS}:
        return kind(**_small(kind, special))
    default = kind()
    parts = {}
    for key in kind.sub_configs:
        part = getattr(default, key)
        if part is None and key == "vision_config":
            part = kind.sub_configs[key]()
        if part is None:
            continue
        is_text = key == "text_config"
        own = SPECIAL.get(part.model_type, {}) if is_text else TOWERS_OF.get(part.model_type, {})
        sizes = _small(
            type(part), {**own, **special.get(key, {})}, SMALL if is_text else SMALL | TOWERS
        )
        parts[key] = {"model_type": part.model_type, **sizes}
    return kind(**parts, **{key: value for key, value in special.items() if key not in parts})


def _small(
    kind: type[PretrainedConfig], special: dict[str, Any], sizes: dict[str, Any] = SMALL
) -> dict[str, Any]:
    known = kind().to_dict()
    settings = {
        key: value for key, value in sizes.items() if key in known or _is_settable(kind, key)
    }
    if "kv_lora_rank" in known:
        # latent attention has as many keys as queries
        settings["num_key_value_heads"] = SMALL["num_attention_heads"]
    if known.get("sliding_window", 0) is None:
        del settings["sliding_window"]
    rope = known.get("rope_parameters") or {}
    if "original_max_position_embeddings" in rope:
        settings["rope_parameters"] = {**rope, "original_max_position_embeddings": ORIGINAL}
    kinds = list(dict.fromkeys(known.get("layer_types") or []))
    if len(kinds) > 1 and "layer_types" not in special:
        settings["layer_types"] = kinds
        settings["num_hidden_layers"] = len(kinds)
    return settings | special


def _is_settable(kind: type[PretrainedConfig], key: str) -> bool:
    found = getattr(kind, key, None)
    return found is not None and (not isinstance(found, property) or found.fset is not None)


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Builds a model in eval mode, with eager attention."""
    return random_model(tiny_config(family), seed)


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Builds a model with random weights, the same on every call, large enough that every layer matters."""
    torch.manual_seed(seed)
    model: PreTrainedModel = (
        model_class(config).from_config(config, attn_implementation="eager").eval()
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.2)
            elif "sink" in name:
                weight.normal_()
    return model
