"""The package from Python: names that are imported when they are used, chats as rows, packs as a model's arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import automodel_lite
from automodel_lite import PackedDataset, Packer, hf_collater, install_attention, tokenize_chats
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.thd import AttentionOptions, Segments
from benchmarks.tiny_models import tiny_model
from tests.data.templates import MARKED, byte_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = byte_tokenizer(MARKED)
CHAT = [
    {"role": "user", "content": "What is the capital of Peru?"},
    {"role": "assistant", "content": "Lima."},
]


def test_the_public_names_are_there_and_lazy() -> None:
    for name in {*automodel_lite.__all__} - {"__version__"}:
        assert callable(getattr(automodel_lite, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'Packr'"):
        _ = automodel_lite.Packr
    code = "import automodel_lite, sys; dir(automodel_lite); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def trained(row: dict[str, Any]) -> str:
    return str(TOKENIZER.decode(row["labels"][row["labels"] != -100]))


def test_chats_become_rows_whose_labels_are_next() -> None:
    """A token a byte, and one for each role and end."""
    rows = tokenize_chats([CHAT, [*CHAT, *CHAT]], TOKENIZER)
    assert rows.lengths.tolist() == [1 + 28 + 1 + 1 + 5 + 1, 2 * 37]
    assert [trained(rows[number]) for number in (0, 1)] == [
        "Lima.<|end|>",
        "Lima.<|end|>Lima.<|end|>",
    ]
    assert rows[0]["labels"][30:36].tolist() == rows[0]["input_ids"][31:].tolist()
    everything = tokenize_chats([CHAT], TOKENIZER, train_on="all")[0]
    assert trained(everything) == TOKENIZER.decode(everything["input_ids"][1:])


def test_rows_of_a_file_are_chats_too_and_mistakes_are_sentences() -> None:
    rows = tokenize_chats([{"messages": CHAT}], TOKENIZER)
    assert trained(rows[0]) == "Lima.<|end|>"
    assert repr(rows) == "<TokenizedDocuments: 1 document, 37 tokens>"
    with pytest.raises(ConfigError, match="takes a list of chats, and got a message"):
        tokenize_chats(CHAT, TOKENIZER)
    with pytest.raises(ConfigError, match=r"train_on='assistent' .*did you mean assistant\?"):
        tokenize_chats([CHAT], TOKENIZER, train_on="assistent")


def test_chats_that_train_nothing_are_refused() -> None:
    with pytest.raises(DataError, match=r"^chats\[0\]: has no assistant message"):
        tokenize_chats([CHAT[:1]], TOKENIZER)


def packs_of(size: int, *chats: list[dict[str, str]]) -> PackedDataset:
    return Packer(packed_sequence_size=size).packs(tokenize_chats(chats, TOKENIZER))


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), **sizes))


def test_a_packed_document_sees_itself_alone() -> None:
    """The loss that transformers computes of the pack is the mean over the labels of both documents, each run alone."""
    model, packs = small_llama(), packs_of(120, CHAT, [*CHAT, *CHAT])
    rows = tokenize_chats([CHAT, [*CHAT, *CHAT]], TOKENIZER)
    alone = [
        {name: torch.as_tensor(values).long() for name, values in rows[number].items()}
        for number in (0, 1)
    ]
    losses = [
        cross_entropy(model(row["input_ids"][None]).logits[0], row["labels"], reduction="sum")
        for row in alone
    ]
    assert len(packs) == 1
    assert install_attention(model).startswith("reference")
    inputs = hf_collater([packs[0]])
    assert inputs["input_ids"].shape == inputs["labels"].shape == (1, 120)
    # they are shifted already, and are not a second time
    assert inputs["shift_labels"] is inputs["labels"]
    assert model(**inputs).loss.item() == pytest.approx(sum(losses).item() / 18, rel=1e-5)


class OneDocument(ReferenceAttention):
    """Takes the stream for one document."""

    name = "one_document"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions
    ) -> Tensor:
        ends = torch.tensor([0, len(q)], dtype=torch.int32)
        return super().__call__(q, k, v, Segments(ends, ends, len(q), len(q)), options)


def test_a_kernel_that_mixes_documents_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^LlamaForCausalLM lets documents of a pack see each other"
    ):
        install_attention(small_llama(), OneDocument())


def test_logits_in_fp32_of_a_model_in_bf16_are_as_exact_as_bf16() -> None:
    """Nemotron H casts its own, and was held to the rounding of fp32."""
    assert install_attention(tiny_model("nemotron_h").to(torch.bfloat16))


def test_trainers_move_the_documents_with_the_tokens() -> None:
    """Trainer's loader moves tensors, and whatever has a method `to`."""
    row = {name: torch.arange(6) for name in ("input_ids", "labels", "position_ids")}
    lens = {name: torch.tensor([4, 2]) for name in ("seq_lens", "seq_lens_padded")}
    packed = send_to_device(hf_collater([row | lens]), torch.device("meta"))["packed"]
    segments, stream = packed.attention.segments, packed.mixers.stream
    assert segments.cu_q is segments.cu_k
    assert [x.device.type for x in (segments.cu_q, stream.to_stream, stream.cu_host)] == [
        "meta",
        "meta",
        "cpu",
    ]


def test_train_from_python(tmp_path: Path) -> None:
    overrides = [
        f"output_dir={tmp_path}/run",
        f"cache_dir={tmp_path}/cache",
        "training.max_steps=1",
    ]
    folder = automodel_lite.train("smoke", *overrides, "checkpoint.export_hf=false")
    assert folder == tmp_path / "run"
    assert '"finished"' in (folder / "STATUS.json").read_text()


def test_a_mistake_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean training\.max_steps"):
        automodel_lite.train("smoke", f"output_dir={tmp_path}/run", "training.max_stepz=1")
    assert not (tmp_path / "run").exists()
