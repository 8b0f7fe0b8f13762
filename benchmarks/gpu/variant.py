"""One row of the table of step times: which model, which documents, and how they are held and computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.plan import read_table

SHAPES: dict[str, dict[str, Any]] = read_table()["shapes"]


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    shape: str
    pack: int
    micro: int = 1  # packs per step
    # packed (ours) | padded | sorted (padded) | position_ids | flex (transformers')
    attention: str = "packed"
    documents: str = "chat"
    loss: str = "fused"
    compiled: bool = False
    recompute: str = "none"
    # rank 8: attention | all-linear; empty = every weight is trained
    lora: str = ""
    weights: str = "fp32"  # bf16: no masters, moments in bf16, too
    moments: str = ""  # of the optimizer, fp32, bf16 or 8bit; empty = as the weights
    computes: str = "bf16"  # on CUDA; fp32 computes in fp32
    micro_steps: int = 1  # forwards an optimizer step
    steps: int = 8  # a repeat
    repeats: int = 3
    warmup: int = 4
