"""Documents of any kind to samples: text to tokenise and the stretches of it that are trained on.

Samples to token ids and the mask of what is trained on: one call of the fast tokenizer for many samples.

A token is trained on when it holds a character of a trained span. Which tokens these are, the tokenizer says (its
offsets); but where all spans begin and end beside special tokens, as in `<|user|>Hi<|end|><|assistant|>Hello<|end|>`,
the special tokens in the text are counted against those among the ids. Without offsets the tokenizer is a sixth faster.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from automodel_lite.data.chat import ChatRenderer, Sample, Span, TrainOn, no_template
from automodel_lite.data.documents import Document
from automodel_lite.errors import ConfigError


class SampleRenderer:
    """Renders normalised documents.

    Chats go through the chat template. A prompt and its completion do too, as a user's and an assistant's turn, when
    the tokenizer has a template; without one they become `prompt completion <eos>`, with a line break between them
    where neither brings white space. Plain text becomes `<bos> text <eos>`, the BOS only for tokenizers that add one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, train_on: TrainOn, template_kwargs: dict[str, Any]):
        self._train_on = train_on
        has_template = tokenizer.chat_template is not None
        self._chat = ChatRenderer(tokenizer, train_on, template_kwargs) if has_template else None
        self._no_template = no_template(tokenizer)
        self._bos, self._eos = _text_frame(tokenizer)
        stop_tokens = [*self._chat.stop_tokens] if self._chat is not None else []
        stop_tokens += [self._eos] if self._eos else []
        self.stop_ids = frozenset(tokenizer.get_vocab()[token] for token in stop_tokens)

    def samples(self, document: Document) -> list[Sample]:
        """The samples of one document; more than one for a chat whose template rewrites earlier turns.

        Raises:
            DataError: the document cannot be rendered (says why, not where).
        """
        if "messages" in document:
            return self._need_chat().samples(document["messages"], document.get("tools"))
        if "completion" in document:
            return [self._prompt_completion(document)]
        return [self._text(document["text"])]

    def _need_chat(self) -> ChatRenderer:
        if self._chat is None:
            raise ConfigError(f"the data are chats, and {self._no_template}")
        return self._chat

    def _prompt_completion(self, document: Document) -> Sample:
        prompt, completion = document["prompt"], document["completion"]
        if self._chat is not None:
            system = [{"role": "system", "content": document["system"]}] if document.get("system") else []
            user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}
            return self._chat.samples([*system, user, assistant])[0]
        if document.get("system"):
            prompt = f"{document['system']}\n{prompt}"
        glue = "" if not prompt or prompt[-1].isspace() or completion[:1].isspace() else "\n"
        before = f"{self._frame_start(prompt)}{prompt}{glue}"
        text = f"{before}{completion}{self._frame_end(completion)}"
        return Sample(text, ((0 if self._train_on == "all" else len(before), len(text)),))

    def _text(self, text: str) -> Sample:
        if not text:
            return Sample("", ())
        whole = f"{self._frame_start(text)}{text}{self._frame_end(text)}"
        return Sample(whole, ((0, len(whole)),))

    def _frame_start(self, text: str) -> str:
        return "" if self._bos and text.startswith(self._bos) else self._bos

    def _frame_end(self, text: str) -> str:
        if not self._eos:
            raise ConfigError("the tokenizer has no eos_token, so a model would never learn to stop: give it one.")
        return "" if text.endswith(self._eos) else self._eos


def _text_frame(tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """The BOS token if the tokenizer puts one before plain text, else "", and the end token."""
    first = tokenizer("a")["input_ids"][:1]
    adds_bos = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if adds_bos else "", str(tokenizer.eos_token or "")


@dataclass(frozen=True)
class Encoded:
    """Documents end to end: `input_ids` int32 [total], `trained` bool [total], `lengths` int64 [N]."""

    input_ids: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray


class Encoder:
    """Tokenises samples as they are; no special tokens are added: a template has brought its own.

    Works on a copy of the tokenizer's Rust part, without the truncation and padding that some hub tokenizers save.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        added = tokenizer.added_tokens_decoder
        self._is_special = np.zeros(max([len(tokenizer), *added]) + 1, bool)
        self._is_special[list(added)] = True
        plain = all(not (t.lstrip or t.rstrip or t.single_word or t.normalized) for t in added.values())
        self._specials = tuple(sorted((t.content for t in added.values()), key=len, reverse=True)) if plain else ()
        self._pattern = re.compile("|".join(map(re.escape, self._specials)))

    def encode(self, samples: Sequence[Sample]) -> Encoded:
        """Tokenises the samples, in their order."""
        if self._specials and all(self._edges_are_special(sample) for sample in samples):
            return self._encode_by_specials(samples)
        return self._encode_by_offsets(samples)

    def _edges_are_special(self, sample: Sample) -> bool:
        text, size = sample.text, len(sample.text)
        return all(
            edge in (0, size) or text.endswith(self._specials, 0, edge) for span in sample.spans for edge in span
        )

    def _encode_by_specials(self, samples: Sequence[Sample]) -> Encoded:
        texts = [sample.text for sample in samples]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        input_ids, starts, lengths = _flat_ids(encodings)
        trained = np.zeros(len(input_ids), bool)
        special_at = np.flatnonzero(self._is_special[input_ids])
        bounds = np.searchsorted(special_at, starts).tolist()
        for number, sample in enumerate(samples):
            ends = [found.end() for found in self._pattern.finditer(sample.text)]
            first, last = bounds[number], bounds[number + 1]
            if len(ends) != last - first:  # the tokenizer sees other special tokens in the text: ask for its offsets
                return self._encode_by_offsets(samples)
            for start, stop in sample.spans:
                begin = special_at[first + bisect_right(ends, start) - 1] + 1 if start else starts[number]
                end = special_at[first + bisect_right(ends, stop) - 1] + 1 if stop < len(sample.text) else None
                trained[begin : starts[number + 1] if end is None else end] = True
        return Encoded(input_ids, trained, lengths)

    def _encode_by_offsets(self, samples: Sequence[Sample]) -> Encoded:
        encodings = self.backend.encode_batch([sample.text for sample in samples], add_special_tokens=False)
        input_ids, starts, lengths = _flat_ids(encodings)
        trained = np.zeros(len(input_ids), bool)
        for sample, encoding, start in zip(samples, encodings, starts.tolist()):
            for span in sample.spans:
                first, last = token_span(encoding, span, len(sample.text))
                trained[start + first : start + last] = True
        return Encoded(input_ids, trained, lengths)


def _flat_ids(encodings: Sequence[Encoding]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """input_ids int32 [total], where each document starts int64 [N + 1], lengths int64 [N]."""
    lengths = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    input_ids = np.empty(starts[-1], np.int32)
    for encoding, start, stop in zip(encodings, starts[:-1].tolist(), starts[1:].tolist()):
        input_ids[start:stop] = encoding.ids
    return input_ids, starts, lengths


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
