"""Samples to token ids and the mask of what is trained on: one call of the fast tokenizer for many samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from automodel_lite.datasets.chat import Sample, Span


@dataclass(frozen=True)
class Encoded:
    """Documents end to end: `input_ids` int32 [total], `trained` bool [total], `lengths` int64 [N]."""

    input_ids: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray


def bare_backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the tokenizer's Rust part without the truncation and padding that some hub tokenizers save."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def encode(backend: Tokenizer, samples: Sequence[Sample]) -> Encoded:
    """Tokenises the samples as they are; a token is trained on when it holds a character of a trained span.

    No special tokens are added: a template has brought its own, and a second BOS would be trained on.
    """
    encodings = backend.encode_batch([sample.text for sample in samples], add_special_tokens=False)
    lengths = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    input_ids = np.empty(starts[-1], np.int32)
    trained = np.zeros(starts[-1], bool)
    for sample, encoding, start, length in zip(samples, encodings, starts.tolist(), lengths.tolist()):
        input_ids[start : start + length] = encoding.ids
        for span in sample.spans:
            first, last = token_span(encoding, span, len(sample.text))
            trained[start + first : start + last] = True
    return Encoded(input_ids, trained, lengths)


def token_span(encoding: Encoding, span: Span, num_chars: int) -> tuple[int, int]:
    """The tokens [first, last) that hold at least one character of `span`.

    `char_to_token` answers in Rust; it does not know characters that no token holds (a leading space that the
    tokenizer trims off the offsets, text that a normaliser drops), for which all offsets are looked at.
    """
    start, stop = span
    if start >= stop:
        return 0, 0
    first = encoding.char_to_token(start)
    last = len(encoding) if stop >= num_chars else encoding.char_to_token(stop)
    if first is None or last is None:
        return _token_span_by_offsets(encoding, span)
    if stop < num_chars:
        chars = encoding.token_to_chars(last)
        last += chars is not None and chars[0] < stop  # a token across the end of the span
    return first, last


def _token_span_by_offsets(encoding: Encoding, span: Span) -> tuple[int, int]:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    holding = np.flatnonzero((offsets[:, 1] > span[0]) & (offsets[:, 0] < span[1]) & (offsets[:, 1] > offsets[:, 0]))
    return (int(holding[0]), int(holding[-1]) + 1) if len(holding) else (0, 0)
