"""The options of a part stand in its signature: type, default and comment; YAML holds what differs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.components import CONF_DIR, locate, own_targets
from automodel_lite.config.signatures import REQUIRED, arguments_of, options_of
from automodel_lite.errors import ConfigError

WITH_OPTIONS = sorted(target for target in own_targets() if options_of(target))


def test_options_are_read_from_the_source_without_an_import() -> None:
    """Of a class, a dataclass with a parent whose package is missing, and a function."""
    assert [*options_of("automodel_lite.models.source.CausalLM")][:2] == ["pretrained", "revision"]
    assert options_of("automodel_lite.parts.adapters.lora.QLora")["r"].default == 16
    assert options_of("automodel_lite.parts.adapters.lora.QLora")[
        "double_quant"
    ].comment.startswith("also quantize the scales")
    assert [*options_of("automodel_lite.data.tokens.tokenizer.train_bpe_tokenizer")] == [
        "vocab_size"
    ]
    assert options_of("torch.optim.AdamW") == {}


@pytest.mark.parametrize("target", WITH_OPTIONS)
def test_options_are_what_the_signature_says(target: str) -> None:
    try:
        parameters = inspect.signature(locate(target)).parameters
    except ConfigError:
        pytest.skip("an optional package is missing")
    for key, option in options_of(target).items():
        default = parameters[key].default
        # YAML has lists alone
        assert option.default == (list(default) if isinstance(default, tuple) else default)


@pytest.mark.parametrize("target", sorted(own_targets()))
def test_arguments_read_from_the_source_are_the_functions(target: str) -> None:
    """Names, types and which ones are required; types that nobody imports stand for objects."""
    try:
        found = locate(target)
    except ConfigError:
        pytest.skip("an optional package is missing")
    # a dataclass's fields: each in the module of its own class
    has_init = inspect.isclass(found) and not is_dataclass(found)
    hints = get_type_hints(found.__init__ if has_init else found, include_extras=True)
    parameters = inspect.signature(found).parameters
    arguments = arguments_of(target)
    assert list(arguments) == list(parameters)
    for key, argument in arguments.items():
        assert (argument.default is REQUIRED) == (parameters[key].default is parameters[key].empty)
        # as texts: bounds that are NaN equal none since Python 3.13
        hint = str(argument.hint)
        assert "AnObject" in hint or hint == str(hints[key])


def test_no_default_stands_twice() -> None:
    """A value in conf/ that equals the default of the signature says nothing, in nested parts (`logger.wandb`) too."""
    twice = []
    for path in sorted(CONF_DIR.glob("*/*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for part in [content, *(value for value in content.values() if isinstance(value, dict))]:
            if "_target_" in part:
                parameters = signature(part["_target_"])
                twice += [
                    f"{path}: {key}"
                    for key in part
                    if key in parameters and part[key] == parameters[key].default
                ]
    assert not twice


def signature(target: str) -> Mapping[str, inspect.Parameter]:
    """Empty for a target whose optional package is missing: its options are compared as text above."""
    try:
        return inspect.signature(locate(target)).parameters
    except ConfigError:
        return {}


def test_a_checked_configuration_has_every_option() -> None:
    """So that a run's config.yaml keeps its defaults when those of the program change; nested parts too."""
    parts = "dataset.sources={a: {dataset: {_target_: automodel_lite.parts.datasets.toy_chat.ToyChat, seed: 3}, weight: 1.0}}"
    config = check_config(compose_config("smoke", ["dataset=mixture", "~dataset.num_chats", parts]))
    assert config.dataset["sources"]["a"]["dataset"]["num_chats"] == 2000
    assert config.dataset["sources"]["a"]["dataset"]["seed"] == 3
    assert config.packed_sequence["balance"] == "step"
    assert config.model["pretrained"] is None


def test_interpolations_find_the_options_that_are_left_out() -> None:
    """`tokenizer.path: ${model.pretrained}` of a model from scratch is null, not a missing key."""
    config = check_config(compose_config("smoke", ["tokenizer=pretrained"]))
    assert config.tokenizer["path"] is None
