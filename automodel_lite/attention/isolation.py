"""The isolation probe: at start-up, do the documents of a pack see each other?

A list of known families cannot keep up with transformers. One forward of 96 tokens finds what no
list does: layers that mix tokens besides attention (Mamba, convolutions), families that drop the
arguments, positions taken from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from automodel_lite.attention.spec import (
    UNPACKED,
)
from automodel_lite.errors import ConfigError
from automodel_lite.thd import (
    ThdBatch,
    stream_of,
)

DOCUMENT_TOKENS = 16
_TOLERANCE_STD = 1e-2

_ROUNDED_TOLERANCE_STD = 0.2
"""In standard deviations of the logits, in fp32 and below it. Documents that see each other change
them by 1 to 7; in bf16, an exact mixture of experts changes them by 0.1, where other documents give
its experts groups of another size.
"""

Logits = Callable[[ThdBatch], Tensor]
"""[T, V] of a stream, from a model that may be spread over ranks: then all of them call it."""


@torch.no_grad()
def check_packing_isolation(
    model: nn.Module, device: torch.device | str = "cpu", logits: Logits | None = None
) -> None:
    """Runs `second | first | second | changed | second | second, another end | a tree` once.

    Neither what stands before it nor its place may change the logits of `second`, nor may its last
    token change those before, nor a branch those of another.

        the tree   second[:8] + first[:8], and from the last token that it shares, second[7:]

    logits   how a model that is spread over ranks is called (by all of them); None = directly
    Raises ConfigError when logits change by more than `tolerance_std`.
    """
    vocab = len(model.get_input_embeddings().weight)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(
        min(3, vocab - 1), vocab, (2, DOCUMENT_TOKENS), generator=generator
    )
    logits = logits or model_logits(model)
    was_training = model.training
    model.eval()
    try:
        ending = torch.cat([second[:-1], first[:1]])
        half = DOCUMENT_TOKENS // 2
        tree = torch.cat([second[:half], first[:half], second[half - 1 :]])
        whole = torch.arange(DOCUMENT_TOKENS)
        stream = [second, first, second, first.flip(0), second, ending, tree]
        branched = {len(stream) - 1: torch.cat([whole, whole[half - 1 :]])}
        result_TV = logits(stream_of(stream, device, branched))
        if not result_TV.isfinite().all():
            raise ConfigError(
                f"{type(model).__name__}: its logits are not finite, though loaded weights are: a "
                "sum overflows, set training.precision=fp32, or check the weights."
            )
    finally:
        model.train(was_training)
    alone, _, packed, _, last, of_ending, _, *branch = result_TV.float().split(DOCUMENT_TOKENS)

    def deviation_std(one: Tensor, other: Tensor) -> float:
        """In standard deviations; NaN, where the logits are all alike, is never small."""
        return float((one - other).abs().max() / packed.std())

    limit = tolerance_std(result_TV.dtype)
    among = max(deviation_std(packed, alone), deviation_std(packed, last))
    if not among < limit:
        problem = (
            "lets documents of a pack see each other, or their logits depend on their place in "
            f"the pack (the logits of one differ by {among:.1e} standard deviations behind others)"
        )
    elif not deviation_std(last[:-1], of_ending[:-1]) < limit:
        problem = "is not causal: a token moves the logits of those before it"
    elif not deviation_std(torch.cat(branch), packed[half - 1 :]) < limit:
        problem = "lets branches of a tree of documents see each other, though documents do not"
    else:
        return
    raise ConfigError(f"{type(model).__name__} {problem}. {UNPACKED.capitalize()}.")


def tolerance_std(dtype: torch.dtype) -> float:
    """How much logits of this dtype may differ where they should be equal."""
    return _TOLERANCE_STD if dtype == torch.float32 else _ROUNDED_TOLERANCE_STD


def model_logits(model: nn.Module) -> Logits:
    """Of a Hugging Face model that is called directly."""
    return lambda batch: model(**batch.model_inputs()).logits[0]
