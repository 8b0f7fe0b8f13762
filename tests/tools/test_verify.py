"""Differences of two steps, with numbers to check by hand; the first layers of a model, each kind included."""

from __future__ import annotations

import math

import pytest
import torch

from automodel_lite.errors import ConfigError
from automodel_lite.extras import verify
from automodel_lite.extras.verify import Check, Difference, Step, difference, first_layers, table
from automodel_lite.models.source import CausalLM

WANT = Step(2.0, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})


def test_relative_differences() -> None:
    got = difference(Step(2.5, {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])}), WANT)
    assert WANT.grad_norm == 5.0
    assert got.loss == 0.25
    assert got.gradients == 0.25
    assert got.grad_norm == pytest.approx(26**0.5 / 5 - 1)
    assert max(got) == 0.25


def test_a_parameter_without_a_gradient_has_zeros() -> None:
    """What is missing, or there beside what is wanted, is a difference; zeros are none."""
    zeros = {"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(3)}
    assert difference(Step(2.0, {**WANT.gradients, "c": zeros["c"]}), WANT).gradients == 0
    assert difference(Step(2.0, {"a": WANT.gradients["a"]}), WANT).gradients == 1.0
    more = {**WANT.gradients, "c": torch.tensor([0.0, 2.0])}
    assert difference(Step(2.0, more), WANT).gradients == 0.5


def test_verdicts() -> None:
    near, far = Difference(0, 1e-6, 0), Difference(0, 1e-2, 0)
    checks = [Check("near", near, 1e-5), Check("far", far, 1e-5)]
    faults = [Check("seen", far, 1e-5, is_fault=True), Check("unseen", near, 1e-5, is_fault=True)]
    assert [check.passed for check in (*checks, *faults)] == [True, False, True, False]
    lines = table([*checks, *faults]).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "PASS",
        "FAIL",
        "noticed",
        "FAIL: not noticed",
    ]


def test_what_is_not_a_number_fails() -> None:
    """The largest of some numbers was not a NaN among them: a NaN gradient beside a right loss passed."""
    nan = float("nan")
    for place in range(3):
        numbers = Difference(*(nan if place == i else 0.0 for i in range(3)))
        assert not Check("broken", numbers, 1e-5).passed
        assert Check("broken on purpose", numbers, 1e-5, is_fault=True).passed
    got = difference(Step(2.0, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([nan])}), WANT)
    assert math.isnan(got.gradients)


class Tokenizer:
    """What a model from scratch asks of its tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    def __len__(self) -> int:
        return 64


SETTINGS = {
    "model_type": "gemma2",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}
SETTINGS |= {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 6}
FULL, SLIDING = "full_attention", "sliding_attention"


def test_a_small_model_is_whole() -> None:
    source = CausalLM(config=dict(SETTINGS))
    same, words = first_layers(source, Tokenizer(), torch.device("cpu"))  # type: ignore[arg-type]
    assert same.overrides == source.overrides
    assert words.startswith("all 6 layers")


def test_a_model_that_cannot_be_built_gets_a_sentence() -> None:
    rope = {"rope_type": [1], "rope_theta": 10000.0}
    source = CausalLM(config={**SETTINGS, "rope_parameters": rope})
    with pytest.raises(ConfigError, match=r"a model with these settings does not work"):
        first_layers(source, Tokenizer(), torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [([SLIDING, FULL] * 3, 2), ([SLIDING] * 3 + [FULL] * 3, 4)],
    ids=["alternating", "late"],
)
def test_a_large_model_keeps_every_kind_of_layer(
    kinds: list[str], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(verify.LARGEST_PARAMETERS, "cpu", 1000)
    source = CausalLM(config={**SETTINGS, "layer_types": kinds})
    cut, words = first_layers(source, Tokenizer(), torch.device("cpu"))  # type: ignore[arg-type]
    config = cut.config(Tokenizer())  # type: ignore[arg-type]
    assert words.startswith(f"the first {kept} of 6 layers")
    assert config.num_hidden_layers == kept
    assert config.layer_types == kinds[:kept]
