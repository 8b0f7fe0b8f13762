"""One process in bf16 without FSDP has the bits of FSDP over a single rank: losses, gradients, and weights after steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.graphs import compiled_graphs, strict_graphs
from automodel_lite.models.layers import decoder_layers, local, recompute_layers
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.compute_weights import ComputeWeights, WritesCopies
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import ParallelModel, parallelize
from automodel_lite.parts.optimizers import adamw as optimizers
from automodel_lite.parts.optimizers.adamw import SmallAdamW, adamw
from automodel_lite.parts.optimizers.muon import muon
from automodel_lite.training.ema import WeightAverage
from automodel_lite.training.optimizers import apply_gradients, gradient_norm
from tests.attention.families import FAMILIES
from tests.attention.hybrids import HYBRIDS
from tests.parallel.test_sharding import loss_model, micro_batch
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ALONE = Mesh(MeshShape(1, 1, 1), CPU, None)


def two_steps(
    model: LossModel, parallel: ParallelModel, num_micro: int, moments: str
) -> list[torch.Tensor]:
    """Losses, gradients of the second step, and the weights after it. An optimizer whose numbers
    do not depend on it writes the copies of weights.
    """
    optimizer = adamw(model, 1e-2, moments=moments)
    if parallel.weights is not None and isinstance(optimizer, SmallAdamW):
        parallel.weights.written_by(optimizer, least=100)
    found: list[torch.Tensor] = []
    for step in range(2):
        optimizer.zero_grad()
        for number in range(num_micro):
            with parallel.accumulate(is_last=number == num_micro - 1):
                loss = parallel(micro_batch(2 * step + number, 1)).sum
                (loss / 100).backward()
            found.append(loss.detach())
        gradients = [p.grad for p in parallel.parameters() if p.grad is not None]
        found += [
            local(gradient).to(next(model.parameters()).dtype, copy=True) for gradient in gradients
        ]
        optimizer.step()
        # which fused kernels forget
        torch.autograd.graph.increment_version([local(p) for p in parallel.parameters()])
        if parallel.weights is not None:
            parallel.weights.stepped()
    return found + [local(p.detach()) for p in parallel.parameters()]


def of_both(
    rank: int, world: int, cases: list[tuple[str, torch.dtype, int, str]], moments: str
) -> list[tuple[str, list[int]]]:
    """Of each case that computes in bf16, the numbers of the tensors that differ."""
    mesh = open_mesh(MeshShape(1, 1, 1), CPU)
    found = []
    for family, masters, num_micro, how in cases:
        results: list[list[Any]] = []
        for strategy, on in (("fsdp", mesh), ("none", ALONE)):
            model = loss_model(family).to(masters).train()
            parallel = parallelize(model, on, strategy, torch.bfloat16)
            recompute_layers(decoder_layers(model.lm), how, 1)
            try:
                results.append(two_steps(model, parallel, num_micro, moments))
            except RuntimeError as error:  # transformers' code mixes dtypes
                results.append([str(error)])
                continue
            assert any(isinstance(p, DTensor) for p in model.parameters()) == (strategy == "fsdp")
            assert all(p.dtype == masters for p in model.parameters())
        theirs, ours = results
        assert len(theirs) == len(ours), (family, ours[:1])
        if isinstance(theirs[0], str):
            assert theirs == ours
            continue
        differ = [i for i, (x, y) in enumerate(zip(theirs, ours)) if not torch.equal(x, y)]
        found.append((family, differ))
    return found


QUICK = ["llama", "gemma2_softcap_window"]  # untied, and tied with a head behind the model


@pytest.mark.parametrize(
    ("masters", "moments"),
    [(torch.float32, "fp32"), (torch.float32, "bf16"), (torch.bfloat16, "bf16")],
    ids=["fp32", "bf16 moments", "bf16"],
)
@pytest.mark.parametrize("how", ["none", "full"])
def test_one_process_has_the_bits_of_fsdp(masters: torch.dtype, moments: str, how: str) -> None:
    # a sum of two has the bits of one that is rounded in between
    cases = [(name, masters, num_micro, how) for name in QUICK for num_micro in (1, 3)]
    (found,) = run_ranks(of_both, 1, cases, moments)
    assert len(found) == len(cases)
    assert not any(differ for _, differ in found), found


@pytest.mark.numbers
def test_every_family_has_the_bits_of_fsdp() -> None:
    cases = [(name, torch.float32, 2, "none") for name in [*FAMILIES, *HYBRIDS]]
    (found,) = run_ranks(of_both, 1, cases, "fp32")
    assert len(found) > 0.8 * len(cases)
    assert not [name for name, differ in found if differ]


def stepped_model(writes: bool, num_micro: int = 1) -> tuple[nn.Module, ComputeWeights, Any]:
    """A model of two matrices and their biases after two steps of AdamW, whose gradients are those
    of one row.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    weights = ComputeWeights(model, torch.bfloat16)
    optimizer = adamw(model, 1e-2)
    if writes:
        assert isinstance(optimizer, WritesCopies)
        weights.written_by(optimizer, least=1000)
    for _ in range(2):
        for number in range(num_micro):
            with weights.accumulating(is_last=number == num_micro - 1):
                model(torch.ones(1, 64).bfloat16()).float().square().sum().backward()
        apply_gradients(optimizer, model.parameters(), torch.tensor(1.0), 1.0)
        weights.stepped()
        if writes:
            assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == [
                torch.bfloat16 if p.ndim == 2 and num_micro == 1 else torch.float32
                for p in model.parameters()
            ]
            assert all(torch.equal(c, p.bfloat16()) for p, c in optimizer.copies.items())
        optimizer.zero_grad()
    return model, weights, optimizer


@pytest.mark.parametrize("num_micro", [1, 2])
def test_adamw_writes_copies_of_large_weights(num_micro: int) -> None:
    plain, _, of_torch = stepped_model(False, num_micro)
    model, weights, optimizer = stepped_model(True, num_micro)
    assert list(optimizer.copies) == [model[0].weight, model[1].weight]
    for own, want in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(own, want, rtol=2e-6, atol=1e-7)
    for own, want in zip(optimizer.state.values(), of_torch.state.values()):
        assert own.keys() == want.keys()
        for name in own:
            torch.testing.assert_close(own[name], want[name], rtol=2e-6, atol=1e-9)
    # whoever else writes into a weight is noticed, also before a step without its gradient
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    weights.stepped()
    with weights.computing():
        assert bool((model[0].weight == 0.5).all())


def test_the_step_that_writes_copies_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both matrices, with gradients in bf16 of weights in fp32, as on a GPU."""
    strict_graphs()
    torch._dynamo.reset()
    graphs = compiled_graphs()
    whole = torch.compile(optimizers.update, fullgraph=True, backend="eager")
    plain, *_ = stepped_model(True)
    monkeypatch.setattr(optimizers, "update", whole)
    model, *_ = stepped_model(True)
    assert compiled_graphs() - graphs == 1
    assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), model.parameters()))


def test_gradients_of_two_calls_before_a_step_are_summed_in_fp32() -> None:
    """As a client makes them, each of a single micro-batch: 1 + 1/256 is no value of bf16."""
    model = nn.Linear(64, 64, bias=False)
    weights = ComputeWeights(model, torch.bfloat16)
    weights.written_by(adamw(model, 1e-2), least=1)  # type: ignore[arg-type]
    for value in (1.0, 1 / 256):
        with weights.accumulating(is_last=True):
            model(torch.full((1, 64), value).bfloat16()).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.unique().tolist() == [1 + 1 / 256]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(where: str) -> None:
    model, weights, optimizer = stepped_model(True)

    def held() -> list[torch.Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [
            x.detach().clone() for x in (*model.parameters(), *optimizer.copies.values(), *states)
        ]

    before = held()
    with weights.accumulating(is_last=True):
        model(torch.ones(1, 64).bfloat16()).sum().backward()
    loss = torch.tensor(torch.nan if where == "loss" else 1.0)
    if where == "gradient":
        model[0].weight.grad[3, 5] = torch.inf
    apply_gradients(optimizer, model.parameters(), loss, 1.0)
    weights.stepped()
    assert all(torch.equal(x, y) for x, y in zip(before, held(), strict=True))
    assert [int(state["step"]) for state in optimizer.state.values()] == [2, 2, 2, 2]


class SeenNorms(TorchDispatchMode):
    """Notes the dtypes of each list whose norms are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._foreach_norm:
            self.dtypes.append({x.dtype for x in args[0]})
        return func(*args, **(kwargs or {}))


def test_norms_are_of_lists_of_one_dtype() -> None:
    """Of a mixed list, torch launches a kernel for each tensor."""
    matrix, bias = nn.Linear(8, 8).parameters()
    matrix.grad_dtype = None
    matrix.grad, bias.grad = torch.full((8, 8), 3.0).bfloat16(), torch.full((8,), 5.0)
    with SeenNorms() as seen:
        norm = gradient_norm([matrix, bias])
    assert seen.dtypes == [{torch.bfloat16}, {torch.float32}]
    assert float(norm) == pytest.approx((64 * 9 + 8 * 25) ** 0.5)


def test_frozen_weights_are_cast_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    weights = ComputeWeights(model, torch.bfloat16)
    optimizer = adamw(model, 1e-2)
    for _ in range(2):
        with weights.accumulating(is_last=True):
            versions = [p._version for p in model[0].parameters()]
            model(torch.ones(1, 8).bfloat16()).sum().backward()
        apply_gradients(optimizer, model.parameters(), torch.tensor(1.0), 1.0)
    with weights.computing():
        assert [p._version for p in model[0].parameters()] == versions
        assert torch.equal(model[1].weight, weights._masters[2].bfloat16())


def test_the_average_is_computed_with_and_the_copies_follow_the_weights_again() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    weights = ComputeWeights(model, torch.bfloat16)
    optimizer: Any = adamw(model, 1e-2)
    weights.written_by(optimizer, least=1)
    average = WeightAverage(optimizer, 0.9)
    parallel = ParallelModel(model, model, 1, torch.bfloat16, weights=weights)  # type: ignore[arg-type]
    for _ in range(3):
        with weights.accumulating(is_last=True):
            model(torch.ones(1, 64).bfloat16()).float().square().sum().backward()
        apply_gradients(optimizer, model.parameters(), torch.tensor(1.0), 1.0)
        weights.stepped()
        optimizer.zero_grad()
    own = model.weight.detach().clone()
    averaged = optimizer.state[model.weight]["ema"].clone()
    assert not torch.equal(own.bfloat16(), averaged.bfloat16())
    with average.applied(parallel), weights.computing():
        assert torch.equal(model.weight, averaged.bfloat16())
    with weights.computing():
        assert torch.equal(model.weight, own.bfloat16())
    assert torch.equal(model.weight, own)


def test_a_stopped_run_goes_on_with_the_same_bits() -> None:
    """Weights and moments are loaded behind `written_by`, as at the start of a run."""
    model, weights, optimizer = stepped_model(True)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, of_other, resumed = stepped_model(True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, casts, one in ((model, weights, optimizer), (other, of_other, resumed)):
        for _ in range(2):
            with casts.accumulating(is_last=True):
                each(torch.ones(1, 64).bfloat16()).float().square().sum().backward()
            apply_gradients(one, each.parameters(), torch.tensor(1.0), 1.0)
            casts.stepped()
            one.zero_grad()
        assert all(torch.equal(c, p.bfloat16()) for p, c in one.copies.items())
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters()))


def test_muon_writes_no_copies_of_what_it_makes_orthogonal() -> None:
    model = nn.Module()
    model.table = nn.Embedding(32, 64)
    model.layer = nn.Linear(64, 64, bias=False)
    optimizer = muon(model, 1e-2)
    ComputeWeights(model, torch.bfloat16).written_by(optimizer, least=1)
    assert list(optimizer.copies) == [model.table.weight]
