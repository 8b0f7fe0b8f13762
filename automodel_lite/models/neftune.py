"""NEFTune (arXiv:2310.05914): noise on the embeddings of tokens in training, uniform within
alpha / sqrt(L * C) of 0.

The noise of a token follows from the step, what its document says and where it stands in it. So it
is the same in every pack, micro-batch and layout of ranks, and a resumed run draws it again.

Legend: T tokens of the stream (of this rank), C model dim, L tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from automodel_lite.tensors import hash32
from automodel_lite.thd import ThdBatch

KEY = "noise_key"
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_ROWS = 1024  # tokens at a time: integers of a whole stream would take as much as a layer


class EmbeddingNoise:
    """Adds noise behind the embedding of a model that is trained.

    seed  of the step
    """

    def __init__(self, alpha: float, lm: transformers.PreTrainedModel) -> None:
        self.alpha = alpha
        self.seed = 0
        self._batch: ThdBatch | None = None
        embedding: Any = lm.get_input_embeddings()
        embedding.register_forward_hook(self._add)

    @contextmanager
    def of(self, batch: ThdBatch) -> Iterator[None]:
        """Adds the noise of `batch` inside; a model is asked outside, too, without any."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def _add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self._batch is None:
            return output
        noise_TC = noise_of(self._batch, self.alpha, self.seed, output.shape[-1])
        return output + noise_TC.to(output.dtype).view_as(output)


def with_keys(batch: ThdBatch) -> ThdBatch:
    """Returns a whole stream with the column of keys that the noise of its tokens follows from."""
    ids_T = batch.input_ids.numpy().astype(np.uint64)
    begins = batch.cu_seqlens_padded.numpy().astype(np.int64)
    slots = np.diff(begins)
    lengths = np.diff(batch.cu_seqlens.numpy())
    places_T = (np.arange(len(ids_T)) - begins[:-1].repeat(slots)).astype(np.uint64)
    is_real_T = places_T < lengths.astype(np.uint64).repeat(slots)
    # A document's key sums over its tokens what mixes id and place; sums wrap, as differences do.
    mixed_T = _mixed(ids_T * _ODD + places_T) * is_real_T
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed_T, dtype=np.uint64)])
    documents_N = sums[begins[1:]] - sums[begins[:-1]]
    keys_T = _mixed(documents_N.repeat(slots) + places_T * _ODD) >> np.uint64(32)
    column = torch.from_numpy(keys_T.astype(np.uint32).view(np.int32))
    return replace(batch, columns=batch.columns | {KEY: column})


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _MIX
    mixed: np.ndarray = values ^ (values >> np.uint64(27))
    return mixed


def noise_of(batch: ThdBatch, alpha: float, seed: int, dim: int) -> Tensor:
    """Returns the noise of this rank's tokens, fp32 [T, dim]."""
    keys_T = batch.columns[KEY]
    device = keys_T.device
    channels_C = hash32(torch.arange(dim, dtype=torch.int32, device=device) + seed % 2**30)
    parts = [torch.zeros(0, dim, device=device)]
    for keys in keys_T.split(_ROWS):
        bits = hash32(keys[:, None] ^ channels_C) & 0xFFFFFF
        parts.append(bits.float() / 2**23 - 1)
    scales_T = alpha / (batch.document_lens.clamp(min=1) * dim).float().sqrt()
    return torch.cat(parts) * scales_T[:, None]
