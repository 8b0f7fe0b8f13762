"""Muon (Jordan et al., 2024) on matrices that are sharded: torch.optim.Muon's numbers, on any
number of ranks.

The momentum of a matrix is made orthogonal before it is applied, which takes the whole matrix: each
rank of a shard group gathers one, works on it, and sends the rows back. 4 bytes of state per
weight; what is not a matrix of a layer is AdamW's, with 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from automodel_lite.compat import muon as torch_muon
from automodel_lite.config.rules import Range
from automodel_lite.config.sizes import ceil_div
from automodel_lite.models.layers import local
from automodel_lite.models.sharded import keep_part
from automodel_lite.parts.optimizers.adamw import (
    Betas,
    Eps,
    LearningRate,
    Rate,
    SmallAdamW,
    matrices,
    param_groups,
    scale_and_skip,
)


def muon(
    model: nn.Module,
    lr: LearningRate,
    betas: Betas = (0.9, 0.95),  # AdamW's decay rates of the first and second moment
    eps: Eps = 1e-8,  # AdamW's, added to the denominator
    weight_decay: Rate = 0.01,  # of matrices
    momentum: Annotated[float, Range(0, below=1)] = 0.95,  # Muon's
) -> Muon:
    """The matrices inside the layers by Muon; embeddings, the head, vectors and stacked experts by
    AdamW.

    One rate for both: Muon's is scaled by 0.2 * sqrt(the longer side), by which its updates are as
    large as AdamW's (Liu et al., 2025, arXiv:2502.16982).
    """
    hidden = hidden_matrices(model)
    groups = param_groups(model, weight_decay, left_out=hidden)
    if hidden:
        groups = [{"params": hidden, "weight_decay": weight_decay, "momentum": momentum}, *groups]
    return Muon(
        groups,
        {"lr": lr, "betas": tuple(map(float, betas)), "eps": eps},
    )


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trained matrices, without embeddings, output heads and stacks of experts.

    Each row of an embedding or a head is a vector of its own, and a stack holds several matrices,
    also DBRX's, whose stack has the shape of one.
    """
    ends = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            ends.add(module.weight)
        if "Expert" in type(module).__name__:
            ends.update(module.parameters(recurse=False))
        if (
            isinstance(module, transformers.PreTrainedModel)
            and (head := module.get_output_embeddings()) is not None
        ):
            ends.update(head.parameters())
    return [p for p in matrices(model) if p.ndim == 2 and p not in ends]


class Muon(SmallAdamW):
    """torch.optim.Muon's update on the group with a momentum, AdamW in fp32 on the others."""

    rounds_by_chance = False

    def writes_copy(self, parameter: Tensor) -> bool:
        """See `WritesCopies`: those of AdamW alone."""
        hidden = [p for group in self.param_groups if "momentum" in group for p in group["params"]]
        return all(parameter is not p for p in hidden)

    def step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        if "momentum" not in group:
            super().step_group(group, parameters)
            return
        for together in _alike(parameters):
            updates = [self._momentum(parameter, group) for parameter in together]
            for parameter, direction in zip(together, orthogonal(together, updates)):
                _, skipped = scale_and_skip(self, parameter.device)
                size = torch_muon._adjust_lr(group["lr"], "match_rms_adamw", parameter.shape)
                weight = local(parameter)
                updated = (
                    weight * (1 - group["lr"] * group["weight_decay"]) - size * direction.float()
                )
                weight.copy_(torch.where(skipped, weight, updated))

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """This rank's part of the update before it is made orthogonal, by Nesterov's momentum,
        bf16.
        """
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        scale, skipped = scale_and_skip(self, parameter.device)
        buffer = local(state["momentum_buffer"])
        gradient = local(parameter.grad) / scale  # type: ignore[arg-type]
        updated = buffer.lerp(gradient, 1 - group["momentum"])
        buffer.copy_(torch.where(skipped, buffer, updated))
        return gradient.lerp(updated, group["momentum"]).bfloat16()


def _alike(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """As many matrices of one layout as ranks share them, those of one size side by side: each rank
    takes one.
    """
    layouts: dict[Any, list[nn.Parameter]] = {}
    for matrix in sorted(matrices, key=Tensor.numel):
        layout = (matrix.device_mesh, matrix.placements) if isinstance(matrix, DTensor) else None
        layouts.setdefault(layout, []).append(matrix)
    for together in layouts.values():
        group = _row_group(together[0])
        size = dist.get_world_size(group) if group else 1
        yield from (together[start : start + size] for start in range(0, len(together), size))


def _row_group(matrix: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share the rows; None for a whole matrix, or one that is cut along two axes."""
    if not isinstance(matrix, DTensor):
        return None
    cut = [axis for axis, placement in enumerate(matrix.placements) if not placement.is_replicate()]
    placement = matrix.placements[cut[0]] if len(cut) == 1 else None
    # a strided shard has rows here and there
    is_by_rows = type(placement) is Shard and placement.dim == 0
    return matrix.device_mesh.get_group(cut[0]) if is_by_rows else None


def orthogonal(matrices: list[nn.Parameter], updates: list[Tensor]) -> list[Tensor]:
    """This rank's part of each update's orthogonal factor; `updates` are its parts of the updates,
    bf16.

    Each rank of a shard group gathers one of the matrices, works on it, and sends every rank its
    rows back: all work is done once, on the numbers that a single process has.
    """
    group = _row_group(matrices[0])
    if group is None:
        (matrix,) = matrices
        (part,) = updates
        if not isinstance(matrix, DTensor):
            return [newton_schulz(part)]
        # cut along two axes, as by tensor parallelism: every rank works on the whole matrix
        layout = (matrix.device_mesh, matrix.placements)
        cut = DTensor.from_local(
            part, *layout, run_check=False, shape=matrix.shape, stride=matrix.stride()
        )
        keep_part(cut, newton_schulz(cut.full_tensor()))
        return [cut.to_local()]
    size = dist.get_world_size(group)
    me = dist.get_rank(group)
    # of each matrix on each rank, as FSDP cuts: the first ranks have ceil(rows / ranks), the last
    # what is left
    chunks = [ceil_div(len(matrix), size) for matrix in matrices]
    rows = [
        [max(0, min(c, len(m) - rank * c)) for rank in range(size)]
        for m, c in zip(matrices, chunks)
    ]
    columns = [matrix.shape[1] for matrix in matrices]
    mine = [rows[owner][me] * columns[owner] for owner in range(len(matrices))] + [0] * (
        size - len(matrices)
    )
    whole = [count * columns[me] for count in rows[me]] if me < len(matrices) else [0] * size
    sent = torch.cat([part.reshape(-1) for part in updates])
    gathered = sent.new_empty(sum(whole))
    dist.all_to_all_single(gathered, sent, whole, mine, group)
    if me < len(matrices):
        gathered = newton_schulz(gathered.view(-1, columns[me])).reshape(-1)
    parts = gathered.new_empty(sum(mine))
    dist.all_to_all_single(parts, gathered.contiguous(), mine, whole, group)
    return [part.view(-1, width) for part, width in zip(parts.split(mine), columns)]


def newton_schulz(update: Tensor) -> Tensor:
    """torch.optim.Muon's own five steps, in bf16."""
    coefficients = (torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C)
    return torch_muon._zeropower_via_newtonschulz(update, coefficients, 5, 1e-7)
