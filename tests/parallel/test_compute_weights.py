"""One process in bf16 without FSDP has the bits of FSDP over a single rank: losses, gradients, and weights after steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from automodel_lite.models.layers import decoder_layers, local, recompute_layers
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import ParallelModel, parallelize
from automodel_lite.parts.optimizers.adamw import adamw
from tests.attention.families import FAMILIES
from tests.attention.hybrids import HYBRIDS
from tests.parallel.test_sharding import loss_model, micro_batch
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ALONE = Mesh(MeshShape(1, 1, 1), CPU, None)


def two_steps(
    model: LossModel, parallel: ParallelModel, num_micro: int, moments: str
) -> list[torch.Tensor]:
    """Losses, gradients of the second step, and the weights after it."""
    optimizer = adamw(model, 1e-2, moments=moments)
    found: list[torch.Tensor] = []
    for step in range(2):
        optimizer.zero_grad()
        for number in range(num_micro):
            with parallel.accumulate(is_last=number == num_micro - 1):
                loss = parallel(micro_batch(2 * step + number, 1)).sum
                (loss / 100).backward()
            found.append(loss.detach())
        gradients = [p.grad for p in parallel.parameters() if p.grad is not None]
        found += [local(gradient).clone() for gradient in gradients]
        optimizer.step()
        # which fused kernels forget
        torch.autograd.graph.increment_version([local(p) for p in parallel.parameters()])
    return found + [local(p.detach()) for p in parallel.parameters()]


def of_both(
    rank: int, world: int, cases: list[tuple[str, torch.dtype, int, str]]
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
            moments = "fp32" if masters == torch.float32 else "bf16"
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


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["none", "full"])
def test_one_process_has_the_bits_of_fsdp(masters: torch.dtype, how: str) -> None:
    # a sum of two has the bits of one that is rounded in between
    cases = [(name, masters, num_micro, how) for name in QUICK for num_micro in (1, 3)]
    (found,) = run_ranks(of_both, 1, cases)
    assert len(found) == len(cases)
    assert not any(differ for _, differ in found), found


@pytest.mark.numbers
def test_every_family_has_the_bits_of_fsdp() -> None:
    cases = [(name, torch.float32, 2, "none") for name in [*FAMILIES, *HYBRIDS]]
    (found,) = run_ranks(of_both, 1, cases)
    assert len(found) > 0.8 * len(cases)
    assert not [name for name, differ in found if differ]
