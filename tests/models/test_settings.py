"""Settings of model.config: sizes that a model can have, and where a family keeps what config.json names otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig, LlamaConfig

from automodel_lite.attention.spec import attention_specs
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
from benchmarks.tiny_models import tiny_config
from tests.training.test_start import tried

MODELS = {
    "model.config.hidden_size=33": "The hidden size (33) is not a multiple of the number of attention heads (4)",
    "model.config.num_attention_heads=3": "The hidden size (32) is not a multiple of the number of attention heads (3)",
    "model.config.num_key_value_heads=3": "num_attention_heads=4 must be a multiple of num_key_value_heads=3.",
    "model.config.hidden_size=10000000": "hidden_size=10,000,000 must be at most 1,000,000.",
    "model.config.num_hidden_layers=1000000": "num_hidden_layers=1,000,000 must be at most 10,000.",
    "model.config.num_hidden_layers=0": "num_hidden_layers=0 must be at least 1.",
    "model.config.max_position_embeddings=0": "max_position_embeddings=0 must be at least 1.",
    "model.config.hidden_act=swish_": "'swish_' is not known.",
    "model.config.hidden_size=many": "Field 'hidden_size' expected int, got str (value: 'many')",
    "model.config.head_dim=7": "RoPE requires an even rotary dimension",
    "model.config.rope_scaling={rope_type:jarn}": "'jarn' is not known.",
    "model.config.rope_scaling={rope_type:yarn}": "Missing required keys in `rope_parameters` for 'rope_type'='yarn'",
}


@pytest.mark.parametrize("override", MODELS)
def test_a_model_that_cannot_work(override: str) -> None:
    message = tried(override)
    assert message.startswith("a model with these settings does not work: ")
    assert MODELS[override] in message
    assert override.partition("=")[0] in message


ROPE = {
    "rope_theta": (1e6, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
    "rope_scaling": (
        {"rope_type": "yarn", "factor": 4.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 5e5,
            "original_max_position_embeddings": 64,
        },
    ),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 7.0},
        {"rope_type": "default", "rope_theta": 7.0},
    ),
}


@pytest.mark.parametrize("key", ROPE)
def test_settings_by_the_names_of_config_json(key: str, tmp_path: Path) -> None:
    """transformers renames them when it reads a config; a setting of ours has to arrive all the same."""
    config = LlamaConfig(
        max_position_embeddings=64, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}
    )
    config.save_pretrained(tmp_path)
    value, wanted = ROPE[key]
    found = (
        CausalLM(pretrained=str(tmp_path), config={key: value})
        .resolve_model_config({})
        .rope_parameters
    )
    assert {name: found[name] for name in wanted} == wanted


def test_settings_of_the_language_model_of_a_composite(tmp_path: Path) -> None:
    Gemma3Config().save_pretrained(tmp_path)

    def described(**settings: object) -> Gemma3TextConfig:
        return (
            CausalLM(pretrained=str(tmp_path), config=settings).resolve_model_config({}).text_config
        )

    found = described(text_config={"max_position_embeddings": 4096})
    assert (found.max_position_embeddings, found.sliding_window) == (
        4096,
        Gemma3TextConfig().sliding_window,
    )
    with pytest.raises(
        ConfigError,
        match=r"has no such setting; did you mean model.config.text_config.sliding_window?",
    ):
        described(sliding_window=8)
    with pytest.raises(
        ConfigError, match=r"model.config.text_config.hiden_size=8: gemma3_text has no such setting"
    ):
        described(text_config={"hiden_size": 8})


def test_scaling_is_removed_by_null(tmp_path: Path) -> None:
    LlamaConfig(
        rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0}
    ).save_pretrained(tmp_path)
    model = CausalLM(pretrained=str(tmp_path), config={"rope_scaling": None})
    assert model.resolve_model_config({}).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 5e5,
    }


def test_scaling_has_a_type() -> None:
    assert tried("+model.config.rope_scaling={factor:2.0}") == (
        "model.config.rope_scaling={'factor': 2.0} must be null or name its rope_type, such as "
        "model.config.rope_scaling={rope_type: yarn, factor: 4.0}."
    )


def test_a_setting_by_its_other_name() -> None:
    """Qwen3-MoE's config.json has num_experts, its class num_local_experts."""
    settings = {"model_type": "qwen3_moe", "num_experts": 16}
    assert CausalLM(config=settings).resolve_model_config({}).num_local_experts == 16


def test_no_token_takes_more_experts_than_there_are() -> None:
    message = tried("model.config.model_type=qwen3_moe", "model.config.num_experts=4")
    assert "a token cannot be sent to 8 of 4 experts." in message


def test_a_model_type_that_does_not_exist() -> None:
    assert tried("model.config.model_type=lama") == (
        "model.config.model_type=lama: transformers has no such model; did you mean llama?"
    )


OF_OTHER_LOSSES = {
    "router_aux_loss_coef=0.01": "set model.router_aux_loss in its place.",
    "output_router_logits=true": "set model.router_aux_loss in its place.",
}


@pytest.mark.parametrize("setting", OF_OTHER_LOSSES)
def test_a_setting_of_a_loss_that_is_not_computed(setting: str) -> None:
    """transformers reads it where it computes the loss; here it was taken, and did nothing."""
    experts = ["model.config.model_type=qwen3_moe", "model.config.num_experts_per_tok=2"]
    assert tried(*experts, f"+model.config.{setting}").splitlines()[0] == (
        f"model.config.{setting} is of a loss that is not computed here: {OF_OTHER_LOSSES[setting]}"
    )
    assert tried(*experts, "+model.config.output_router_logits=false") == ""


def test_a_loaded_model_draws_no_weights(tmp_path: Path) -> None:
    Gemma3Config().save_pretrained(tmp_path)
    settings = {"text_config": {"initializer_range": 0.1}}
    sentence = r"model.config.text_config.initializer_range=0.1 is of weights that are drawn, and "
    with pytest.raises(ConfigError, match=sentence):
        CausalLM(pretrained=str(tmp_path), config=settings).resolve_model_config({})


DROPOUTS = {"gemma3": "text_config.attention_dropout", "dbrx": "attn_config.attn_pdrop"}


@pytest.mark.parametrize("family", DROPOUTS)
def test_dropout_is_named_where_it_is_set(family: str) -> None:
    config = tiny_config(family)
    part, key = DROPOUTS[family].split(".")
    setattr(getattr(config, part), key, 0.1)
    with pytest.raises(ConfigError, match=rf"set model\.config\.{DROPOUTS[family]}=0\.$"):
        attention_specs(config, "cpu", torch.float32)
