"""A step counted from models of few layers: what one more pattern of layers adds, as often as the
whole model has it; and the steps between, that recompute some of the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from automodel_lite.attention.spec import layer_shapes
from automodel_lite.extras.plan.simulation import Simulation, counting, simulate
from automodel_lite.extras.short_models import with_layers
from automodel_lite.models.layers import decoder_layers
from automodel_lite.models.source import describe
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.thd import ThdBatch
from automodel_lite.training.settings import RunParts

PLACES = tuple(
    f"backward of the {layer}" for layer in ("first layer", "second", "last but one", "last")
)


def simulate_by_layers(
    parts: RunParts,
    model_config: PretrainedConfig,
    shape: MeshShape,
    pattern: LayerPattern,
    batch: ThdBatch | None = None,
) -> Simulation:
    """`simulate` of a step alone, in about a second: models of few layers are run, and what one
    more pattern of them adds is added as often as the whole model has it; `after_layers` are those
    of the few. A model that is hardly longer is run as it is, and has a peak for each layer.

    All that is held and done grows linearly with the layers, and so does the peak of each place of
    the backward pass: most may be held at its begin, where all activations are left, or at its end,
    where all gradients are there. The peaks of four layers are therefore told apart: what lies
    between them is on the line from one to the next.
    """
    period = math.lcm(pattern.period, parts.advanced.recompute_every_layers)
    # the first, the last, and one of each kind whose neighbors are gathered ahead and reduced
    # behind it
    few = pattern.first + period * math.ceil((2 + period) / period)

    def of_layers(number: int) -> Simulation:
        with counting(model_config, shape):
            few_layers = with_layers(model_config, number)
        found = simulate(parts, few_layers, shape, batch, is_whole=False)
        layers = [found.peaks.pop(f"backward {layer}", 0) for layer in range(number)]
        inner = layers[1:-1] or layers
        found.peaks.update(
            zip(PLACES, (layers[0], max(inner[:period]), max(inner[-period:]), layers[-1]))
        )
        return found

    if pattern.num_layers <= few + period:
        return simulate(parts, model_config, shape, batch, is_whole=False)
    one = of_layers(few)
    times = (pattern.num_layers - few) / period
    whole = interpolate(one, of_layers(few + period), times)
    return replace(whole, after_layers=one.after_layers)


def recompute_every(
    every: int, kept: Simulation, recomputed: Simulation, pattern: LayerPattern
) -> Simulation:
    """Returns the step that recomputes each `every`-th layer, from `simulate_by_layers` of no layer
    and of all of them.

    Memory is exact: what other layers hold adds up, and in the backward pass a layer needs beside
    that what it needs in the model whose layers are all of its kind. Work is a share of both, as if
    layers were alike.
    """
    total = pattern.num_layers
    spared = list(np.diff(np.subtract(kept.after_layers, recomputed.after_layers), prepend=0))
    while len(spared) < total:
        spared += spared[-pattern.period :]
    is_recomputed = np.arange(total) % every == 0
    by_recomputed, by_kept = (
        np.cumsum(np.where(of, spared[:total], 0)) for of in (is_recomputed, ~is_recomputed)
    )
    # a layer's backward pass begins with what the layers before it hold, and it itself
    held = np.where(
        is_recomputed,
        _peaks_of_layers(recomputed, total) + by_kept,
        _peaks_of_layers(kept, total) - by_recomputed,
    )
    found = interpolate(kept, recomputed, is_recomputed.mean())
    # the end of the forward pass has the last layer behind it
    step, more = (recomputed, by_kept[-1]) if is_recomputed[-1] else (kept, -by_recomputed[-1])
    ends = {phase: round(step.peaks[phase] + more) for phase in ("forward", "backward")}
    others = {
        phase: peak for phase, peak in found.peaks.items() if not phase.startswith("backward ")
    }
    ends["backward"] = max(ends["backward"], round(held.max()))
    return replace(found, peaks=others | ends)


def _peaks_of_layers(step: Simulation, total: int) -> np.ndarray:
    """Returns the peak of each layer's backward pass."""
    if PLACES[0] not in step.peaks:
        return np.array([step.peaks.get(f"backward {layer}", 0) for layer in range(total)])
    return np.interp(
        range(total), (0, 1, total - 2, total - 1), [step.peaks[place] for place in PLACES]
    )


@dataclass(frozen=True)
class LayerPattern:
    """How the layers of a model repeat: after the `first` ones, every `period` of them is alike."""

    num_layers: int
    first: int
    period: int


def layer_pattern(model_config: PretrainedConfig) -> LayerPattern:
    """Compares the weights and the attention of all layers; a model without a pattern is its own
    period.
    """
    weights = [
        tuple((name, weight.shape) for name, weight in layer.named_parameters())
        for layer in decoder_layers(describe(model_config))
    ]
    kinds = list(zip(weights, layer_shapes(model_config)))
    total = len(kinds)
    for first, period in sorted(((f, p) for f in range(4) for p in range(1, total // 3)), key=sum):
        if all(kinds[i] == kinds[i + period] for i in range(first, total - period)):
            return LayerPattern(total, first, period)
    return LayerPattern(total, 0, total)


def interpolate(one: Simulation, two: Simulation, times: float) -> Simulation:
    """Returns `one` and `times` the difference that `two` makes, each phase by itself."""

    def along(first: Any, second: Any) -> Any:
        if isinstance(first, dict):
            return {
                key: along(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}
            }
        return first + times * (second - first)

    sizes = ("weights", "gradients", "optimizer")
    values = {
        name: along(getattr(one, name), getattr(two, name))
        for name in (*sizes, "peaks", "at_peak", "work")
    }
    values |= {name: round(values[name]) for name in sizes}
    values["peaks"] = {phase: round(value) for phase, value in values["peaks"].items()}
    return Simulation(**values)
