"""Tokenizers: trained on good rows in bounded time, or those of a model."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from automodel_lite.config.schema import Config
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from automodel_lite.data.tokens.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    padding_id,
    train_bpe_tokenizer,
)
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import model_class
from automodel_lite.parts.datasets.toy_chat import ToyChat
from benchmarks.tiny_models import tiny_config
from tests.data.templates import MARKED, byte_tokenizer
from tests.data.tokens.given import HELLO, HI, chats

_ = -100


USER, ASSISTANT, END = 256, 257, 260  # ids of the special tokens of MARKED


def test_the_template_of_a_processor_is_that_of_a_tokenizer_without_one(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MARKED)
    template = tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "processor_config.json").write_text("{}")
    assert load_tokenizer(str(tmp_path)).chat_template == template


def test_a_padding_token_that_is_the_end_token_is_trained(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.pad_token = tokenizer.eos_token
    rows = tokenize_documents(chats([HI, HELLO]), TokenizeJob(tokenizer), tmp_path).train
    assert rows[0]["labels"].tolist()[-2:] == [END, _]
    assert padding_id(tokenizer) == END


def test_packs_are_not_filled_up_with_the_row_that_new_models_leave_at_zero() -> None:
    """Gemma 3n's gradients were not finite beside a document of padding: it divides by the deviation of its states."""
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(USER)
    config = tiny_config("gemma3n_text")
    config.vocab_size = config.vocab_size_per_layer_input = len(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    config.activation_sparsity_pattern = [0.5] * config.num_hidden_layers
    lm = model_class(config).from_config(config)
    lm(input_ids=torch.tensor([2 * [padding_id(tokenizer)]])).logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in lm.parameters() if p.grad is not None)


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    """The ids of a small tokenizer fit into any model, and were once trained in silence."""
    byte_tokenizer(MARKED).save_pretrained(tmp_path / "model")
    config = Config(
        dataset={"_target_": "automodel_lite.parts.datasets.toy_chat.ToyChat", "num_chats": 20},
        tokenizer={
            "_target_": "automodel_lite.data.tokens.tokenizer.train_bpe_tokenizer",
            "vocab_size": 300,
        },
        model={"pretrained": str(tmp_path / "model")},
        cache_dir=str(tmp_path),
    )
    with pytest.raises(
        ConfigError,
        match=r"tokenizer is not that of model.pretrained=.*tokens have another id or none",
    ):
        job_of(config, ToyChat(num_chats=20))
    more = byte_tokenizer(MARKED)
    more.add_tokens(["<one>"])
    check_vocabulary(str(tmp_path / "model"), more)
    check_vocabulary(str(tmp_path), more)  # no tokenizer there


ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}


LINE = json.dumps(ROW).encode() + b"\n"


def test_a_model_from_scratch_brings_no_tokenizer() -> None:
    """`tokenizer=pretrained` takes that of `model.pretrained`, and there is none."""
    with pytest.raises(ConfigError, match="choose tokenizer=bpe"):
        load_tokenizer(None)


def test_a_tokenizer_is_trained_on_the_good_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"broken\n" + LINE)
    assert len(train_bpe_tokenizer(FilesDataset(str(path)), 262)) == 262


def test_a_tokenizer_is_trained_on_a_word_of_a_million_letters(tmp_path: Path) -> None:
    """The trainer's time grows with the square of a word: this one took half an hour."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 1_000_000}) + "\n")
    documents = FilesDataset(str(tmp_path / "a.jsonl"))
    start = time.monotonic()
    assert "xx" in train_bpe_tokenizer(documents, 270).get_vocab()
    assert time.monotonic() - start < 200
