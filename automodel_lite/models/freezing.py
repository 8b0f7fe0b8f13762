"""Weights that `model.freeze` leaves out of the training, by their names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

import transformers
from torch import nn

from automodel_lite.attention.spec import FAMILIES
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import towers

_PROJECTOR = re.compile(FAMILIES["projectors"])


def freeze_named(lm: transformers.PreTrainedModel, patterns: Sequence[str]) -> list[str]:
    """Freezes the weights that the patterns name, in place; returns a line for each pattern.

    patterns  parts of names between dots, with shell wildcards: embed_tokens, layers.[0-7],
              layers.*.mlp; vision, the encoders of images, without a projector, under any family's
              names
    Raises ConfigError for a pattern without a match, and where nothing is left to train.
    """
    lines = []
    for pattern in patterns:
        found = named_weights(lm, pattern)
        if not found:
            names = ", ".join(name for name, _ in [*lm.named_parameters()][:3])
            raise ConfigError(
                f"model.freeze={patterns}: no weight is named {pattern}; their names are {names} "
                "..."
            )
        for parameter in found:
            parameter.requires_grad_(False)
        line = (
            f"frozen {pattern}: {len(found)} weights, {sum(p.numel() for p in found) / 1e6:,.2f} M "
            "parameters"
        )
        # tied: one weight under two names
        if others := _other_names(lm, pattern, found):
            line += f", which are {', '.join(others)} too"
        lines.append(line)
    if not any(p.requires_grad for p in lm.parameters()):
        raise ConfigError(f"model.freeze={patterns} leaves no weight to train.")
    return lines


def _other_names(
    lm: transformers.PreTrainedModel, pattern: str, found: set[nn.Parameter]
) -> list[str]:
    """Returns names of the weights that are found by one name and that the pattern does not name by
    another.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if parameter in found:
            names.setdefault(parameter, []).append(name)
    return [
        name
        for of_one in names.values()
        if len(of_one) > 1
        for name in of_one
        if not _matches(name, pattern)
    ]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")


def named_weights(lm: transformers.PreTrainedModel, pattern: str) -> set[nn.Parameter]:
    """Returns the weights that a pattern names."""
    # a tied weight has two names
    named = lm.named_parameters(remove_duplicate=False)
    found = {p for name, p in named if _matches(name, pattern)}
    if pattern == "vision":
        of_images = towers(lm)
        encoders = [x for x in of_images if isinstance(x, transformers.PreTrainedModel)]
        has_projector_inside = len(encoders) == len(of_images)
        for encoder in encoders:
            for name, p in encoder.named_parameters():
                if not (has_projector_inside and _PROJECTOR.match(name)):
                    found.add(p)
    return found


def check_frozen(
    lm: transformers.PreTrainedModel, patterns: Sequence[str], train_towers: bool
) -> None:
    """Raises ConfigError where one of `model.freeze` and `model.train_towers` does nothing."""
    of_towers = {p for tower in towers(lm) for p in tower.parameters()}
    if train_towers and not any(p.requires_grad for p in of_towers):
        raise ConfigError(
            f"model.train_towers=true trains nothing, as model.freeze={patterns} freezes all of "
            "the towers: leave both out, or name less of them."
        )
    for pattern in () if train_towers else patterns:
        if named_weights(lm, pattern) <= of_towers:
            raise ConfigError(
                f"model.freeze={patterns}: {pattern} is not trained without "
                "model.train_towers=true: set it too, or leave it out."
            )
