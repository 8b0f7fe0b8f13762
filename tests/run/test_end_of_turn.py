"""A base model whose end token is not its chat template's: what is trained to answer stops where the template ends a turn."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from automodel_lite.data.tokens.chat import ChatRenderer
from automodel_lite.data.tokens.stop_tokens import stop_ids, template_end
from automodel_lite.data.tokens.tokenizer import load_tokenizer
from automodel_lite.tools.load_generator import load_generator
from recipes import export_hf
from tests.data.templates import FAMILIES, Family, byte_tokenizer
from tests.runs import train

BASE = Family(
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),  # 256, 257, 258
    eos="<|endoftext|>",
)
ASKED = [{"role": "user", "content": "hi"}]
CHAT = [*ASKED, {"role": "assistant", "content": "yo"}]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259}


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=256))


def job(folder: Path, *more: str) -> list[str]:
    """Settings of a job that trains the base model in `folder` to answer."""
    small_model().save_pretrained(folder / "base")
    byte_tokenizer(BASE).save_pretrained(folder / "base")
    again = [*CHAT, {"role": "user", "content": "more"}, {"role": "assistant", "content": "sure"}]
    for name, turns in (("chats", again), ("held_out", CHAT)):
        (folder / f"{name}.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    return [
        "model=pretrained",
        f"model.pretrained={folder}/base",
        "tokenizer=pretrained",
        "dataset=files",
        "~dataset.num_chats",
        f"dataset.path={folder}/chats.jsonl",
        f"dataset.val_path={folder}/held_out.jsonl",
        "evaluation=exact_match",
        "samples.prompts=[hi]",
        "optimizer.lr=1e-2",
        "lr_scheduler.warmup_steps=0",
        "training.global_batch_size=1",
        "training.log_every_steps=20",
        "training.val_every_steps=0",
        "checkpoint.every_steps=0",
        *more,
    ]


def answer(lm: Any, folder: Path, **options: Any) -> str:
    """What plain transformers says, special tokens shown."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = lm.generate(**inputs, max_new_tokens=16, do_sample=False, **options)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


ADAPTER = ("peft=lora", "peft.r=8", "peft.modules_to_save=[embed_tokens,lm_head]")


@pytest.mark.parametrize("more", [(), ADAPTER], ids=["whole", "adapter"])
def test_an_export_stops_where_the_template_ends_a_turn(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    options = job(tmp_path, "tokenize.train_on=all", "training.max_steps=80", *more)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        rows = train("smoke", run, *options)
    screen = printed.getvalue()
    assert "NOTE: answers stop at <|im_end|> too" in screen
    assert "the tokenizer's end is <|endoftext|>" in screen
    assert [row["answers_right"] for row in rows if "answers" in row] == [4]
    assert [row["text/hi"] for row in rows if "text/hi" in row and "answers" not in row] == ["yo"]
    if more:
        own = run / "adapter"
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        lm = peft.PeftModel.from_pretrained(base, own)
        settings = GenerationConfig.from_pretrained(own)
        assert answer(lm, own, generation_config=settings) == "yo<|im_end|>"
        assert load_generator(str(own)).answers([ASKED], max_new_tokens=16) == ["yo"]
        assert export_hf.main([str(run)]) == 0
    written = json.loads((run / "hf/generation_config.json").read_text())
    assert written["eos_token_id"] == [256, 258]
    assert answer(AutoModelForCausalLM.from_pretrained(run / "hf"), run / "hf") == "yo<|im_end|>"


def test_the_ids_that_end_an_answer() -> None:
    lm = small_model()
    tokenizer = byte_tokenizer(BASE)
    assert stop_ids(lm, tokenizer) == [256, 258]
    lm.generation_config.eos_token_id = [7, 258]
    assert stop_ids(lm, tokenizer) == [256, 7, 258]
    tokenizer.chat_template = None
    assert stop_ids(lm, tokenizer) == [256, 7, 258]
    lm.generation_config.eos_token_id = None
    assert stop_ids(lm, tokenizer) == [256]


PARTS = (
    "{%- for message in messages -%}{%- for part in message.content if part.type == 'text' -%}"
    "{{ part.text }}{%- endfor -%}<|im_end|>{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (PARTS, "<|im_end|>"),
        ("{{ messages[1].content }}\n", None),
        ("{{ raise_exception('no') }}", None),
        ("{{ messages[1].content }}<|im_end|><|endoftext|>", "<|endoftext|>"),
    ],
    ids=["parts", "none", "refuses", "two that touch"],
)
def test_the_end_of_a_turn_by_its_template(template: str, end: str | None) -> None:
    assert template_end(byte_tokenizer(Family(template, BASE.specials, BASE.eos))) == end


def test_variables_of_the_template_choose_its_end() -> None:
    """tokenize.template_kwargs; without them, this one refuses every chat."""
    ends = "{% if not kind %}{{ raise_exception('kind is missing') }}{% endif %}"
    template = f"{ends}{{{{ messages[1].content }}}}{{{{ '<|im_end|>' if kind == 'chat' }}}}"
    tokenizer = byte_tokenizer(Family(template, BASE.specials, BASE.eos))
    lm = small_model()
    lm.generation_config.eos_token_id = None
    assert stop_ids(lm, tokenizer) == [256]
    assert stop_ids(lm, tokenizer, {"kind": "text"}) == [256]
    assert stop_ids(lm, tokenizer, {"kind": "chat"}) == [256, 258]


def test_a_template_that_a_processor_alone_has_is_used(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(BASE)
    own = tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": own}))
    assert template_end(load_tokenizer(str(tmp_path))) == "<|im_end|>"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_a_turn_is_the_one_that_is_trained(family: str) -> None:
    tokenizer = byte_tokenizer(FAMILIES[family])
    assert template_end(tokenizer) == ChatRenderer(tokenizer, "assistant").stop_tokens[0]
