"""The learning rate of `optimizer.lr=auto`: by what is trained, and the width of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automodel_lite.attention.spec import config_value
from automodel_lite.models.loss import Loss
from automodel_lite.models.source import CausalLM

# AdamW's rates for a hidden size of 4,096, where most published recipes are
RATES = {"the whole model": 2e-5, "an adapter": 2e-4, "a model from scratch": 3e-4}
RATE_WIDTH = 4096
FAR = 50  # times the usual rate, or a part of it: a slip more often than a choice
PAIRS_FRAC = 1 / 20  # of these for pairs of answers, whose loss pushes the answers apart


def learning_rate(model: CausalLM, loss: Loss, peft: Mapping[str, Any]) -> tuple[float, str]:
    """Returns the learning rate of `optimizer.lr=auto`, and why: by what is trained, and inversely
    to the width of the model (Yang et al., 2022, arXiv:2203.03466).
    """
    kind = "the whole model"
    if peft:
        kind = "an adapter"
    elif not model.pretrained:
        kind = "a model from scratch"
    config = model.resolve_model_config({"vocab_size": 64}).get_text_config()
    width = config_value(config, "hidden_size", RATE_WIDTH)
    is_pairs = "answers" in loss.required and loss.head == "lm"
    rate = RATES[kind] * RATE_WIDTH / max(width, 256) * (PAIRS_FRAC if is_pairs else 1)
    on_pairs = " on pairs of answers" if is_pairs else ""
    return float(f"{rate:.2g}"), f"trains {kind}{on_pairs}, hidden size {width:,}"
