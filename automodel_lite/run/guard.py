"""Steps whose loss or gradient is not finite: dumped, skipped, and the end of the run when there are too many in a row.

bad_steps/step_00000017/
    rank_00000.json           step, packs of the whole step, this rank's loss, the gradient's norm
    rank_00000.safetensors    this rank's micro-batches: input_ids_0, labels_0, position_ids_0, cu_seqlens_0 ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from automodel_lite.errors import RunStoppedError
from automodel_lite.thd import ThdBatch


def is_bad(loss_sum: Tensor, grad_norm: Tensor) -> bool:
    """Is either of them NaN or infinite? Waits for the device, once."""
    return not bool(torch.isfinite(loss_sum) & torch.isfinite(grad_norm))


@dataclass
class BadSteps:
    """Counts the bad steps in a row. Every rank calls every method; all agree on which steps are bad."""

    folder: Path
    max_in_a_row: int
    rank: int
    say: Callable[[str], None]
    in_a_row: int = 0

    def good(self) -> None:
        self.in_a_row = 0

    def bad(
        self, step: int, pack_ids: Sequence[int], batches: Sequence[ThdBatch], loss_sum: Tensor, grad_norm: Tensor
    ) -> None:
        """Dumps the step; raises RunStoppedError when it is one too many in a row."""
        self.in_a_row += 1
        where = self.folder / f"step_{step:08d}"
        loss, norm = loss_sum.item(), grad_norm.item()
        try:
            _dump(where, self.rank, {"step": step, "pack_ids": list(pack_ids), "loss_sum": loss, "grad_norm": norm})
            _dump_batches(where, self.rank, batches)
        except (OSError, SafetensorError) as error:
            self.say(f"WARNING: {where} cannot be written: {error}")
        what = f"step {step}: the loss or the gradient is not finite (gradient norm {norm})"
        if self.in_a_row > self.max_in_a_row:
            raise RunStoppedError(
                f"{what}, the {_ordinal(self.in_a_row)} time in a row: the run stops; training.max_bad_steps="
                f"{self.max_in_a_row} are skipped. The packs {_first_few(pack_ids)} are dumped in {where}; no "
                "checkpoint was written since the last good step. Look at the data, lower optimizer.lr, or raise the "
                "warm-up."
            )
        self.say(f"{step:7d}  WARNING: {what}: not applied; packs {_first_few(pack_ids)}, dumped in {where}")


def _dump(where: Path, rank: int, facts: dict[str, object]) -> None:
    where.mkdir(parents=True, exist_ok=True)
    safe = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
    (where / f"rank_{rank:05d}.json").write_text(json.dumps(safe) + "\n")


def _dump_batches(where: Path, rank: int, batches: Sequence[ThdBatch]) -> None:
    tensors = {}
    for number, batch in enumerate(batches):
        for name in ("input_ids", "labels", "position_ids", "cu_seqlens"):
            tensors[f"{name}_{number}"] = vars(batch)[name].cpu().contiguous().clone()
    save_file(tensors, where / f"rank_{rank:05d}.safetensors")


def _first_few(pack_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pack_ids[:8]))
    return f"{shown} and {len(pack_ids) - 8} more" if len(pack_ids) > 8 else shown


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
