"""Rates that a card was measured to reach in a step, by which the planner predicts its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

# torch.compile makes few kernels of a layer and of the loss of a chunk: these shares of the bytes
# that their operations move one by one are left. Counted by inductor for Llama-3.2-1B: 40 of 170 GB
# of its layers with a residual stream in fp32, 31 of 130 in bf16; 4.3 of 29 GB of its logits.
COMPILED = {"layer": 0.24, "logits": 0.15}


@dataclass(frozen=True)
class MeasuredRates:
    """What one GPU does per second.

    product_flops    of products of the shapes that models have
    attention_flops  keys that a query sees -> FLOP/s beside the bytes that the kernel moves, rising
    bytes_per_s      read and written by everything else
    source           which card, and when
    """

    product_flops: float
    attention_flops: Mapping[float, float]
    bytes_per_s: float
    source: str

    def attention(self, visible: float) -> float:
        """Returns the FLOP/s for queries that see so many keys: between measured numbers on the
        line by the logarithm of the keys, beyond them the nearest one's.
        """
        keys = sorted(self.attention_flops)
        rates = [self.attention_flops[key] for key in keys]
        return float(np.interp(np.log(max(visible, 1.0)), np.log(keys), rates))


def read_rates(found: Mapping[str, Any]) -> MeasuredRates:
    """Reads a row of measured.yaml."""
    attention = {float(keys): float(rate) for keys, rate in found["attention_flops"].items()}
    return MeasuredRates(**{**found, "attention_flops": attention})


MEASURED = {
    gpu: read_rates(row)
    for gpu, row in yaml.safe_load(Path(__file__).with_name("measured.yaml").read_text()).items()
}
"""GPU, by the planner's name -> its rates."""
