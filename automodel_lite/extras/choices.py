"""The experts that each token chose in a step, recorded, and chosen again in another step.

In bf16 a router chooses otherwise near ties, and a token that went to another expert differs by
more than all rounding. With the choices of the fp32 step, what is compared is rounding alone.
Routers are of many forms; all of them choose by `torch.topk`, whose indices are recorded in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from automodel_lite.models.loss import document_of_tokens
from automodel_lite.models.settings import experts_per_token, number_of_experts
from automodel_lite.thd import ThdBatch


class Choices(TorchFunctionMode):
    """While entered, records what `torch.topk` chooses; or chooses as `pinned` did, a step of the
    same micro-batches in the same order, of values that have gradients as ever.
    """

    def __init__(self, pinned: Choices | None = None) -> None:
        super().__init__()
        self.pinned = pinned
        # of each call: the indices, and among how many
        self.made: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        scores: Tensor = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        if self.pinned is not None:
            indices, _ = self.pinned.made[len(self.made)]
            assert indices.shape == found.indices.shape
            found = torch.return_types.topk((scores.gather(dim, indices), indices))
        self.made.append((found.indices, scores.shape[dim]))
        return found

    def of_experts(self, config: PretrainedConfig) -> list[Tensor]:
        """Returns the experts that each token chose, [T, K] of each layer and micro-batch; not the
        groups of experts, or the keys, that families choose among as well.
        """
        text = config.get_text_config()
        wanted = (number_of_experts(text), experts_per_token(text))
        return [x.flatten(0, -2) for x, among in self.made if (among, x.shape[-1]) == wanted]


def differing_frac(
    got: Choices, want: Choices, config: PretrainedConfig, batches: Sequence[ThdBatch]
) -> float | None:
    """Returns the share of (token, layer) whose sets of experts differ; None for a model that
    chooses none. Padding does not count.
    """
    pairs = list(zip(got.of_experts(config), want.of_experts(config), strict=True))
    if not pairs:
        return None
    per_batch = len(pairs) // len(batches)
    differing = 0
    total = 0
    for number, (one_TK, other_TK) in enumerate(pairs):
        batch = batches[number // per_batch]
        document_T, within_T = document_of_tokens(batch)
        is_real_T = (within_T < batch.cu_seqlens.diff()[document_T]).to(one_TK.device)
        differs_T = (one_TK.sort(-1).values != other_TK.sort(-1).values).any(-1)
        if len(differs_T) == len(is_real_T):  # elsewhere documents run as rows
            differs_T = differs_T[is_real_T]
        differing += int(differs_T.sum())
        total += len(differs_T)
    return differing / total
