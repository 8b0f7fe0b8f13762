"""What a model's tokens and attention pairs cost, from its config: for balancing packs and for honest utilisation."""

from __future__ import annotations

from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value, layer_window
from automodel_lite.flops import CostModel


def cost_model(model_config: PretrainedConfig) -> CostModel:
    """FLOPs a token and a visible pair; mixture-of-experts layers count the experts that a token visits."""
    config = model_config.get_text_config()
    num_heads = config.num_attention_heads
    wide = config_value(config, "intermediate_size", None) or config_value(config, "n_inner", None)
    windows = [layer_window(config, layer) for layer in range(config.num_hidden_layers)]
    narrow = [window for window in windows if window is not None]
    return CostModel.of_decoder(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=config_value(config, "num_key_value_heads", num_heads),
        head_dim=config_value(config, "head_dim", config.hidden_size // num_heads),
        intermediate_size=config_value(config, "moe_intermediate_size", wide or 4 * config.hidden_size),
        vocab_size=config.vocab_size,
        experts_per_token=config_value(config, "num_experts_per_tok", 1),
        window=min(narrow, default=None),
        window_frac=len(narrow) / len(windows),
    )
