"""Questions about a picture: it is read and computed once, and the numbers are those of each question alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from automodel_lite.data.formats.decisions import decisions_of, record
from automodel_lite.data.tokens.decisions import DecisionStyle, order_of
from automodel_lite.data.tokens.trees import LEAST_SHARED
from automodel_lite.parts.images.tokens import ImageProcessor
from automodel_lite.parts.losses.decisions import Decisions
from tests.attention.hybrids import InFloat64
from tests.images.families import draw, write_model
from tests.images.test_exact import batches_of, data_of, packed_model
from tests.images.test_objectives import check_same, plain_model
from tests.runs import config_of

STATE = "what is here. " * (LEAST_SHARED // 10)
QUESTIONS = {
    "which": {"type": "choice", "instructions": "which?", "criteria": ["cat", "dog", "red"]},
    "is": {"type": "noul", "instructions": "is it?"},
    "how": {"type": "score", "instructions": "how?", "criteria": ["a", "b"]},
}
ROWS = [
    {"images": ["0.png"], "state": STATE, "questions": QUESTIONS,
     "answers": {"which": "dog", "is": True}, "soft_labels": {"how": [0.25, 0.75]}},
    {"images": ["1.png"], "state": STATE, "questions": QUESTIONS, "answers": {"is": False}},
]  # fmt: skip


def write_rows(folder: Path) -> None:
    write_model("qwen3_vl", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([*"ABC#"])  # the model has rows for some more
    tokenizer.save_pretrained(folder)
    for row in range(2):
        draw(folder / f"{row}.png", 60, 122, seed=row)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


def test_a_picture_with_questions_equals_each_alone(tmp_path: Path) -> None:
    write_rows(tmp_path)
    with InFloat64():
        config = config_of(
            "decisions",
            tmp_path / "run",
            "dataset=images",
            f"dataset.path={tmp_path}/rows.jsonl",
            f"model.pretrained={tmp_path}",
            "tokenize.choice_prefix='#'",
            "packed_sequence.packed_sequence_size=1024",
            "training.global_batch_size=1",
            "training.max_steps=1",
            "name=x",
        )
        data = data_of(config)
        model, plain = packed_model(tmp_path, data), plain_model(tmp_path)
        loss = model.loss = Decisions()
        (batch,) = batches_of(data)
        assert loss.num_items(batch) == 4
        # the picture of the first record and its text stand there once
        is_image = batch.columns["image"] > 0
        numbers, counts = batch.columns["image"][is_image].unique(return_counts=True)
        assert len(numbers) == 2
        assert counts[0] == counts[1]
        got = model(loss.prepare(batch)).sum
        processor = ImageProcessor(str(tmp_path), plain.config).own
        letters = [processor.tokenizer.convert_tokens_to_ids(letter) for letter in "ABC"]
        style = DecisionStyle("#")
        want = torch.zeros(())
        for row, picture in zip(ROWS, ("0.png", "1.png")):
            for decision in decisions_of(record({**row, "state": f"\ufdd2{STATE}"})):
                if decision.target is None:
                    continue
                order = order_of(decision, style)
                lines = [STATE, "", decision.question]
                for letter, place in zip("ABC", order):
                    name, meaning = decision.choices[place]
                    said = f": {meaning}" if meaning else ""
                    lines.append(f'#{letter} = "{name}"{said}')
                lines.append("Answer with one of these choices, written as #A.")
                parts = [{"type": "image"}, {"type": "text", "text": "\n".join(lines)}]
                asked = [{"role": "user", "content": parts}]
                text = processor.tokenizer.apply_chat_template(asked, tokenize=False)
                image = Image.open(tmp_path / picture)
                inputs = processor(text=[f"{text}<|assistant|>#"], images=[image],
                                   return_tensors="pt")  # fmt: skip
                logits = plain(**inputs, use_cache=False).logits[0, -1]
                log_probs = torch.log_softmax(logits[letters[: len(order)]], -1)
                target = torch.tensor([decision.target[place] for place in order])
                want = want - (target * log_probs).sum()
        check_same(model, got, plain, want)
    assert got.item() == pytest.approx(want.item())
