"""Rows that share an image: it is read and computed once, and the numbers are those of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_lite.parts.images.packs import rows_of_images
from automodel_lite.parts.trees import LEAST_SHARED
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


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3", "qwen3_5"])
def test_answers_to_one_image_share_it(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    write_rows(tmp_path, "ab")
    with InFloat64():
        want, expected, apart = sums(tmp_path, "off")
        got, found, together = sums(tmp_path, "auto")
    assert abs(got.item() - want.item()) < LOSS * want.item()
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < GRADIENT * largest, name
    # of three rows of each question: tokens once, pixels once in any case
    tokens = [sum(batch.num_tokens for batch in batches) for batches in (apart, together)]
    assert tokens[1] < 0.5 * tokens[0]
    (batch,) = together
    assert batch.images.num_rows == len(set(batch.images.rows.tolist()))
    assert len(batch.images.rows) >= batch.images.num_rows


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
