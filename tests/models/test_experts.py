"""`model.experts=sorted_mm` against transformers' loop over experts: losses, gradients, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel, Qwen3MoeConfig
from transformers.integrations.moe import use_experts_implementation

from automodel_lite.models.experts import SORTED_MM
from automodel_lite.models.layers import decoder_layers, recompute_layers
from benchmarks.tiny_models import VOCAB, tiny_model

# plain gates; shared experts and a bias that balances; stacks laid the other way, biases, gates
# that are interleaved and clamped
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]
OTHERS = ["nemotron_h", "aria_text"]  # no gate; stacks laid the other way, without biases
Gradients = dict[str, Tensor]


def experts_of(model: PreTrainedModel, implementation: str) -> nn.Module:
    model.set_experts_implementation(implementation)
    return next(m for m in model.modules() if type(m).__name__.endswith("Experts"))


def check_equal(got: Gradients, want: Gradients) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert value.any(), name
        assert (got[name] - value).abs().max() <= 1e-11 * max(1.0, value.abs().max()), name


def step_of_model(model: PreTrainedModel, implementation: str) -> Gradients:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    ids = torch.arange(20)[None] * 7 % VOCAB
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def step_of_experts(experts: nn.Module, call: Any = None) -> Gradients:
    """The output and all gradients of a layer of experts, of random tokens and choices."""
    torch.manual_seed(1)
    config: Any = experts.config
    width = config.get_text_config().hidden_size
    parameter = next(experts.parameters())
    hidden = torch.randn(10, width, dtype=parameter.dtype, requires_grad=True)
    scores = torch.rand(10, 6).to(parameter.dtype)
    scores[:, 2] = -1  # an expert without tokens
    weights, chosen = scores.topk(2)
    weights.requires_grad_()
    experts.zero_grad()
    if call is None:
        call = experts
    out = call(hidden, chosen, weights)
    out.square().sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    own = {n: p.grad.clone() for n, p in experts.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **own}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_all_gradients_are_those_of_the_loop(family: str) -> None:
    model = tiny_model(family).double()
    want = step_of_model(model, "eager")
    got = step_of_model(model, SORTED_MM)
    assert any("experts" in name for name in want)
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-11 * max(1.0, value.abs().max()), name


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_experts_alone(family: str) -> None:
    model = tiny_model(family).double()
    want = step_of_experts(experts_of(model, "eager"))
    check_equal(step_of_experts(experts_of(model, SORTED_MM)), want)


@use_experts_implementation(has_bias=True, has_post_expert_norm=True)
class NormedExperts(nn.Module):
    """Biases and a norm behind the experts, as no family has them both; the loop in fp64."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.num_experts = 6
        self.gate_up_proj = nn.Parameter(torch.randn(6, 16, 32))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(6, 16))
        self.down_proj = nn.Parameter(torch.randn(6, 32, 8))
        self.down_proj_bias = nn.Parameter(torch.randn(6, 32))
        self.post_expert_norm = nn.RMSNorm(32)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for token, experts in enumerate(chosen.tolist()):
            total = torch.zeros_like(hidden[0])
            for slot, e in enumerate(experts):
                inner = self.gate_up_proj[e] @ hidden[token] + self.gate_up_proj_bias[e]
                gate, up = inner.chunk(2)
                out = self.down_proj[e] @ (self.act_fn(gate) * up) + self.down_proj_bias[e]
                total = total + weights[token, slot] * self.post_expert_norm(out)
            rows.append(total)
        return torch.stack(rows)


def test_biases_and_a_norm_behind_the_experts() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=32)
    experts = NormedExperts(config).double()
    config._experts_implementation = "eager"
    want = step_of_experts(experts)
    config._experts_implementation = SORTED_MM
    check_equal(step_of_experts(experts), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compiled_without_a_break(dtype: torch.dtype) -> None:
    experts = experts_of(tiny_model("gpt_oss").to(dtype), SORTED_MM)
    want = step_of_experts(experts)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    got = step_of_experts(experts, compiled)
    if dtype == torch.float64:
        check_equal(got, want)
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 0.05 * value.abs().max(), name
