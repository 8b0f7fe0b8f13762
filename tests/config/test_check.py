"""Mistakes in the settings: their exact text, all at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import pytest
from omegaconf import OmegaConf

from automodel_lite.cli import compose_config
from automodel_lite.cli.sources import Sources, presets_of
from automodel_lite.config.check import check_config
from automodel_lite.config.rules import Range
from automodel_lite.data.prepare import build_documents
from automodel_lite.errors import ConfigError
from tests.runs import problems, quick_config

FILLED = ["name=x", "model.pretrained=x", "dataset.path=x"]


MISTAKES = [
    ("training.max_stepz=3", "training.max_stepz=3: unknown key; did you mean training.max_steps?"),
    ("max_steps=3", "max_steps=3: unknown key; did you mean training.max_steps?"),
    ("optimizr.lr=1", "optimizr.lr=1: unknown key; did you mean optimizer.lr?"),
    ("optimizer.lrr=1", "optimizer.lrr=1: unknown key; did you mean optimizer.lr?"),
    ("+training.max_stepz=3", "training.max_stepz=3: unknown key; did you mean training.max_steps?"),
    ("training.max_steps=abc", "training.max_steps=abc must be a whole number or null."),
    ("optimizer.lr=fast", "optimizer.lr=fast must be a number or auto."),
    ("training.log_every_steps=0", "training.log_every_steps=0 must be at least 1."),
    ("optimizer.eps=0", "optimizer.eps=0 must be at least 1e-30."),
    ("training.precision=fp61", "training.precision=fp61 must be one of auto, fp32, bf16."),
    ("name=${oc.env:NOT_SET_ANYWHERE}", "name=${oc.env:NOT_SET_ANYWHERE}: Environment variable 'NOT_SET_ANYWHERE' not found."),
    ("name=???", "name has no value: set name=..."),
    ("name=${name}", "name=${name}: Recursive interpolation detected."),
    ("mesh=4", "mesh=4 is a group of keys: set mesh.dp_replicate=..."),
    ("lr_scheduler=cosin", "lr_scheduler=cosin: no such option; did you mean cosine? The options are constant, cosine, linear, wsd."),
    ("peft=null", "peft=null: choose an option of the group: dora, lora, none, qlora."),
    ("seed=[1", "seed=[1: cannot be read as key=value: close every bracket and quote, or put a text with brackets into quotes, 'seed=\"...\"'."),
    ("training.max_steps", "training.max_steps: cannot be read as key=value: there is no `=`."),
    ("~dataset.seed", "~dataset.seed: no file sets it, so there is nothing to remove."),
    ("dataset.path=x.jsonl", "dataset.path=x.jsonl is an option of dataset=files or dataset=images or dataset=images_streaming or dataset=memmap or dataset=streaming: choose that, or remove it, ~dataset.path."),
    ("peft.r=8", "peft.r=8 is an option of peft=lora or peft=qlora: choose that, or remove it, ~peft.r."),
    ("logger.wandb.project=x", "logger.wandb={'project': 'x'} is an option of logger=wandb: choose that, or remove it, ~logger.wandb."),
    ("callbacks.patience=3", "callbacks.patience=3 is an option of callbacks=early_stopping or callbacks=loss_leap: choose that, or remove it, ~callbacks.patience."),
    ("evaluation.nothing=1", "evaluation.nothing=1: unknown key; if the preset sets it, ~evaluation.nothing removes it."),
    ("packed_sequence.strategy=best", "packed_sequence.strategy=best must be one of exact_fill, best_fit, next_fit, wrapped, none; did you mean best_fit?"),
    ("optimizer._target_=torch.optim.AdamWW", "optimizer._target_=torch.optim.AdamWW is not allowed. A configuration may only call what conf/ names; allow your own code on the command line, security.allow_targets=[torch]."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"), MISTAKES, ids=[override for override, _ in MISTAKES]
)
def test_a_mistake_is_one_sentence(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(compose_config("smoke", [override]))
    assert str(error.value) == message


def test_a_list_where_a_function_is_meant_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}')
    files = ["dataset=files", "~dataset.num_chats", f"dataset.path={path}", "dataset.format=[0]"]
    config = check_config(compose_config("smoke", files))
    with pytest.raises(ConfigError, match=r"^dataset.format=\[0\] must be a name, or a _target_"):
        build_documents(config)


def test_a_part_that_is_refused_hides_no_mistake_of_another() -> None:
    raw = compose_config("smoke", ["packed_sequence.slot_multiple=''", "optimizer.lr=-1"])
    raw.attention = None
    with pytest.raises(ConfigError) as error:
        check_config(raw)
    assert str(error.value).splitlines() == [
        "attention=null: attention is a part with options, such as attention._target_=...",
        "packed_sequence.slot_multiple= must be a whole number or null.",
        "optimizer.lr=-1 must be at least 0 and at most 1.",
    ]


@pytest.mark.parametrize("preset", presets_of(Sources()))
def test_every_preset_is_valid(preset: str) -> None:
    raw = compose_config(preset, [])
    filled = [*FILLED, *(["teacher.pretrained=x"] if preset == "distill" else [])]
    for text in filled if "???" in OmegaConf.to_yaml(raw) else []:
        OmegaConf.update(raw, *text.split("="), force_add=True)
    assert check_config(raw).seed == raw.seed


def test_keys_and_sizes_are_named_together() -> None:
    found = problems(
        "training.max_stepz=3",
        "optimizer.lr=-1",
        "mesh.cp=0",
        "loss.chunk_tokens=0",
        "optimizer.lrr=2",
    )
    keys = sorted(line.split("=")[0] for line in found)
    assert keys == [
        "loss.chunk_tokens",
        "mesh.cp",
        "optimizer.lr",
        "optimizer.lrr",
        "training.max_stepz",
    ]


def rated(params: list[object], lr: Annotated[float, "per step", Range(above=0)] = 0.1) -> None:
    """A part of a user's own, whose annotations are for other libraries too."""


def test_annotations_of_other_libraries_are_no_rules() -> None:
    own = [
        "~optimizer.lr",
        f"optimizer._target_={__name__}.rated",
        f"security.allow_targets=[{__name__}]",
    ]
    assert problems(*own, "optimizer.lr=1") == []
    assert problems(*own, "optimizer.lr=0") == ["optimizer.lr=0 must be over 0."]


def test_an_infinite_limit_of_a_model_is_its_own_affair() -> None:
    assert problems("model.config.time_step_limit=[0.0,inf]") == []


@pytest.mark.parametrize(
    ("quoted", "plain"),
    [
        ("optimizer.lr='1e-4'", "optimizer.lr=1e-4"),
        ("optimizer.lr=' 0.001 '", "optimizer.lr=0.001"),
        ("training.global_batch_size='8'", "training.global_batch_size=8"),
        ("packed_sequence.packed_sequence_size='512'", "packed_sequence.packed_sequence_size=512"),
        ("optimizer.betas=['0.9',0.95]", "optimizer.betas=[0.9,0.95]"),
        ("training.allow_few_steps='True'", "training.allow_few_steps=True"),
        ("training.max_time='3600'", "training.max_time=3600"),
        ("training.max_steps='null'", "training.max_steps=null"),
    ],
)
def test_each_kind_of_number_in_quotes_gets_one_sentence(quoted: str, plain: str) -> None:
    (told,) = problems(quoted)
    assert f": unquote it, {plain}; from the environment, " in told
    assert problems(plain) == []


def test_a_number_that_no_key_takes_is_refused_as_it_is() -> None:
    assert problems("optimizer.lr='5'") == problems("optimizer.lr=5")
    assert problems("optimizer.lr=fast") == ["optimizer.lr=fast must be a number or auto."]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("dataset.path=", "dataset.path= must be a path, and it is empty: was a shell variable not set?"),
        ("dataset.path=null", "dataset.path=null must be text or a list of texts."),
        ("dataset.path=[a,7]", "dataset.path=['a', 7] must be text or a list of texts."),
        ("dataset.path=x dataset.val_path={easy: 3}", "dataset.val_path={'easy': 3} must be text or a list of texts or a group of keys or null."),
        ("dataset.path=x dataset.val_frac=1", "dataset.val_frac=1 must be at least 0 and below 1."),
    ],
    ids=["empty", "null", "list", "by name", "fraction"],
)  # fmt: skip
def test_a_wrong_dataset(override: str, sentence: str) -> None:
    assert sentence in problems("dataset=files", "~dataset.num_chats", *override.split(" ", 1))


def test_a_number_that_is_a_name_is_quoted() -> None:
    assert problems("name=12") == ["name=12 must be text: quote it, \"name='12'\"."]
    assert problems("name='12'") == []


def test_a_whole_number_stands_for_a_float(tmp_path: Path) -> None:
    """Whoever types 2 for 2.0 gets the same config.yaml."""
    config = quick_config(tmp_path, "training.max_grad_norm=2", "training.max_steps=2")
    assert (repr(config.training.max_grad_norm), config.training.max_steps) == ("2.0", 2)


def test_a_number_in_a_text_is_told_how_to_unquote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence named the number itself as no number; each of its cures works."""
    (told,) = problems("training.max_steps='9'")
    assert told.startswith("training.max_steps is the text '9', not a number: unquote it, ")
    cures = re.search(r"unquote it, (\S+); from the environment, '(.+)'\.$", told)
    assert cures
    assert problems(cures[1]) == []
    monkeypatch.setenv("NAME", "9")
    assert problems(cures[2]) == []
    assert problems("name=1e5") == [
        "name=100000.0 must be text: quote what was typed, \"name='...'\"."
    ]
