"""The engine: a model on its mesh and an optimizer; micro-batches in, sums and gradients out.

    packs ─▶ micro_batches ─▶ place ─▶ forward_backward ─▶ sums ─▶ step
    [i]      of this rank     [T/cp]   gradients are kept          divided once, clipped, applied

A loss is a sum; what it is divided by counts the items of a whole optimizer step. Who knows the
count beforehand divides each micro-batch's loss by it (`divisor`); who does not, the gradients when
the step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from automodel_lite.data.feeding.order import BatchShape, assign_to_ranks
from automodel_lite.data.packing.packs import PackedDataset, packed_sequence_thd_collater
from automodel_lite.models.layers import local
from automodel_lite.models.loss import Loss
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.seed import seed_all
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.build import BuiltModel, build_model
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.plan import Decided


def no_lap(phase: str) -> None:
    """Measures nothing."""


@dataclass(frozen=True)
class Engine:
    """What computes and applies gradients; every rank calls every method."""

    mesh: Mesh
    built: BuiltModel
    optimizer: Optimizer

    @classmethod
    def build(
        cls, decided: Decided, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, seed: int
    ) -> Engine:
        """Builds the model, from its files or its seed, and its optimizer; raises ConfigError."""
        seed_all(seed, "model")
        built = build_model(decided, tokenizer, mesh)
        return cls(mesh, built, decided.optimizer(built.model.loss_model))

    def place(self, batch: ThdBatch) -> ThdBatch:
        """Returns the tokens of this context-parallel rank, on the host."""
        batch = self.built.model.loss_model.look_ahead(batch)
        return cp_shard(batch, self.mesh.cp, self.built.decided.mesh.cp_exchange)

    def micro_batches(self, packs: PackedDataset, loss: Loss | None = None) -> Iterator[ThdBatch]:
        """Yields this rank's micro-batches of all packs, as whole streams; ranks that run
        short get padding.

        loss  None = the model's
        """
        loss_model = self.built.model.loss_model
        needs_mixers = loss_model.needs_mixer_metadata or (loss or loss_model.loss).needs_documents
        size = self.built.decided.training.micro_batch_size
        dp = self.mesh.shape.dp
        of_ranks = assign_to_ranks(np.arange(len(packs)), BatchShape(size * dp, size, dp))
        for ids in of_ranks[:, self.mesh.dp_rank].tolist():
            batch = packed_sequence_thd_collater(packs.__getitems__(ids))
            yield to_thd(batch, needs_mixers)

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
        model = self.built.model
        sums = {"loss": torch.zeros((), device=self.mesh.device)}
        for number, batch in enumerate(inputs, start=1):
            with model.accumulate(is_last=number == len(inputs)):
                output = model(batch, loss)
                lap("forward")
                # the wrapper takes the mean over ranks: times their number, the gradient is that
                # of the sum over ranks
                (output.sum * (model.mean_ranks / divisor)).backward()
                lap("backward")
            for name, value in {"loss": output.sum.detach(), **output.parts}.items():
                sums[name] = sums[name] + value if name in sums else value.float()
        return sums

    def count_items(self, micro_batches: Iterable[ThdBatch], loss: Loss) -> float:
        """Returns what the loss counts in whole streams of all ranks."""
        items = loss.num_items
        # the ranks of cp and tp read the same streams
        own = torch.tensor(sum(map(items, micro_batches)), dtype=torch.float64)
        return float(self.mesh.sum(own.to(self.mesh.device))) / self.mesh.shape.cp

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the ranks, in one message."""
        return dict(zip(sums, self.mesh.sum(torch.stack([*sums.values()]))))

    def step(self, loss_sum: Tensor, max_norm: float, divisor: float = 1.0) -> Tensor:
        """Divides the gradients, applies them and clears them; returns their norm before clipping.
        A step whose loss or gradient is not finite leaves the weights as they are.

        loss_sum  over all ranks
        """
        parameters = list(self.built.model.parameters())
        if divisor != 1:
            torch._foreach_div_([local(p.grad) for p in parameters if p.grad is not None], divisor)
        norm = apply_gradients(self.optimizer, parameters, loss_sum, max_norm)
        self.optimizer.zero_grad()
        return norm
