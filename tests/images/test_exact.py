"""Packs with images against plain transformers: each document alone, with its own processor call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.models.layers import text_decoder
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import CausalLM
from automodel_lite.parts.images.tokens import ImageProcessor
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.settings import build_packer
from tests.attention.hybrids import InFloat64
from tests.images.families import FAMILIES, write_chats, write_model
from tests.runs import config_of

LOSS, GRADIENT = 1e-9, 1e-8


def images_settings(folder: Path) -> list[str]:
    return [
        "name=images",
        "dataset=images",
        f"dataset.path={folder}/chats.jsonl",
        f"model.pretrained={folder}",
    ]


def config_of_images(folder: Path, *more: str) -> Any:
    return config_of(
        "finetune",
        folder / "run",
        *images_settings(folder),
        "packed_sequence.packed_sequence_size=256",
        "training.global_batch_size=1",
        "training.max_steps=3",
        *more,
    )


def data_of(config: Any) -> Any:
    return prepare_data(config, check_sizes(config, 1), build_packer(config))


def batches_of(data: Any) -> list[ThdBatch]:
    """The micro-batches of an epoch, as workers and the feed make them."""
    packs = data.packs_of(0)
    return [to_thd(join_packs(packs.__getitems__([i]))) for i in range(len(packs))]


def plain_losses(folder: Path, model: Any) -> Tensor:
    """The summed loss of each document alone, from the chat template on by transformers' own code."""
    processor = ImageProcessor(str(folder), model.config).own
    total = torch.zeros(())
    for line in (folder / "chats.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        parts = [part for turn in messages for part in turn["content"]]
        images = [Image.open(folder / x["image"]) for x in parts if x["type"] == "image"]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        ids = inputs["input_ids"][0]
        starts, end = (
            processor.tokenizer.convert_tokens_to_ids(x) for x in ("<|assistant|>", "<|end|>")
        )
        labels, is_answer = torch.full_like(ids, -100), False
        for place, token in enumerate(ids.tolist()):
            if is_answer:
                labels[place - 1] = token
            is_answer = (is_answer or token == starts) and token != end
        logits = model(**inputs, use_cache=False).logits[0]
        total = total + F.cross_entropy(logits.float(), labels, reduction="sum")
    return total


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=[*FAMILIES, "glm_ocr"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    write_chats(made)
    return write_model(request.param, made)


def packed_model(folder: Path, data: Any) -> LossModel:
    lm = CausalLM(pretrained=str(folder), train_towers=True).build(data.tokenizer)
    install(lm, ReferenceAttention())
    return LossModel(lm.double(), FusedLinearCrossEntropy())


def test_a_pack_equals_its_documents(folder: Path) -> None:
    with InFloat64():
        plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
        plain = plain.double().train()
        want = plain_losses(folder, plain)
        expected = gradients(plain, want)
        data = data_of(config_of_images(folder))
        model = packed_model(folder, data)
        loss = sum(model(batch).sum for batch in batches_of(data))
        got = gradients(model.lm, loss)
    assert abs(loss.item() - want.item()) < LOSS * want.item()
    of_text = {f"{id(p)}" for p in text_decoder(model.lm).parameters()}
    assert any(f"{id(p)}" not in of_text for p in model.lm.parameters() if p.grad is not None)
    largest = max(float(x.abs().max()) for x in expected.values())
    for name in expected.keys() | got.keys():
        other = expected.get(name, torch.zeros(()))
        assert float((got.get(name, torch.zeros(())) - other).abs().max()) < GRADIENT * largest, (
            name
        )
