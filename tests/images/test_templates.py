"""Chat templates that take a turn's content in one form alone: as a text, or as a list of parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from automodel_lite.evaluation.generator import Generator, prompt_ids
from automodel_lite.parts.images import open_images
from tests.images.families import draw, write_model
from tests.images.test_exact import config_of_images, data_of

# parts of a user's turn alone, as GLM-4.1V's: of others, a list is written as Python does
OF_USERS = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' and m.content is not string %}\
{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}\
{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# parts alone, as LLaVA's: of a text, nothing is written
OF_ALL = """{% for m in messages %}<|{{ m.role }}|>{% for part in m.content | selectattr('type', 'equalto', 'image') %}\
<|image_pad|>{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}\
<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
CHAT = [
    {"role": "system", "content": "be brief."},
    {"role": "user", "content": "what?"},
    {"role": "assistant", "content": "a cat."},
    {"role": "user", "content": "and?"},
]
ASKED = "<|system|>be brief.<|end|><|user|>{}what?<|end|><|assistant|>a cat.<|end|><|user|>and?<|end|><|assistant|>"


@pytest.mark.parametrize("template", [OF_USERS, OF_ALL], ids=["of_users", "of_all"])
def test_each_turn_is_written_as_its_text(template: str, tmp_path: Path) -> None:
    """In training, in a question with an image, and in one without."""
    draw(tmp_path / "a.png", 56, 56, seed=0)
    answer = {"role": "assistant", "content": "a dog."}
    marked = [{**turn, "content": turn["content"].replace("what", "<image>what")} for turn in CHAT]
    rows: list[dict[str, Any]] = [{"messages": [*marked, answer], "image": "a.png"}]
    rows.append({"messages": [*CHAT, answer]})
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_model("qwen3_vl", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    data = data_of(config_of_images(tmp_path))
    tokenizer = data.tokenizer
    image = "<|image_pad|>" * 4
    with_image = tokenizer(ASKED.format(image))["input_ids"]
    without = tokenizer(ASKED.format(""))["input_ids"]
    said = tokenizer("a dog.<|end|>")["input_ids"]
    got = [data.tokens.train[row]["input_ids"].tolist() for row in range(2)]
    assert got == [with_image + said, without + said]
    generator = Generator(
        AutoModelForImageTextToText.from_pretrained(tmp_path), tokenizer, str(tmp_path)
    )
    parts = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "what?"}]
    asked = [CHAT[0], {"role": "user", "content": parts}, *CHAT[2:]]
    assert open_images(generator)(asked)["input_ids"][0].tolist() == with_image
    assert prompt_ids(tokenizer, CHAT) == without
    ids, _ = data.packer.prompt(data.job, "and?")
    assert ids == tokenizer("<|user|>and?<|end|><|assistant|>")["input_ids"]
