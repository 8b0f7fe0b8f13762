"""Steps whose loss or gradient is not finite: dumped and skipped; too many in a row end the run.

bad_steps/step_00000017/
    rank_00000.json           step, packs of the whole step, loss sum and gradient norm over all
                              ranks
    rank_00000.safetensors    this rank's micro-batches: input_ids_0, labels_0, position_ids_0,
                              cu_seqlens_0 ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from automodel_lite.errors import RunStoppedError, counted, listed
from automodel_lite.models.layers import local
from automodel_lite.parallel.control import Control
from automodel_lite.run.durable import json_line
from automodel_lite.thd import ThdBatch


@torch.no_grad()
def are_finite(parameters: Iterable[Tensor], ranks: Control) -> bool:
    """Are all trained weights finite, on all ranks? Reads them once, which costs less than writing
    them.
    """
    good = torch.ones((), dtype=torch.bool)
    for parameter in parameters:
        if parameter.requires_grad:
            here = local(parameter)
            good = good.to(here.device) & torch.isfinite(here).all()
    return not ranks.max([int(not good)])[0]


class StepOutcome:
    """A step's loss (summed over its label tokens) and gradient norm over all ranks, on their way
    to the host.
    """

    def __init__(self, loss_sum: Tensor, grad_norm: Tensor) -> None:
        values = torch.stack([loss_sum.detach().float(), grad_norm.detach().float()])
        self._host = torch.empty(2, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._copied = (
            torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None
        )

    def read(self) -> tuple[float, float]:
        """Waits until the device has finished the step."""
        if self._copied is not None:
            self._copied.synchronize()
        loss_sum, grad_norm = self._host.tolist()
        return loss_sum, grad_norm


@dataclass
class NonfiniteSteps:
    """Counts the nonfinite steps in a row, which the optimizer has skipped on the device.

    Every rank calls every method, and the numbers are those of all ranks.
    """

    folder: Path
    max_in_a_row: int
    rank: int
    say: Callable[[str], None]
    in_a_row: int = 0

    def check(
        self,
        step: int,
        pack_ids: Sequence[int],
        batches: Sequence[ThdBatch],
        numbers: tuple[float, float],
    ) -> None:
        """Dumps a bad step; raises RunStoppedError for one too many in a row.

        batches  of this rank, on the host
        numbers  (loss sum, gradient norm)
        """
        loss_sum, grad_norm = numbers
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return
        # What each rank had in the step, for the report; a disk that is full costs a warning.
        self.in_a_row += 1
        where = self.folder / f"step_{step:08d}"
        name = f"rank_{self.rank:05d}"
        facts = {
            "step": step,
            "pack_ids": list(pack_ids),
            "loss_sum": loss_sum,
            "grad_norm": grad_norm,
        }
        tensors = {
            f"{column}_{number}": vars(batch)[column].cpu().contiguous().clone()
            for number, batch in enumerate(batches)
            for column in ("input_ids", "labels", "position_ids", "cu_seqlens")
        }
        try:
            where.mkdir(parents=True, exist_ok=True)
            (where / f"{name}.json").write_text(json_line(facts))
            save_file(tensors, where / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            self.say(f"WARNING: {where} cannot be written: {error}")
        packs = listed(pack_ids)
        what = f"step {step}: the loss or the gradient is not finite (gradient norm {grad_norm})"
        if self.in_a_row > self.max_in_a_row:
            raise RunStoppedError(
                f"{what}, {counted(self.in_a_row, 'time')} in a row: the run stops; "
                f"training.max_nonfinite_steps={self.max_in_a_row} are skipped. The packs {packs} "
                f"are dumped in {where}; no checkpoint was written since the last good step. Look "
                "at the data, lower optimizer.lr, or raise the warm-up."
            )
        self.say(f"{step:7d}  WARNING: {what}: not applied; packs {packs}, dumped in {where}")
