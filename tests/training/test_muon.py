"""Muon's numbers beside torch's, on shards of one and of two axes; which matrices are its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from automodel_lite.parts.optimizers.muon import hidden_matrices, muon, newton_schulz, orthogonal
from benchmarks.tiny_models import tiny_config, tiny_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.numbers


class Stack(nn.Module):
    """Wide, tall and ragged matrices (of 96, 10 and 3 rows), an embedding and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 64)
        shapes = [(64, 96), (96, 10), (10, 3), (3, 64), (64, 64)]
        self.layers = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))


def _muon_steps(
    module: nn.Module, optimizers: list[torch.optim.Optimizer], num_steps: int = 3
) -> None:
    """Gradients that do not hang on the weights: bf16 products would make a rounding into a difference."""
    for number in range(num_steps):
        torch.manual_seed(number)
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()


def _torchs_muon() -> Stack:
    twin = Stack()
    matrices = [layer.weight for layer in twin.layers]
    others = [p for p in twin.parameters() if all(p is not m for m in matrices)]
    by_torch = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw_groups = [
        {"params": [p for p in others if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    _muon_steps(twin, [by_torch, torch.optim.AdamW(adamw_groups, lr=1e-2)])
    return twin


def test_muon_is_torchs_on_the_matrices_and_adamw_on_the_rest() -> None:
    model, twin = Stack(), _torchs_muon()
    _muon_steps(model, [muon(model, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)])
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _sharded_muon(rank: int, world_size: int, shape: tuple[int, ...]) -> float:
    model, twin = Stack(), _torchs_muon()
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]),
    )
    _muon_steps(model, [muon(model, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)])
    pairs = zip(model.parameters(), twin.parameters())
    return max(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_muon_gathers_each_matrix_of_shards(shape: tuple[int, ...]) -> None:
    """On each matrix the numbers of one process."""
    assert max(run_ranks(_sharded_muon, 4, shape)) < 1e-5  # a step moves 1e-2


def _split_twice(rank: int, world_size: int) -> float:
    """Rows over one axis, columns over the other, as tensor parallelism and FSDP cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    torch.manual_seed(0)
    whole = torch.randn(12, 10).bfloat16()
    cut = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    (part,) = orthogonal([nn.Parameter(cut)], [cut.to_local()])
    want = distribute_tensor(newton_schulz(whole), mesh, [Shard(0), Shard(1)]).to_local()
    return float((part - want).abs().max())


def test_a_matrix_that_is_cut_along_two_axes() -> None:
    assert max(run_ranks(_split_twice, 4)) == 0


@pytest.mark.same_on_every_cpu
def test_embeddings_heads_and_vectors_are_not_muons() -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    named = {id(p): name for name, p in model.named_parameters()}
    found = {named[id(p)].split(".")[-2] for p in hidden_matrices(model)}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("family", "apart"),
    [
        ("gpt_oss", {"experts.gate_up_proj_bias", "experts.down_proj_bias"}),
        ("mamba", {"mixer.A_log"}),
        ("cohere", {"q_norm.weight", "k_norm.weight"}),
    ],
)
def test_biases_and_norms_of_several_rows_are_no_matrices(family: str, apart: set[str]) -> None:
    """They neither decay nor are made orthogonal."""
    config = tiny_config(family)
    config.use_qk_norm = True  # of cohere
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = muon(model, lr=1e-3)
    kept = [p for g in optimizer.param_groups if not g["weight_decay"] for p in g["params"]]
    assert {".".join(names[p].split(".")[-2:]) for p in kept if p.ndim > 1} == apart
    assert not {*kept} & {*hidden_matrices(model)}
    assert {*model.parameters()} == {p for g in optimizer.param_groups for p in g["params"]}


@pytest.mark.same_on_every_cpu
def test_a_stack_of_experts_that_is_one_matrix_is_no_matrix_of_muons() -> None:
    lm = tiny_model("dbrx")
    stacks = {p for name, p in lm.named_parameters() if ".experts." in name}
    assert {p.ndim for p in stacks} == {2}
    assert stacks.isdisjoint(hidden_matrices(lm))
