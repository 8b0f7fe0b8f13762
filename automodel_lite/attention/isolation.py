"""The isolation probe: at start-up, do the documents of a pack see each other?

A list of known families cannot keep up with transformers. One forward of 121 tokens finds what no
list does: layers that mix tokens besides attention (Mamba, convolutions), families that drop the
arguments, positions taken from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
TRIALS = 3
"""With other tokens each: what sees other documents does so in all of them. Rounding that a router
near a tie makes as large does not.
"""
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
    model: nn.Module,
    device: torch.device | str = "cpu",
    logits: Logits | None = None,
    gather: Callable[[str], list[str]] = lambda own: [own],
) -> None:
    """Runs `second | first | second | changed | second | second, another end | a tree` once, and
    again with other tokens where logits change by more than `tolerance_std`.

    Neither what stands before it nor its place may change the logits of `second`, nor may its last
    token change those before, nor a branch those of another.

        the tree   second[:8] + first[:8], and from the last token that it shares, second[7:]

    logits   how a model that is spread over ranks is called (by all of them); None = directly
    gather   what each of them has found, so that all go on or none
    Raises ConfigError when logits change in every trial.
    """
    logits = logits or model_logits(model)
    problem = ""
    for first, second in drawn_ids(model, TRIALS, 2, DOCUMENT_TOKENS):
        half = DOCUMENT_TOKENS // 2
        whole = torch.arange(DOCUMENT_TOKENS)
        ending = torch.cat([second[:-1], first[:1]])
        tree = torch.cat([second[:half], first[:half], second[half - 1 :]])
        stream = [second, first, second, first.flip(0), second, ending, tree]
        branched = {len(stream) - 1: torch.cat([whole, whole[half - 1 :]])}
        with evaluating(model):
            result_TV = logits(stream_of(stream, device, branched))
        problem = max(gather(_leak(result_TV)))
        if not problem:
            return
    raise ConfigError(f"{type(model).__name__} {problem}.")


def _leak(result_TV: Tensor) -> str:
    """Says what the logits of such a stream show; nothing, where they are as they should be."""
    if not result_TV.isfinite().all():
        return (
            "gives logits that are not finite, though loaded weights are: a sum overflows, set "
            "training.precision=fp32, or check the weights"
        )
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
    elif not deviation_std(torch.cat(branch), packed[DOCUMENT_TOKENS // 2 - 1 :]) < limit:
        problem = "lets branches of a tree of documents see each other, though documents do not"
    else:
        return ""
    return f"{problem}. {UNPACKED.capitalize()}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model has no dropout inside, and afterwards what it had."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def drawn_ids(model: nn.Module, *shape: int) -> Tensor:
    """Draws ids of `shape` from the model's tokens, the same in every call; none of the first few,
    which pad and end documents.
    """
    # the frozen weight comes first, where an adapter gives it trained rows
    vocab = len(next(model.get_input_embeddings().parameters()))  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(3, vocab - 1), vocab, shape, generator=generator)


def tolerance_std(dtype: torch.dtype) -> float:
    """How much logits of this dtype may differ where they should be equal."""
    return _TOLERANCE_STD if dtype == torch.float32 else _ROUNDED_TOLERANCE_STD


def model_logits(model: nn.Module) -> Logits:
    """Of a Hugging Face model that is called directly."""
    return lambda batch: model(**batch.model_inputs()).logits[0]
