"""Chats answered in batches, as one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.evaluation.generator import Generator
from automodel_lite.evaluation.samples import text_prompt
from automodel_lite.run.ending import ending_of
from automodel_lite.tools.load_generator import load_generator, most_pixels_of, settings_of
from tests.data.templates import MARKED, byte_tokenizer

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Hi", "Name the capital of Cuba.", "What " * 20, "Cuba?")
]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {"llama": {}, "lfm2": {"layer_types": ["conv", "full_attention"]}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_answered_as_each_prompt_alone(family: str) -> None:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(MARKED)
    config = AutoConfig.for_model(
        family, **SIZES, **FAMILIES[family], num_hidden_layers=2, vocab_size=len(tokenizer)
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that what stands before a token moves its logits
    generator = Generator(model, tokenizer)
    alone = [generator.answers([chat], max_new_tokens=8)[0] for chat in CHATS]
    assert len(set(alone)) > 1
    assert generator.takes_padding
    assert generator.answers(CHATS, max_new_tokens=8) == alone
    # of a model's generation_config.json: answers went to other prompts, and one that streams raised
    generator.model.generation_config.update(num_beams=2, num_return_sequences=2)
    assert generator.answers(CHATS, max_new_tokens=8) == alone
    assert generator.answers(CHATS[:1], max_new_tokens=8, write=str) == alone[:1]


def test_a_prompt_has_the_variables_of_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that was trained without thinking is asked without."""
    closed = "{% if add_generation_prompt and not thinks | default(true) %}(none){% endif %}"
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.chat_template += closed
    config = AutoConfig.for_model("llama", **SIZES, num_hidden_layers=1, vocab_size=len(tokenizer))
    model = AutoModelForCausalLM.from_config(config).eval()
    asked: list[str] = []
    generate = model.generate

    def noted(input_ids, **more):
        asked.extend(tokenizer.batch_decode(input_ids))
        return generate(input_ids=input_ids, **more)

    monkeypatch.setattr(model, "generate", noted)
    (tmp_path / "config.yaml").write_text("name: x\ntokenize: {template_kwargs: {thinks: false}}\n")
    variables = settings_of(tmp_path)["tokenize"]["template_kwargs"]
    Generator(model, tokenizer).answers(CHATS[:1], max_new_tokens=1)
    Generator(model, tokenizer, template_kwargs=variables).answers(CHATS[:1], max_new_tokens=1)
    assert asked[1] == f"{asked[0]}(none)"
    job = TokenizeJob(tokenizer, TokenizeConfig(template_kwargs=variables))
    assert tokenizer.decode(text_prompt(job, "x")[0]).endswith("(none)")
    assert settings_of(tmp_path / "nothing") == {}


def test_a_mixture_is_asked_with_the_largest_images_of_its_sets() -> None:
    assert most_pixels_of({}) is None
    text = {"_target_": "automodel_lite.data.reading.files.FilesDataset"}
    all_pixels = {"_target_": "automodel_lite.parts.images.dataset.ImageFiles"}
    few = all_pixels | {"max_image_pixels": 5}
    more = all_pixels | {"max_image_pixels": 9}
    assert most_pixels_of({"dataset": text}) is None
    assert most_pixels_of({"dataset": all_pixels}) is None
    assert most_pixels_of({"dataset": few}) == 5
    for sets, most in [([text, few, more], 9), ([text, few, all_pixels], None)]:
        sources = {str(number): {"dataset": one} for number, one in enumerate(sets)}
        assert most_pixels_of({"dataset": {"sources": sources}}) == most


def test_a_model_that_sees_padding_answers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(MARKED)
    config = AutoConfig.for_model("llama", **SIZES, num_hidden_layers=2, vocab_size=len(tokenizer))
    model = AutoModelForCausalLM.from_config(config).eval()
    generate, generator = model.generate, Generator(model, tokenizer)
    alone = [generator.answers([chat], max_new_tokens=8)[0] for chat in CHATS]

    def careless(attention_mask, **more):
        return generate(attention_mask=attention_mask * 0 + 1, **more)

    monkeypatch.setattr(model, "generate", careless)
    assert not generator.takes_padding
    assert generator.answers(CHATS, max_new_tokens=8) == alone


def test_a_host_without_threads_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `ulimit -v`: an answer exited with 2, as for a wrong setting."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread") as raised:
        load_generator(str(tmp_path))
    assert ending_of(raised.value).code == 1
