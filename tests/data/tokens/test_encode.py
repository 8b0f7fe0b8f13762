"""The quick way to the mask agrees with the tokenizer's own offsets, on any text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.reading.documents import ToyChat
from automodel_lite.data.tokens.encode import ChatRenderer, Encoder, Rendering
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from tests.data.templates import FAMILIES, MISTRAL, byte_tokenizer

WORDS = ["Hi", " ", "\n", "é", "🙂", "a b", "<|end|>", "<|user|>", "<|", "end", "", "[INST]", "</s>"]


def agree(encoder: Encoder, renderings: list[Rendering]) -> bool:
    """Whether both ways give the same; True is returned where the quick one could be taken."""
    quick, slow = encoder.encode(renderings), encoder._encode_by_offsets(renderings)
    assert quick.input_ids.tolist() == slow.input_ids.tolist()
    assert quick.trained.tolist() == slow.trained.tolist()
    assert quick.lengths.tolist() == slow.lengths.tolist()
    return bool(encoder._specials) and all(encoder._edges_are_special(rendering) for rendering in renderings)


@pytest.mark.parametrize(
    ("family", "is_quick"), [("marked", True), ("mistral", True), ("gpt_oss", False), ("qwen3", False)]
)
@settings(deadline=None, max_examples=60)
@given(contents=st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map("".join), min_size=2, max_size=2))
def test_both_ways_agree(family: str, is_quick: bool, contents: list[str]) -> None:
    tokenizer = byte_tokenizer(FAMILIES[family])
    question, answer = contents
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    renderings = ChatRenderer(tokenizer, "assistant").renderings(chat)
    assert agree(Encoder(tokenizer), renderings * 2) == is_quick


def test_both_ways_agree_on_merged_tokens(tmp_path) -> None:
    documents = ToyChat(num_chats=200)
    tokenizer = train_bpe_tokenizer(documents, 384, cache_dir=tmp_path)
    renderer = ChatRenderer(tokenizer, "assistant")
    renderings = [
        rendering for chat in documents.train.documents for rendering in renderer.renderings(chat["messages"])
    ]
    assert agree(Encoder(tokenizer), renderings)


def test_a_text_without_special_tokens_and_an_empty_one() -> None:
    encoder = Encoder(byte_tokenizer(MISTRAL))
    renderings = [Rendering("abc", ((0, 3),)), Rendering("", ()), Rendering("abc", ((1, 2),))]
    assert encoder.encode(renderings).trained.tolist() == [True] * 3 + [False, True, False]


def test_no_renderings() -> None:
    assert len(Encoder(byte_tokenizer(MISTRAL)).encode([]).lengths) == 0


def test_truncation_that_a_tokenizer_brings_along_is_taken_off() -> None:
    tokenizer = byte_tokenizer(MISTRAL)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding()
    encoded = Encoder(tokenizer).encode([Rendering("abcdef", ((0, 6),)), Rendering("a", ((0, 1),))])
    assert np.array_equal(encoded.lengths, [6, 1])
