"""Prompts with images, which a run answers at each validation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from automodel_lite.errors import ConfigError
from automodel_lite.extras.report import pieces_of
from automodel_lite.parts.images.tokens import ImageProcessor
from tests.attention.hybrids import InFloat64
from tests.images.families import write_chats, write_model
from tests.images.test_exact import config_of_images, data_of, packed_model
from tests.images.test_trees import others


def config_of_prompt(folder: Path, prompt: str) -> object:
    return config_of_images(folder, f"samples.prompts=['{prompt}']")


@pytest.mark.parametrize("family", ["qwen3_vl", *others("gemma3", "llava_next")])
def test_an_answer_goes_on_as_plain_transformers_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(family, tmp_path)
    write_chats(tmp_path, num=3)
    monkeypatch.chdir(tmp_path)
    prompt = "![](0.png)what is it?![b](1.png)"
    with InFloat64():
        data = data_of(config_of_prompt(tmp_path, prompt))
        model = packed_model(tmp_path, data).eval()
        plain = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
        plain = plain.double().eval()
        own = ImageProcessor(str(tmp_path), plain.config).own
        parts = [
            {"type": "image"},
            {"type": "text", "text": "what is it?"},
            {"type": "image"},
        ]
        text = own.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        images = [Image.open(f"{number}.png") for number in range(2)]
        ids, stream = data.packer.prompt(data.job, prompt)
        for said in ("", "yes"):
            inputs = own(text=[text + said], images=images, return_tensors="pt")
            more = own.tokenizer(said, add_special_tokens=False)["input_ids"]
            assert inputs["input_ids"][0].tolist() == ids + more
            with torch.no_grad():
                want = plain(**inputs, use_cache=False).logits[0, -1]
                got = model.logits(stream(ids + more), num_last=1)[-1]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_a_prompt_without_its_image_is_refused_at_the_start(tmp_path: Path) -> None:
    write_model("qwen3_vl", tmp_path)
    write_chats(tmp_path, num=2)
    with pytest.raises(ConfigError, match=r"samples.prompts: image nowhere.png cannot be read"):
        data_of(config_of_prompt(tmp_path, "![](nowhere.png) what?"))


def test_a_prompt_is_shown_with_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (400, 300), "red").save("a.png")
    before, image, behind = pieces_of("see ![](a.png) what?")
    assert (before, behind) == (("see ", ""), (" what?", ""))
    assert image[0] == "![](a.png)"
    assert image[1].startswith("data:image/jpeg;base64,")
    assert pieces_of("![](gone.png)")[1] == ("![](gone.png)", "")
    assert pieces_of("what?") == [("what?", "")]
