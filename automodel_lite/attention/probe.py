"""The start-up check that documents of a pack do not see each other.

A list of known families cannot keep up with transformers. One forward of 32 tokens finds what no list does: layers
that mix tokens besides attention (Mamba, convolutions), families that drop the arguments, positions taken from
elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from automodel_lite.attention.spec import UNPACKED
from automodel_lite.document_rows import document_rows
from automodel_lite.errors import ConfigError
from automodel_lite.thd import AttentionPlan, MixerPlan, ThdBatch

DOCUMENT_TOKENS = 16
_TOLERANCE_STD, _ROUNDED_TOLERANCE_STD = 1e-2, 0.2
"""In standard deviations of the logits, in fp32 and below it. Documents that see each other move them by 1 to 7; in
bf16, an exact mixture of experts moves them by 0.1, where other documents give its experts groups of another size.
"""


@torch.no_grad()
def check_packing_isolation(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Changes the first of two packed documents: the logits of the second must not move.

    Then the second document alone must give the logits that it has inside of the pack.
    Raises ConfigError when either moves by more than `tolerance_std`.
    """
    vocab = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(min(3, vocab - 1), vocab, (2, DOCUMENT_TOKENS), generator=generator)
    was_training = model.training
    model.eval()
    try:
        packed = _logits_of_second(model, torch.stack([first, second]), device)
        changed = _logits_of_second(model, torch.stack([first.flip(0), second]), device)
        alone = _logits_of_second(model, second[None], device)
    finally:
        model.train(was_training)
    scale, limit = packed.float().std(), tolerance_std(packed.dtype)
    leak, place = ((packed.float() - other.float()).abs().max() / scale for other in (changed, alone))
    if not leak < limit:
        raise ConfigError(
            f"{type(model).__name__}: documents of a pack see each other (changing one moves the logits of the next "
            f"by {leak:.1e} standard deviations): {UNPACKED}."
        )
    if not place < limit:
        raise ConfigError(
            f"{type(model).__name__}: the logits of a document depend on its place in the pack (by {place:.1e} "
            f"standard deviations): {UNPACKED}."
        )


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


def _logits_of_second(model: nn.Module, documents: Tensor, device: torch.device | str) -> Tensor:
    """[L, V], of the last document."""
    logits: Tensor = model(**stream_of(documents, device).model_inputs()).logits[0, -documents.shape[1] :]
    return logits
