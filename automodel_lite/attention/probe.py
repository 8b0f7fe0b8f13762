"""The start-up check that documents of a pack do not see each other.

A list of known families cannot keep up with transformers. One forward of 32 tokens finds what no list does: layers
that mix tokens besides attention (Mamba, convolutions), families that drop the arguments, positions taken from
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_lite.attention.kernel import UNPACKED
from automodel_lite.errors import ConfigError
from automodel_lite.thd import AttentionPlan, MixerPlan, ThdBatch, document_rows

DOCUMENT_TOKENS = 16
_TOLERANCE_STD, _ROUNDED_TOLERANCE_STD = 1e-2, 0.2
"""In standard deviations of the logits, in fp32 and below it. Documents that see each other move them by 1 to 7; in
bf16, an exact mixture of experts moves them by 0.1, where other documents give its experts groups of another size.
"""


Logits = Callable[[ThdBatch], Tensor]
"""[T, V] of a stream, from a model that may be spread over ranks: then all of them call it."""


@torch.no_grad()
def check_packing_isolation(model: nn.Module, device: torch.device | str = "cpu", logits: Logits | None = None) -> None:
    """One forward of `second | first | second | changed | second | second with another end`: neither what stands before
    it nor its place may move the logits of `second`, nor its last token those before. Where the former move, a second
    forward tells which of the two it is.

    logits   how a model that is spread over ranks is called (by all of them); None = directly
    Raises ConfigError when logits move by more than `tolerance_std`.
    """
    vocab = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(min(3, vocab - 1), vocab, (2, DOCUMENT_TOKENS), generator=generator)
    logits = logits or logits_of(model)
    was_training = model.training
    model.eval()
    try:
        ending = torch.cat([second[:-1], first[:1]])
        stream = [second, first, second, first.flip(0), second, ending]
        result_TV = logits(stream_of(torch.stack(stream), device))
        if not torch.isfinite(result_TV).all():
            raise ConfigError(f"{type(model).__name__}: its logits are not finite: {_why_not_finite(model)}")
        alone, _, packed, _, last, of_ending = result_TV.float().split(DOCUMENT_TOKENS)
        scale, limit = packed.std(), tolerance_std(result_TV.dtype)
        moved = max((packed - other).abs().max() / scale for other in (alone, last))
        if moved < limit:
            if not (last - of_ending)[:-1].abs().max() / scale < limit:
                raise ConfigError(
                    f"{type(model).__name__} is not causal: a token moves the logits of those before it. "
                    f"{UNPACKED.capitalize()}."
                )
            return
        stream[1] = first.flip(0)
        changed = logits(stream_of(torch.stack(stream), device)).float().split(DOCUMENT_TOKENS)[2]
    finally:
        model.train(was_training)
    if not (packed - changed).abs().max() / scale < limit:
        raise ConfigError(
            f"{type(model).__name__}: documents of a pack see each other (changing one moves the logits of the next "
            f"by {moved:.1e} standard deviations): {UNPACKED}."
        )
    raise ConfigError(
        f"{type(model).__name__}: the logits of a document depend on its place in the pack (by {moved:.1e} "
        f"standard deviations): {UNPACKED}."
    )


def _why_not_finite(model: nn.Module) -> str:
    """The first weight that holds inf or NaN, on this rank."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.is_floating_point() and not torch.isfinite(local).all():
            return f"the loaded weight {name} holds inf or NaN. Fetch the weights again, or take those of another step."
    return "a sum overflows though this rank's weights are finite. Set training.precision=fp32, or check the weights."


def tolerance_std(dtype: torch.dtype) -> float:
    """How far logits of this dtype may move where nothing should move them."""
    return _TOLERANCE_STD if dtype == torch.float32 else _ROUNDED_TOLERANCE_STD


def stream_of(documents: Tensor, device: torch.device | str) -> ThdBatch:
    """Documents of one length, int64 [N, L] -> the unpadded stream of them; its labels are the ids themselves."""
    num_documents, length = documents.shape
    cu = torch.arange(0, documents.numel() + 1, length, dtype=torch.int32)
    batch = ThdBatch(
        input_ids=documents.flatten(),
        labels=documents.flatten(),
        position_ids=torch.arange(length).repeat(num_documents),
        label_rows=torch.arange(documents.numel()),
        cu_seqlens=cu,
        cu_seqlens_padded=cu,
        max_seqlen=length,
        num_tokens=documents.numel(),
        num_label_tokens=documents.numel(),
        attention=AttentionPlan(cu, cu, length, length),
        mixers=MixerPlan(document_rows(cu)),
    )
    return batch.to(device)


def logits_of(model: nn.Module) -> Logits:
    """Of a Hugging Face model that is called directly."""
    return lambda batch: model(**batch.model_inputs()).logits[0]  # type: ignore[no-any-return]
