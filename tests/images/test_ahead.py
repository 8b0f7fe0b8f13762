"""Which tokens see those behind them, and which rank computes which image."""

from __future__ import annotations

import pytest
import torch

from automodel_lite.errors import ConfigError
from automodel_lite.models.source import describe
from automodel_lite.parts.images.ahead import Rule, ahead_of, find_rules, types_of
from automodel_lite.parts.images.probe import check_family
from benchmarks.image_families import image_config
from benchmarks.tiny_models import tiny_config

IMAGES, WHOLE = Rule(of_prompt=False, is_whole=False), Rule(of_prompt=False, is_whole=True)
PROMPT = Rule(of_prompt=True, is_whole=False)


def test_runs_of_an_image_end_with_their_document() -> None:
    types = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0])
    starts = torch.tensor([1, 0, 0, 0, 0, 0, 1, 0]).bool()
    assert ahead_of(types, starts, IMAGES).T.tolist() == [[0, 2, 1, 0, 0, 0, 0, 0], [0] * 8]
    assert ahead_of(types, starts, WHOLE)[:, 1].tolist() == [0, 0, 1, 2, 0, 0, 0, 0]
    assert ahead_of(types, starts, PROMPT)[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0]


def test_a_prompt_ends_where_the_first_answer_begins() -> None:
    image = torch.tensor([0, 5, 5, 0, 0, 0, 0])
    labels = torch.tensor([-100, -100, 7, 8, -100, 9, -100])
    starts = torch.tensor([1, 0, 0, 0, 1, 0, 0]).bool()
    assert types_of(image, labels, starts, of_prompt=True).tolist() == [0, 0, 0, 1, 0, 0, 1]
    assert types_of(image, labels, starts, of_prompt=False).tolist() == [0, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("qwen3_vl", {}),
        ("gemma3", {False: IMAGES, True: IMAGES}),
        ("gemma4_unified", {False: IMAGES, True: WHOLE}),
        ("paligemma", {False: PROMPT}),
    ],
)
def test_the_models_own_masks_tell_what_sees_ahead(family: str, rules: dict[bool, Rule]) -> None:
    assert find_rules(describe(tiny_config(family))) == rules


def test_images_that_see_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Molmo2.*: the keys that a token of an image sees are"):
        find_rules(describe(image_config("molmo2")))


def test_a_kernel_that_cannot_is_refused() -> None:
    class Causal:
        name = "thd_causal"

    described = describe(tiny_config("gemma3"))
    with pytest.raises(ConfigError, match=r"attention=causal does not support .* see each other"):
        check_family(described, {True: IMAGES}, Causal())
