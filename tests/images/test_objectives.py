"""Preferences and distillation on packs with images, against plain transformers on each row alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from automodel_lite.models.loss import Loss
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.images.tokens import ImageProcessor
from automodel_lite.parts.losses.distillation import Distill, DistillTopK
from automodel_lite.parts.losses.preference import Dpo, OrPo, SimPo
from automodel_lite.thd import ThdBatch
from tests.attention.hybrids import InFloat64
from tests.images.families import draw, write_chats, write_model
from tests.images.test_exact import (
    GRADIENT,
    LOSS,
    batches_of,
    config_of_images,
    data_of,
    gradients,
    packed_model,
)
from tests.runs import config_of
from tests.tiers import only_in_ci

BETA = 0.3
FAMILIES = ["qwen3_vl", *only_in_ci("gemma3")]
LOSSES = [Dpo(BETA), *only_in_ci(SimPo(), OrPo())]


def write_pairs(folder: Path) -> None:
    """Prompts with an image each, all of one size, so that their ids are alike; the last has none."""
    lines = []
    for row in range(4):
        prompt = [{"type": "text", "text": "abc" * 30}]
        if row < 3:
            draw(folder / f"pair_{row}.png", 60, 122, seed=50 + row)
            prompt.insert(row % 2, {"type": "image", "image": f"pair_{row}.png"})
        asked = [{"role": "user", "content": prompt}]
        chosen, rejected = (
            [{"role": "assistant", "content": [{"type": "text", "text": said}]}]
            for said in ("xyz" * (row + 1), "yes")
        )
        lines.append(json.dumps({"prompt": asked, "chosen": chosen, "rejected": rejected}))
    (folder / "chats.jsonl").write_text("\n".join(lines))


def plain_rows(
    folder: Path, model: Any, chats: list[Any], of: Path | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Logits of the answers of each chat alone, and their labels."""
    processor = ImageProcessor(str(folder), model.config).own
    rows = []
    for messages in chats:
        parts = [part for turn in messages for part in turn["content"]]
        images = [Image.open((of or folder) / x["image"]) for x in parts if x["type"] == "image"]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        ids = inputs["input_ids"][0]
        starts, end = (
            processor.tokenizer.convert_tokens_to_ids(x) for x in ("<|assistant|>", "<|end|>")
        )
        places = []
        is_answer = False
        for place, token in enumerate(ids.tolist()):
            if is_answer:
                places.append(place)
            is_answer = (is_answer or token == starts) and token != end
        logits = model(**inputs, use_cache=False).logits[0]
        rows.append((logits[torch.tensor(places) - 1], ids[places]))
    return rows


def plain_model(folder: Path) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    return model.double().train()


def chats_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]


def moved(model: Any) -> None:
    """Takes a model away from where it started."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def check_same(model: LossModel, got: Tensor, plain: Any, want: Tensor) -> None:
    expected = gradients(plain, want)
    found = gradients(model.lm, got)
    assert got.item() == pytest.approx(want.item(), rel=LOSS)
    largest = max(float(x.abs().max()) for x in expected.values())
    for name in expected.keys() | found.keys():
        zero = torch.zeros(())
        difference = found.get(name, zero) - expected.get(name, zero)
        assert float(difference.abs().max()) < GRADIENT * largest, name


def with_columns(model: LossModel, batch: ThdBatch, values: Callable[..., Tensor]) -> Tensor:
    """What a model finds of each label, at its place in the stream: [T, K]."""
    found = model.values(batch, values)
    return found.new_zeros(len(batch.labels), found.shape[1]).index_copy(0, batch.label_rows, found)


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits, labels, reduction="none")[:, None]


@pytest.mark.parametrize("loss", LOSSES, ids=["dpo", "simpo", "orpo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_are_those_of_their_rows(family: str, loss: Any, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    write_pairs(tmp_path)
    with InFloat64():
        data = data_of(
            config_of(
                "dpo",
                tmp_path / "run",
                "name=pairs",
                "dataset=images",
                f"dataset.path={tmp_path}/chats.jsonl",
                f"model.pretrained={tmp_path}",
                "packed_sequence.packed_sequence_size=1024",
                "training.global_batch_size=1",
                "training.max_steps=1",
            )
        )
        start, model = (packed_model(tmp_path, data) for _ in range(2))
        reference, plain = (plain_model(tmp_path) for _ in range(2))
        moved(model.lm)
        moved(plain)
        model.loss = loss
        (batch,) = batches_of(data)
        stored = with_columns(start, batch, log_probs)[:, 0]
        batch = replace(batch, columns={**batch.columns, "reference_log_probs": stored})
        got = model(batch).sum
        pairs = chats_of(tmp_path)
        answers = []
        for which in ("chosen", "rejected"):
            chats = [pair["prompt"] + pair[which] for pair in pairs]
            rows = plain_rows(tmp_path, plain, chats)
            with torch.no_grad():
                before = plain_rows(tmp_path, reference, chats)
            answers.append([sums_of(*both) for both in zip(rows, before)])
        want = sum(plain_pair(loss, *both) for both in zip(*answers))
        check_same(model, got, plain, want)
    images: Any = batch.images
    # three images of one size, each for both answers, once
    assert len(images.rows) == images.num_rows
    assert len(batch.columns["image"].unique()) == 1 + 3
    assert int((batch.columns["image"] > 0).sum()) == images.num_rows


def sums_of(row: Any, before: Any) -> tuple[Tensor, Tensor, int]:
    now, then = (-F.cross_entropy(*x, reduction="sum") for x in (row, before))
    return now, then, len(row[1])


def plain_pair(loss: Loss, chosen: Any, rejected: Any) -> Tensor:
    """The losses of a pair as their papers write them."""
    if isinstance(loss, Dpo):
        return -F.logsigmoid(BETA * ((chosen[0] - chosen[1]) - (rejected[0] - rejected[1])))
    means = [answer[0] / answer[2] for answer in (chosen, rejected)]
    if isinstance(loss, SimPo):
        return -F.logsigmoid(2 * (means[0] - means[1]) - 1)
    odds = [mean - torch.log(1 - mean.exp()) for mean in means]
    return -means[0] - 0.1 * F.logsigmoid(odds[0] - odds[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_teacher_sees_the_images(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    write_model(family, tmp_path / "teacher", seed=3)
    write_chats(tmp_path, num=4)
    with InFloat64():
        data = data_of(config_of_images(tmp_path))
        model = packed_model(tmp_path, data)
        teacher = packed_model(tmp_path / "teacher", data)
        model.loss = Distill(cross_entropy=0.25)
        model.set_teacher(teacher)
        batches = batches_of(data)
        got = sum(model(batch).sum for batch in batches)
        plain, theirs = (plain_model(folder) for folder in (tmp_path, tmp_path / "teacher"))
        chats = [chat["messages"] for chat in chats_of(tmp_path)]
        rows = plain_rows(tmp_path, plain, chats)
        with torch.no_grad():
            taught = plain_rows(tmp_path / "teacher", theirs, chats, of=tmp_path)
        want = sum(plain_divergence(*both) for both in zip(rows, taught))
        check_same(model, got, plain, want)


def plain_divergence(row: Any, taught: Any) -> Tensor:
    student, teacher = (F.log_softmax(logits, -1) for logits, _ in (row, taught))
    divergence = F.kl_div(student, teacher, reduction="sum", log_target=True)
    return 0.75 * divergence + 0.25 * F.cross_entropy(*row, reduction="sum")


@pytest.mark.system
def test_what_a_teacher_stored_of_images(tmp_path: Path) -> None:
    """All of the vocabulary stored: the teacher in memory."""
    write_model("qwen3_vl", tmp_path)
    write_model("qwen3_vl", tmp_path / "teacher", seed=3)
    write_chats(tmp_path, num=4)
    with InFloat64():
        data = data_of(config_of_images(tmp_path))
        model = packed_model(tmp_path, data)
        teacher = packed_model(tmp_path / "teacher", data)
        num_ids = model.lm.config.get_text_config().vocab_size
        stored = DistillTopK(teacher=str(tmp_path / "teacher"), top_k=num_ids - 1)
        sums = []
        for batch in batches_of(data):
            found = with_columns(
                teacher, batch, lambda logits, labels: stored.likeliest(num_ids, logits, labels)
            )
            ids, values, rest = found.split([num_ids - 1, num_ids - 1, 1], 1)
            columns = {"teacher_ids": ids.long(), "teacher_log_probs": values}
            columns["teacher_rest"] = rest[:, 0]
            model.loss = stored
            one = model(replace(batch, columns={**batch.columns, **columns})).sum
            model.loss = Distill()
            model.set_teacher(teacher)
            sums.append((one.item(), model(batch).sum.item()))
            model._teacher = ()
    for one, other in sums:
        assert one == pytest.approx(other, rel=LOSS)
