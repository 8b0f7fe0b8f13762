"""`model.experts=sorted_mm` against transformers' loop over experts: losses, gradients, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel, Qwen3MoeConfig
from transformers.integrations.moe import use_experts_implementation

from automodel_lite.compat import FakeTensorMode
from automodel_lite.errors import ConfigError
from automodel_lite.models.experts import SORTED_MM, choose_experts
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.parts.adapters.lora import Lora
from benchmarks.experts import count
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


def step_of_experts(
    experts: nn.Module, call: Any = None, dtype: torch.dtype | None = None
) -> Gradients:
    """The output and all gradients of a layer of experts, of random tokens and choices: an expert
    has no token, and a token weighs a choice by 0.

    dtype  of the random numbers, before they take that of the experts
    """
    torch.manual_seed(1)
    config: Any = experts.config
    width = config.get_text_config().hidden_size
    parameter = next(experts.parameters())
    hidden = torch.randn(10, width, dtype=dtype or parameter.dtype).to(parameter.dtype)
    hidden.requires_grad_()
    scores = torch.rand(10, 6).to(dtype or parameter.dtype).to(parameter.dtype)
    scores[:, 2] = -1
    weights, chosen = scores.topk(2)
    weights[3, 1] = 0
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


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_products_in_bf16(family: str) -> None:
    """Torch's grouped product, which fp64 does not take, is as far from fp64 as the loop is."""
    experts = experts_of(tiny_model(family).bfloat16(), SORTED_MM)
    got = step_of_experts(experts)
    config: Any = experts.config
    config._experts_implementation = "eager"
    loop = step_of_experts(experts)
    want = step_of_experts(experts.double(), dtype=torch.bfloat16)
    for name, value in want.items():
        off, of_loop = ((x[name] - value).norm() / value.norm() for x in (got, loop))
        assert 0 < off < 0.01, (name, off)
        assert off < 1.5 * of_loop, (name, off, of_loop)


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


def test_compiled_without_a_break() -> None:
    experts = experts_of(tiny_model("qwen3_moe").double(), SORTED_MM)
    want = step_of_experts(experts)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    got = step_of_experts(experts, compiled)
    check_equal(got, want)


def test_slots_of_other_ranks_add_nothing() -> None:
    """Expert parallelism numbers them behind the last expert, with a weight of 0."""
    model = tiny_model("qwen3_moe").bfloat16()
    own: Any = experts_of(model, SORTED_MM)
    own._is_expert_parallel = True
    hidden = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.tensor([[6, 1], [6, 6], [0, 6], [5, 1]])
    weights = torch.tensor([[0.0, 0.5], [0, 0], [1, 0], [0.25, 0.75]]).bfloat16().requires_grad_()
    out = own(hidden, chosen, weights)
    out.sum().backward()
    with torch.no_grad():
        own._is_expert_parallel = False
        one, _, two, three = hidden.detach().split(1)
        whole = torch.cat([one, two, three, three])
        parts = own(whole, torch.tensor([[1], [0], [5], [1]]), torch.ones(4, 1).bfloat16())
        parts *= torch.tensor([[0.5], [1], [0.25], [0.75]]).bfloat16()
    want = torch.stack([parts[0], torch.zeros_like(parts[0]), parts[1], parts[2] + parts[3]])
    assert (out - want).abs().max() <= 0.02 * want.abs().max()
    assert hidden.grad is not None
    assert weights.grad is not None
    assert hidden.grad.isfinite().all()
    assert hidden.grad.any(1).tolist() == [True, False, True, True]
    assert (weights.grad != 0).tolist() == [[False, True], [False] * 2, [True, False], [True] * 2]


@pytest.mark.parametrize("how", ["full", "selective", "offload"])
def test_recomputed_layers(how: str) -> None:
    model = tiny_model("gpt_oss").double()
    want = step_of_model(model, SORTED_MM)
    recompute_layers(decoder_layers(model), how, 1)
    got = step_of_model(model.train(), SORTED_MM)
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-11 * max(1.0, value.abs().max()), name


def test_adapters_of_experts() -> None:
    model = tiny_model("qwen3_moe").double()
    Lora(r=2, experts=True).adapt(model, "base")
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn_like(weight, dtype=torch.float64)
    want = step_of_model(model, "eager")
    got = step_of_model(model, SORTED_MM)
    assert all("lora_" in name for name in want if name != "loss")
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-10 * max(1.0, value.abs().max()), name


@pytest.mark.parametrize(
    ("implementation", "compiles", "kept"),
    [("grouped_mm", False, 85_528), (SORTED_MM, False, 44_056), (SORTED_MM, True, 22_808)],
)
def test_what_is_kept_for_the_backward_pass(implementation: str, compiles: bool, kept: int) -> None:
    """Bytes of 32 tokens, each with 4 of 6 experts, 32 channels and 24 of an expert: 4,096 of tokens,
    24,576 before the gate, 12,288 behind it, and indices; not the 16,384 of gathered tokens.
    """
    # Half as wide where compiled: the grouped product has a compiled form in no other dtype.
    dtype = torch.bfloat16 if compiles else torch.float32
    experts = experts_of(tiny_model("qwen3_moe").to(dtype), implementation)
    run: Any = experts
    if compiles:
        run = torch.compile(experts, backend="aot_eager_decomp_partition", fullgraph=True)
    weights = {w.untyped_storage().data_ptr() for w in experts.parameters()}
    hidden = torch.randn(32, 32, dtype=dtype, requires_grad=True)
    found = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    scores, chosen = torch.rand(32, 6).topk(4)
    with saved_tensors_hooks(pack, lambda x: x):
        run(hidden, chosen, scores.to(dtype).requires_grad_())
    assert sum(found.values()) == kept


def test_what_computes_experts() -> None:
    mixture = tiny_model("qwen3_moe")
    dense = tiny_model("llama")
    gpu = torch.device("cuda")
    cpu = torch.device("cpu")
    assert choose_experts("auto", mixture, gpu, "model") == SORTED_MM
    assert choose_experts("auto", mixture, cpu, "model") == "auto"
    assert choose_experts("auto", dense, gpu, "model") == "auto"
    assert choose_experts("grouped_mm", mixture, gpu, "model") == "grouped_mm"
    with pytest.raises(
        ConfigError, match=r"^model.experts=sonicmoe needs a GPU: set model.experts"
    ):
        choose_experts("sonicmoe", mixture, cpu, "model")
    with pytest.raises(ConfigError, match=r"^model.experts=sonicmoe needs the package kernels"):
        choose_experts("sonicmoe", mixture, gpu, "model")
    # dbrx computes its experts by itself
    with pytest.raises(ConfigError, match=r"^model.experts=eager: DbrxForCausalLM has no experts"):
        choose_experts("eager", tiny_model("dbrx"), cpu, "model")


@pytest.mark.parametrize(("implementation", "adds"), [("grouped_mm", True), (SORTED_MM, False)])
def test_nothing_is_added_up_by_index(implementation: str, adds: bool) -> None:
    """On a GPU that would be by atomics, in any order."""
    config = Qwen3MoeConfig(
        hidden_size=16, num_attention_heads=2, moe_intermediate_size=8, num_experts=4
    )
    config.num_hidden_layers = 1
    with FakeTensorMode():
        moved, _ = count(config, 8, implementation)
    adding = {"index_put", "index_add", "scatter_add", "scatter_reduce", "embedding_dense_backward"}
    assert bool(adding & {name.rstrip("_") for name in moved}) == adds
