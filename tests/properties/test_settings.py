"""Settings drawn at random: checked, sized and tried before anything is loaded; some of them are run."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config, known_keys
from automodel_lite.data.prepare import check_sizes
from automodel_lite.errors import ConfigError
from automodel_lite.training.rules import try_settings
from automodel_lite.training.settings import build_parts
from tests.properties.explore import explore

CHOICES = [  # options of groups; composing takes longer than all that follows
    (),
    ("lr_scheduler=wsd", "loss=cross_entropy"),
    ("packed_sequence=none", "lr_scheduler=linear"),
    ("peft=lora", "lr_scheduler=constant", "evaluation=exact_match"),
    ("dataset=files", "~dataset.num_chats", "dataset.path=x.jsonl"),
    ("dataset=streaming", "~dataset.num_chats", "dataset.path=x.jsonl"),
]
SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
]
MODEL = [
    f"model.config.{key}"
    for key in [*SIZES, "head_dim", "hidden_act", "model_type", "vocab_size", "rms_norm_eps"]
]

numbers = st.one_of(
    st.integers(-3, 20),
    st.sampled_from(
        [0, 1, 2, 3, 4, 7, 16, 63, 64, 100, 256, 10**6, 10**9, 2**31, 2**63, 10**30, -1, -(10**9)]
    ),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-8, 1e300, math.inf, -math.inf, math.nan]),
)
texts = st.one_of(
    st.sampled_from(
        ["", "none", "auto", "fp32", "ü/日本語", "x" * 300, "${seed}", "\0", "../../x", "1:00:00"]
    ),
    st.text(max_size=12),
)
scalars = st.one_of(numbers, texts, st.none(), st.booleans())
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.text(max_size=5), scalars, max_size=2),
)


@cache
def composed(choices: tuple[str, ...]) -> DictConfig:
    return compose_config("smoke", list(choices))


def keys_of(raw: DictConfig) -> list[str]:
    """Every key that a configuration has or may have."""

    def leaves(node: Any, prefix: str) -> list[str]:
        if not isinstance(node, dict):
            return [prefix]
        return [
            leaf
            for key, value in node.items()
            for leaf in leaves(value, f"{prefix}.{key}" if prefix else str(key))
        ]

    found = leaves(OmegaConf.to_container(raw, resolve=False), "")
    return sorted({*found, *known_keys(), *MODEL} - {"security.allow_targets"})


@st.composite
def drawn_settings(draw: st.DrawFn) -> tuple[tuple[str, ...], dict[str, Any]]:
    choices = draw(st.sampled_from(CHOICES))
    keys = keys_of(composed(choices))
    typo = st.sampled_from(keys).map(lambda key: f"{key}z")
    chosen = draw(
        st.lists(st.one_of(*[st.sampled_from(keys)] * 9, typo), min_size=1, max_size=3, unique=True)
    )
    return choices, {key: draw(values) for key in chosen}


def check(case: tuple[tuple[str, ...], dict[str, Any]]) -> None:
    choices, changes = case
    raw = copy.deepcopy(composed(choices))
    OmegaConf.set_struct(raw, False)
    for key, value in changes.items():
        try:
            OmegaConf.update(raw, key, value, force_add=True)
        except (
            OmegaConfBaseException,
            AssertionError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise ConfigError(f"what OmegaConf itself does not take: {error}") from error
    config = check_config(raw)
    check_sizes(config, 1)
    try_settings(config, build_parts(config))
    for key, value in changes.items():  # what was let through is what was asked for
        # where some families have no limit
        if isinstance(value, float) and not key.startswith("model.config."):
            assert math.isfinite(value), key


@pytest.mark.parametrize(
    "num_cases",
    [10, pytest.param(100, marks=pytest.mark.system), pytest.param(4000, marks=pytest.mark.slow)],
)
def test_settings_work_or_are_named(num_cases: int) -> None:
    counts = explore(drawn_settings(), check, num_cases)
    assert counts["sentence"] > num_cases / 10


OVERRIDES = st.one_of(
    st.text(max_size=30),
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from(["name", "seed", "training.max_steps", "dataset.path", "optimizer", "~loss", "+x", "hydra.run.dir", "model.config"]), st.text(max_size=12)),
    st.sampled_from(["=", "a=", "~", "~name", "a.b.c=1", "optimizer=", "optimizer=[adamw]", "x=${y}", "x=${oc.env:NOTHING}", "training=3", "name=ü", "dataset.path=/tmp/ü/x.jsonl", "x={", "training.max_steps=1,2"]),
)  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize("num_cases", [10, pytest.param(600, marks=pytest.mark.slow)])
def test_overrides_are_read_or_named(num_cases: int, tmp_path: Path) -> None:
    def compose(overrides: list[str]) -> None:
        check_config(compose_config("smoke", overrides))

    explore(st.lists(OVERRIDES, min_size=1, max_size=2), compose, num_cases)
