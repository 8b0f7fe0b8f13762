"""Rows that share an image: it is read and computed once, and the numbers are those of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_lite.data.tokens.trees import LEAST_SHARED
from automodel_lite.parts.images.packs import rows_of_images
from tests.attention.hybrids import InFloat64
from tests.images.families import draw, write_model
from tests.images.test_exact import (
    GRADIENT,
    LOSS,
    batches_of,
    config_of_images,
    data_of,
    gradients,
    packed_model,
)
from tests.tiers import only_in_ci, rarely


def write_rows(folder: Path, text: str) -> None:
    """Questions with two answers each; the shared prompt is an image and a text, in both orders."""
    lines = []
    for row in range(3):
        draw(folder / f"{row}.png", 60, 122, seed=row)
        picture = {"type": "image", "image": f"{row}.png"}
        words = {"type": "text", "text": "abcdefg"[row:] * (LEAST_SHARED // 4)}
        prompt = [{"role": "user", "content": [picture, words] if row else [words, picture]}]
        answers = {"responses": ["xyz", "xq", f"{text}w"]}
        if text == "pair":
            says = [{"role": "assistant", "content": said} for said in ("xyz", "xq")]
            answers = {"chosen": [says[0]], "rejected": [says[1]]}  # type: ignore[list-item]
        lines.append(json.dumps({"prompt": prompt, **answers}))
    (folder / "chats.jsonl").write_text("\n".join(lines))


def write_turns(folder: Path) -> None:
    """Chats with an image in every question, whose template keeps the reasoning of the last answer alone."""
    lines = []
    for row in range(2):
        messages = []
        for turn, said in enumerate(["abc:yes", "xyz:no", "hij:xx"]):
            draw(folder / f"{row}_{turn}.png", 60, 122, seed=10 * row + turn)
            parts = [
                {"type": "image", "image": f"{row}_{turn}.png"},
                {"type": "text", "text": "what? " * (LEAST_SHARED // 4)},
            ]
            messages.append({"role": "user", "content": parts})
            messages.append({"role": "assistant", "content": said})
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    template = folder / "chat_template.jinja"
    kept = "{{ m['content'] if loop.last else m['content'].split(':')[-1] }}"
    kept_part = "{{ part['text'] if loop.last else part['text'].split(':')[-1] }}"
    text = template.read_text()
    assert "{{ part['text'] }}" in text
    text = text.replace("{{ m['content'] }}", kept)
    # of the outer loop, a part's own being another
    text = text.replace(
        "{% for m in messages %}", "{% for m in messages %}{% set is_last = loop.last %}"
    )
    template.write_text(
        text.replace("{{ part['text'] }}", kept_part.replace("loop.last", "is_last"))
    )


def write_questions(folder: Path) -> None:
    """Questions on two images of one size, as rows of their own, in turns."""
    for image in range(2):
        draw(folder / f"{image}.png", 60, 122, seed=image)
    lines = []
    for row in range(6):
        parts = [
            {"type": "image", "image": f"{row % 2}.png"},
            {"type": "text", "text": "abcd" * (LEAST_SHARED // 4) + "xyz"[row // 2]},
        ]
        asked = {"role": "user", "content": parts}
        lines.append(json.dumps({"messages": [asked, {"role": "assistant", "content": "yes"}]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))


def sums(folder: Path, tree: str) -> tuple[Any, dict[str, Any], list[Any]]:
    data = data_of(
        config_of_images(
            folder,
            f"packed_sequence.tree={tree}",
            "packed_sequence.packed_sequence_size=1024",
        )
    )
    model = packed_model(folder, data)
    batches = batches_of(data)
    loss = sum(model(batch).sum for batch in batches)
    return loss, gradients(model.lm, loss), batches


def check_shared(folder: Path, tree: str) -> tuple[list[int], Any]:
    """Returns the tokens of rows and of trees, and the images of the only pack of trees."""
    with InFloat64():
        want, expected, apart = sums(folder, "off")
        got, found, together = sums(folder, tree)
    assert abs(got.item() - want.item()) < LOSS * want.item()
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < GRADIENT * largest, name
    tokens = [sum(batch.num_tokens for batch in batches) for batches in (apart, together)]
    (batch,) = together
    assert batch.images.num_rows == len(set(batch.images.rows.tolist()))
    assert len(batch.images.rows) >= batch.images.num_rows
    return tokens, batch.columns["image"]


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *only_in_ci("idefics3", "qwen3_5", "glm4v"), *rarely("gemma3", "aya_vision")],
)
def test_answers_to_one_image_share_it(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    write_rows(tmp_path, "ab")
    tokens, _ = check_shared(tmp_path, "auto")
    # of three rows of each question: tokens once, pixels once in any case
    assert tokens[1] < 0.5 * tokens[0]


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *only_in_ci("gemma3", "llava_next", "glm4v"), *rarely("internvl", "aya_vision")],
)
def test_turns_share_the_images_before_them(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    write_turns(tmp_path)
    tokens, image = check_shared(tmp_path, "auto")
    assert tokens[1] < 0.7 * tokens[0]
    assert len(image[image > 0].unique()) == 2 * 3


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *only_in_ci("gemma3", "aya_vision"), *rarely("idefics3", "glm4v")]
)
def test_questions_of_other_rows_share_their_own_image(family: str, tmp_path: Path) -> None:
    """Two images of one size have the same placeholders."""
    write_model(family, tmp_path)
    write_questions(tmp_path)
    tokens, image = check_shared(tmp_path, "all")
    assert tokens[1] < 0.5 * tokens[0]
    assert len(image[image > 0].unique()) == 2


def test_a_branch_at_the_end_of_an_image_takes_its_last_row() -> None:
    columns = {
        "image": torch.tensor([[0, 7, 7, 7, 7, 0, 0, 7, 9, 9]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]),
    }
    branched = {**columns, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 4, 0, 1]])}
    branched["position_ids"][0, 6] = 6
    numbers, nth = rows_of_images(branched)
    assert numbers.tolist() == [7, 7, 7, 7, 7, 9, 9]
    assert nth.tolist() == [0, 1, 2, 3, -1, 0, 1]
