"""extras/choices.py: routers that choose what another step chose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from automodel_lite.extras.choices import Choices, differing_frac
from automodel_lite.thd import stream_of
from benchmarks.tiny_models import VOCAB, tiny_model

IDS = torch.arange(24)[None] * 5 % VOCAB


def step(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_other_weights_choose_the_experts_of_the_first(family: str) -> None:
    """One of 24 tokens of one layer is moved to other experts: 1 / (24 * layers)."""
    first, other = tiny_model(family), tiny_model(family, seed=1)
    with Choices() as wanted:
        loss, _ = step(first)
    with Choices() as own:
        step(other)
    with Choices(wanted) as pinned:
        _, gradients = step(other)
    with Choices() as moved:
        again, _ = step(first)
    config = first.config
    layers = len(wanted.of_experts(config))
    batch = stream_of(IDS, "cpu")
    assert layers in (1, 2)
    assert again == loss
    assert differing_frac(pinned, wanted, config, [batch]) == 0
    assert differing_frac(own, wanted, config, [batch]) > 0.3
    routers = [g for name, g in gradients.items() if "router" in name or "mlp.gate" in name]
    assert all(g.any() for g in routers)
    assert routers
    one = moved.of_experts(config)[0][3]
    one.copy_((one + 1) % 6)
    assert differing_frac(moved, wanted, config, [batch]) == pytest.approx(1 / (24 * layers))


def test_a_dense_model_chooses_none() -> None:
    model = tiny_model("llama")
    with Choices() as wanted:
        step(model)
    assert differing_frac(wanted, wanted, model.config, [stream_of(IDS, "cpu")]) is None
