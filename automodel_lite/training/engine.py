"""The engine: what turns micro-batches of every rank into gradients and steps. The recipe drives it
with files, a training client with rows in memory, `verify` with a sample, and the dry run with fake
tensors.

    micro_batches ─▶ place ─▶ forward_backward ─▶ sums ─▶ step
    [i]      of this rank     [T/cp]   gradients are kept          divided once, clipped, applied

A loss is a sum; what it is divided by counts the items of a whole optimizer step. Who knows the
count beforehand divides each micro-batch's loss by it (`divisor`); who does not, the gradients when
the step is taken.

Legend: R rows that carry a label, K values of each, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from automodel_lite.attention.isolation import evaluating
from automodel_lite.data.feeding.feed import DeviceFeed
from automodel_lite.data.feeding.order import BatchShape, assign_to_ranks
from automodel_lite.data.feeding.source import HostStep
from automodel_lite.data.packing.packs import EMPTY_PACK, PackedDataset
from automodel_lite.errors import DataError
from automodel_lite.models.fused_head import RowFunction
from automodel_lite.models.layers import local
from automodel_lite.models.loss import Loss, LossOutput
from automodel_lite.parallel.compute_weights import WritesCopies
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parallel.turns import in_turns, pairs_before_last
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.settings import Decided


def no_lap(phase: str) -> None:
    """Measures nothing."""


def add_output(sums: dict[str, Tensor], output: LossOutput) -> None:
    """Adds what a forward pass gives to the sums of others, in place: its loss, and its parts."""
    for name, value in {"loss": output.sum.detach(), **output.parts}.items():
        sums[name] = sums[name] + value if name in sums else value.float()


def with_mean(batch: ThdBatch, loss: Loss, mean: Tensor) -> ThdBatch:
    """Returns a micro-batch whose tokens all have a loss's `step_mean`."""
    assert loss.step_mean is not None
    of_tokens = {loss.step_mean.column: mean.expand(len(batch.labels))}
    return replace(batch, columns=batch.columns | of_tokens)


@dataclass(frozen=True)
class Engine:
    """A model on its mesh: losses, gradients and values of packs. Every rank calls every method.

    decided  with the model
    """

    mesh: Mesh
    model: ParallelModel
    decided: Decided
    _parts: list[str] = field(default_factory=list, init=False, repr=False)

    def place(self, batch: ThdBatch, loss: Loss | None = None) -> ThdBatch:
        """Returns the tokens of this context-parallel rank, on the host.

        loss  None = the model's
        """
        batch = self.model.loss_model.look_ahead(batch, loss)
        return cp_shard(batch, self.mesh.cp, self.decided.mesh.cp_exchange)

    def feed(self, steps: Iterator[HostStep]) -> DeviceFeed:
        """Returns the steps of a loader, placed and copied to the device one step ahead."""
        has_mixers = self.model.loss_model.needs_mixer_metadata
        return DeviceFeed(steps, self.place, self.mesh.device, has_mixers)

    def micro_batches(
        self, packs: PackedDataset, loss: Loss | None = None, first: int = 0
    ) -> Iterator[ThdBatch]:
        """Yields this rank's micro-batches of all packs from `first` on, as whole streams; ranks
        that run short get padding.

        loss  None = the model's
        """
        loss_model = self.model.loss_model
        needs_mixers = loss_model.needs_mixer_metadata or (loss or loss_model.loss).needs_documents
        for ids in self._assigned(packs, first)[:, self.mesh.dp_rank].tolist():
            yield to_thd(packs.__getitems__(ids).row, needs_mixers)

    def _assigned(self, packs: PackedDataset, first: int) -> np.ndarray:
        """Returns the packs of each micro-batch, [micro-batches, dp ranks, packs of one]."""
        size = self.decided.training.micro_batch_size
        dp = self.mesh.shape.dp
        return assign_to_ranks(np.arange(first, len(packs)), BatchShape(size * dp, size, dp))

    def forward_backward(
        self,
        inputs: Sequence[ThdBatch],
        divisor: float = 1.0,
        lap: Callable[[str], None] = no_lap,
        loss: Loss | None = None,
    ) -> dict[str, Tensor]:
        """Adds the gradients of this rank's micro-batches, placed and on the device, divided by
        `divisor`; returns the sums of its losses ("loss", not divided) and of their parts.

        loss  None = the model's
        """
        model = self.model
        inputs = self.with_step_mean(inputs, loss)
        sums = {"loss": torch.zeros((), device=self.mesh.device)}

        def run_passes(batch: ThdBatch, lap: Callable[[str], None] = no_lap) -> LossOutput:
            output = model(batch, loss)
            lap("forward")
            # the wrapper takes the mean over ranks: times their number, the gradient is that of
            # the sum over ranks
            (output.sum * (model.mean_ranks / divisor)).backward()
            lap("backward")
            return output

        done = 0
        groups = pairs_before_last(inputs) if model.takes_turns else zip(inputs)
        for group in groups:
            done += len(group)
            with model.accumulate(is_last=done == len(inputs)):
                if len(group) == 1:
                    outputs = [run_passes(group[0], lap)]
                else:
                    first, second = (partial(run_passes, batch) for batch in group)
                    outputs = in_turns(first, second, self.mesh.device)
                    model.add_up_gradients()
                    lap("backward")
            for output in outputs:
                add_output(sums, output)
        return sums

    def with_step_mean(
        self, inputs: Sequence[ThdBatch], loss: Loss | None = None
    ) -> Sequence[ThdBatch]:
        """Returns all micro-batches of a step with the mean over them that the loss asks for; as
        they are where it asks for none. It costs a forward pass without dropout or gradients.

        loss  None = the model's
        """
        loss = loss or self.model.loss_model.loss
        if loss.step_mean is None:
            return inputs
        sums = sum((self.step_sums(batch, loss) for batch in inputs), self.no_step_sums())
        mean = self.step_mean(sums, loss)
        return [with_mean(batch, loss, mean) for batch in inputs]

    def no_step_sums(self) -> Tensor:
        """Returns the sums [2] of no micro-batch."""
        return torch.zeros(2, device=self.mesh.device)

    @torch.no_grad()
    def step_sums(self, batch: ThdBatch, loss: Loss) -> Tensor:
        """Returns what this rank's part of a micro-batch adds to the loss's `step_mean`, [2]."""
        wanted = loss.step_mean
        assert wanted is not None
        # a pack of padding alone brings no columns
        filled = replace(batch, columns=loss.example_columns(batch) | batch.columns)
        with evaluating(self.model.module):
            found_R2 = self.model.values(filled, wanted.function, wanted.columns)
        return found_R2.sum(0)

    def step_mean(self, sums: Tensor, loss: Loss) -> Tensor:
        """Returns the mean, a scalar, over what all ranks have summed."""
        wanted = loss.step_mean
        assert wanted is not None
        self.model.free_gathered()
        total, count = self.mesh.sum(sums)
        # whole numbers of answers, summed from shares of their labels
        return (total / count.round().clamp(min=1)).clamp(min=wanted.least)

    @torch.no_grad()
    def values(
        self,
        packs: PackedDataset,
        function: RowFunction,
        first: int = 0,
        columns: Sequence[str] = (),
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields, forward by forward and without dropout, what all ranks have computed: (packs,
        the column `row_place` of their labels [R], `function(logits, labels, *columns)` [R, K]).
        """
        numbers = (self._assigned(packs, first) != EMPTY_PACK).sum((1, 2)).tolist()
        with evaluating(self.model.module):
            for num_packs, batch in zip(numbers, self.micro_batches(packs, first=first)):
                own = self.place(batch)
                found = self.model.values(own.to(self.mesh.device), function, columns)
                # rows of several ranks are other tokens, or the same with the same values (tp)
                of_rank = own.columns["row_place"][own.label_rows].numpy(), found.cpu().numpy()
                parts = zip(*self.mesh.gather(of_rank))
                places, values = (np.concatenate(part) for part in parts)
                yield num_packs, places, values
            self.model.free_gathered()

    def total(self, sums: dict[str, Tensor], of_model: bool = True) -> dict[str, Tensor]:
        """Sums over the ranks, in one message. Raises DataError where the parts of the losses
        differ between ranks: sums of unequal length end in a crash of gloo, and hang NCCL.

        of_model  are they always of the model's loss, whose parts are compared once, as that waits
                  for the device?
        """
        names = [*sums]
        if not (of_model and self._parts):
            for rank, theirs in enumerate(self.mesh.gather(names)):
                self._check_parts(names, theirs, f"those of rank {rank}")
        if of_model:
            self._parts[:] = self._parts or names
            self._check_parts(names, self._parts, "those of the first step")
        return dict(zip(sums, self.mesh.sum(torch.stack([*sums.values()]))))

    def _check_parts(self, own: list[str], others: list[str], whose: str) -> None:
        if own != others:
            raise DataError(
                f"rank {self.mesh.rank}: the losses have the parts {', '.join(own)}, and {whose} "
                f"{', '.join(others)}: a part may not depend on the columns that some rows bring "
                "and others do not: add the missing column to all rows, or give the part the "
                "value 0."
            )


@dataclass(frozen=True)
class TrainingEngine(Engine):
    """An engine that steps."""

    optimizer: Optimizer

    def __post_init__(self) -> None:
        # on a CPU torch's own kernel is the faster one
        if self.mesh.device.type == "cuda":
            self.write_copies()

    def write_copies(self) -> None:
        """Lets an optimizer that can write the weights that the model computes with."""
        if self.model.weights is not None and isinstance(self.optimizer, WritesCopies):
            self.model.weights.written_by(self.optimizer)

    @classmethod
    def of(cls, built: BuiltModel, mesh: Mesh) -> TrainingEngine:
        """Builds the optimizer of a model; raises ConfigError."""
        decided = built.decided
        optimizer = decided.optimizer(built.model.loss_model)
        if decided.peft:
            decided.peft.set_rates(optimizer, built.model.loss_model)
        return cls(mesh, built.model, decided, optimizer)

    def step(self, loss_sum: Tensor, max_norm: float, divisor: float = 1.0) -> Tensor:
        """Divides the gradients, applies them and clears them; returns their norm before clipping.
        A step whose loss or gradient is not finite leaves the weights as they are.

        loss_sum  over all ranks
        """
        parameters = list(self.model.parameters())
        if divisor != 1:
            for parameter in parameters:  # a quotient is no value of bf16
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    parameter.grad = parameter.grad.to(parameter.dtype)
            torch._foreach_div_([local(p.grad) for p in parameters if p.grad is not None], divisor)
        norm = apply_gradients(self.optimizer, parameters, loss_sum, max_norm)
        if self.model.weights is not None:
            self.model.weights.stepped()
        self.optimizer.zero_grad()
        return norm
