"""Counts the bytes that a layer of experts moves and keeps, forward and backward, by function of experts.

    python -m benchmarks.experts                      (Qwen3-30B-A3B, 8,192 tokens, bf16)
    python -m benchmarks.experts 16384

Counted on tensors without memory, uncompiled: each operation reads its arguments and writes its result once; of a look-up
only the rows that it takes. No time is measured.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from automodel_lite import compat
from automodel_lite.extras.plan.tracker import _FREE as FREE
from automodel_lite.models.experts import use_experts
from automodel_lite.models.reading import SHAPES

IMPLEMENTATIONS = ("grouped_mm", "sorted_mm")


class Count(compat.TorchDispatchMode):
    """Bytes by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FREE:
            read = args[1:] if name == "index" else args  # as many rows as are written
            times = 2 if name == "index" else 1
            self.moved[name] += sum(x.nbytes for x in tensors(read))
            self.moved[name] += times * sum(x.nbytes for x in tensors(result))
        return result


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [x for one in value for x in tensors(one)]
    return [value] if isinstance(value, Tensor) else []


def count(config: Any, num_tokens: int, implementation: str) -> tuple[Counter[str], int]:
    """Returns the bytes moved by each operation, and those kept for the backward pass."""
    use_experts(config, implementation)
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    experts = next(m for m in lm.modules() if type(m).__name__.endswith("Experts"))
    hidden = torch.empty(num_tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.empty(num_tokens, config.num_experts_per_tok, dtype=torch.int64)
    weights = torch.empty(chosen.shape, dtype=torch.bfloat16, requires_grad=True)
    own = {x.untyped_storage()._cdata for x in experts.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        # views of one storage count once, a weight not at all
        if x.untyped_storage()._cdata not in own:
            kept[x.untyped_storage()._cdata] = x
        return x

    with Count() as counted:
        with saved_tensors_hooks(keep, lambda x: x):
            out = experts(hidden, chosen, weights)
        out.backward(torch.empty_like(out))
    return counted.moved, sum(x.untyped_storage().nbytes() for x in kept.values())


def main(num_tokens: str = "8192") -> None:
    for implementation in IMPLEMENTATIONS:
        config = transformers.AutoConfig.from_pretrained(SHAPES / "Qwen--Qwen3-30B-A3B.json")
        config.num_hidden_layers = 1
        with compat.FakeTensorMode():
            moved, kept = count(config, int(num_tokens), implementation)
        print(f"{implementation}: {moved.total() / 1e9:.2f} GB moved, {kept / 1e9:.2f} GB kept")
        for name, size in moved.most_common():
            if size >= 1e7:
                print(f"    {name:24} {size / 1e9:6.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
