"""The mask is what the tokenizer's offsets say, on any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chat import ChatRenderer
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.encode import Encoder
from automodel_lite.data.tokens.rendering import Rendering
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from automodel_lite.errors import DataError
from automodel_lite.parts.datasets.toy_chat import ToyChat
from tests.data.templates import FAMILIES, MARKED, MISTRAL, byte_tokenizer

WORDS = [
    "Hi",
    " ",
    "\n",
    "é",
    "🙂",
    "a b",
    "<|end|>",
    "<|user|>",
    "<|",
    "end",
    "",
    "[INST]",
    "</s>",
]


def check_mask(encoder: Encoder, renderings: list[Rendering]) -> None:
    """Tokens are trained on that hold a character of a span, looked for one by one."""
    columns, lengths = encoder.encode(renderings)
    encodings = [
        encoder.backend.encode(rendering.text, add_special_tokens=False) for rendering in renderings
    ]
    assert columns["input_ids"].tolist() == [i for encoding in encodings for i in encoding.ids]
    assert lengths.tolist() == [len(encoding) for encoding in encodings]
    want = []
    for rendering, encoding in zip(renderings, encodings):
        trained = [
            any(a < stop and b > start and a < b for start, stop in rendering.spans)
            for a, b in encoding.offsets
        ]
        targets = [
            i if is_trained else IGNORE_INDEX for i, is_trained in zip(encoding.ids, trained)
        ]
        want += [*targets[1:], IGNORE_INDEX] if targets else []
    assert columns["labels"].tolist() == want


@pytest.mark.parametrize("family", ["marked", "mistral", "gpt_oss", "qwen3"])
@settings(deadline=None, max_examples=60)
@given(
    contents=st.lists(
        st.lists(st.sampled_from(WORDS), max_size=6).map("".join), min_size=2, max_size=2
    )
)
def test_the_mask_of_a_chat(family: str, contents: list[str]) -> None:
    tokenizer = byte_tokenizer(FAMILIES[family])
    question, answer = contents
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    renderings = ChatRenderer(tokenizer, "assistant").renderings(chat)
    check_mask(Encoder(tokenizer), renderings * 2)


def test_the_mask_of_merged_tokens(tmp_path) -> None:
    documents = ToyChat(num_chats=200)
    tokenizer = train_bpe_tokenizer(documents, 384, cache_dir=tmp_path)
    renderer = ChatRenderer(tokenizer, "assistant")
    renderings = [
        rendering
        for chat in documents.train.rows
        for rendering in renderer.renderings(chat["messages"])
    ]
    check_mask(Encoder(tokenizer), renderings)


def test_a_text_without_special_tokens_and_an_empty_one() -> None:
    encoder = Encoder(byte_tokenizer(MISTRAL))
    renderings = [Rendering("abc", ((0, 3),)), Rendering("", ()), Rendering("abc", ((1, 2),))]
    columns, lengths = encoder.encode(renderings)
    assert (columns["labels"] != IGNORE_INDEX).tolist() == [True, True, False, True, False, False]
    assert lengths.tolist() == [3, 0, 3]


def test_no_renderings() -> None:
    assert len(Encoder(byte_tokenizer(MISTRAL)).encode([])[1]) == 0


def test_truncation_that_a_tokenizer_brings_along_is_taken_off() -> None:
    tokenizer = byte_tokenizer(MISTRAL)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding()
    _, lengths = Encoder(tokenizer).encode(
        [Rendering("abcdef", ((0, 6),)), Rendering("a", ((0, 1),))]
    )
    assert lengths.tolist() == [6, 1]


@pytest.mark.parametrize("key", ["rationale", "thoughts", "inner_thought", "cot", "reasoning_text"])
def test_thoughts_under_any_name_are_not_dropped(tmp_path: Path, key: str) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x", key: "because"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(
        DataError, match=f"a.jsonl:1: message 1 has {key} that the chat template does not write"
    ):
        tokenize_documents(
            FilesDataset(str(tmp_path / "a.jsonl")), TokenizeJob(byte_tokenizer(MARKED)), tmp_path
        )
