"""Two micro-batches in turns: whose turn it is, what ends both, and the gradients of the plain order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_lite.models.experts import SORTED_MM
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import ParallelModel, parallelize
from automodel_lite.parallel.turns import hand_over, in_turns, pairs_before_last, takes_turns
from tests.parallel.test_sharding import loss_model, micro_batch
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("items", "groups"),
    [
        ("", []),
        ("a", ["a"]),
        ("ab", ["a", "b"]),
        ("abc", ["ab", "c"]),
        ("abcdef", ["a", "bc", "de", "f"]),
    ],
)
def test_the_last_micro_batch_runs_alone(items: str, groups: list[str]) -> None:
    assert list(pairs_before_last(items)) == groups


def speaker(name: str, times: int, said: list[str]) -> Callable[[], str]:
    def speak() -> str:
        for number in range(times):
            said.append(f"{name}{number}")
            hand_over()
        return name

    return speak


def test_turns_alternate_until_one_ends() -> None:
    said: list[str] = []
    assert in_turns(speaker("a", 2, said), speaker("b", 4, said), CPU) == ["a", "b"]
    assert said == ["a0", "b0", "a1", "b1", "b2", "b3"]
    assert not takes_turns()


def fail(error: BaseException) -> None:
    hand_over()
    raise error


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "error", [ValueError("of one"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_an_error_of_one_ends_both_with_its_own_traceback(
    is_first: bool, error: BaseException
) -> None:
    said: list[str] = []
    passes = [partial(fail, error), speaker("other", 9, said)]
    with pytest.raises(type(error)) as raised:
        in_turns(*passes[:: 1 if is_first else -1], CPU)
    assert raised.value is error
    assert raised.traceback[-1].name == "fail"
    assert len(said) < 3
    assert [thread.name for thread in threading.enumerate()].count("second micro-batch") == 0


def draw(found: list[Tensor]) -> None:
    """Draws, and draws the same again as a recomputation does, with the other's turn in between."""
    state = torch.get_rng_state()
    found.append(torch.rand(3))
    hand_over()
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        hand_over()
        found.append(torch.rand(3))
    hand_over()
    found.append(torch.rand(3))


def test_each_has_its_random_numbers() -> None:
    torch.manual_seed(0)
    first: list[Tensor] = []
    second: list[Tensor] = []
    in_turns(partial(draw, first), partial(draw, second), CPU)
    after = torch.rand(3)
    for of_one in (first, second):
        assert torch.equal(of_one[0], of_one[1])
    different = torch.stack([first[0], first[2], second[0], second[2], after])
    assert len(different.unique(dim=0)) == 5


# ---------------------------------------------- of a model on its ranks
def step(model: ParallelModel, mesh: Mesh, num_micro: int, takes_turns: bool) -> dict[str, Tensor]:
    """The losses and this rank's gradients of micro-batches of different documents on all ranks."""
    batches = [micro_batch(mesh.dp_rank * num_micro + number, 1) for number in range(num_micro)]

    def run_passes(number: int) -> Tensor:
        loss = model(batches[number]).sum
        loss.backward()
        return loss.detach()

    numbers = range(num_micro)
    losses: list[Tensor] = []
    for group in pairs_before_last(numbers) if takes_turns else zip(numbers):
        with model.accumulate(is_last=group[-1] == num_micro - 1):
            if len(group) == 1:
                losses.append(run_passes(group[0]))
            else:
                losses += in_turns(*(partial(run_passes, number) for number in group), CPU)
                model.add_up_gradients()
    found = {f"loss {number}": loss for number, loss in enumerate(losses)}
    for name, parameter in model.loss_model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.to_local() if isinstance(grad, DTensor) else grad
            parameter.grad = None
    return found


def beside_the_plain_order(
    rank: int, world_size: int, shape: tuple[int, ...], cases: list[tuple[str, str, bool]]
) -> list[float]:
    """The largest difference of a loss or gradient, relative to the largest value."""
    mesh = open_mesh(MeshShape(*shape), CPU)
    errors: list[float] = []
    for family, recomputed, is_idle in cases:
        models = []
        for _ in range(2):
            plain = loss_model(family).double()
            plain.lm.set_experts_implementation(SORTED_MM)
            for name, parameter in plain.named_parameters():
                if is_idle and name.endswith("gate.weight"):
                    parameter.data.zero_()  # all tokens go to the first experts
            # float32 stands for no dtype of its own: all stays fp64
            models.append(parallelize(plain, mesh, "fsdp", torch.float32, reshards=False))
            recompute_layers(decoder_layers(models[-1].loss_model.lm), recomputed, 1)
        for num_micro in (3, 4):  # a second step begins where the first has left FSDP
            want = step(models[0], mesh, num_micro, takes_turns=False)
            got = step(models[1], mesh, num_micro, takes_turns=True)
            assert got.keys() == want.keys()
            for name in want:
                off = (got[name] - want[name]).abs().max() / max(1, want[name].abs().max())
                errors.append(float(off))
    return [max(errors)]


CASES = [("qwen3_moe", "none", True), ("qwen3_moe", "full", False)]


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, 1, 2),
        pytest.param((1, 4, 1, 1, 4), marks=pytest.mark.slow),
        pytest.param((1, 4, 1, 1, 2), marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 1, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_the_plain_order(shape: tuple[int, ...]) -> None:
    cases = CASES
    if shape[1] == 4:
        cases = [("qwen3_moe", "selective", False), ("deepseek_v3_latent", "full", False)]
    for errors in run_ranks(beside_the_plain_order, math.prod(shape[:4]), shape, cases):
        assert errors[0] < 1e-12


def fail_on_a_rank(rank: int, world_size: int) -> str:
    """A pair whose second micro-batch cannot be computed, on all ranks."""
    mesh = open_mesh(MeshShape(1, 2, 1, 1, 2), CPU)
    model = parallelize(loss_model("qwen3_moe"), mesh, "fsdp", torch.float32, reshards=False)
    batches: list[Any] = [micro_batch(0, 1), micro_batch(1, 1)]

    def run_passes(number: int) -> None:
        loss = model(batches[number]).sum
        if number == 1:
            raise FloatingPointError("of the second")
        loss.backward()

    with pytest.raises(FloatingPointError, match="of the second") as raised:
        in_turns(partial(run_passes, 0), partial(run_passes, 1), CPU)
    return raised.traceback[-1].name


def test_an_error_in_the_middle_of_a_model_ends_both_micro_batches() -> None:
    assert run_ranks(fail_on_a_rank, 2) == ["run_passes"] * 2
