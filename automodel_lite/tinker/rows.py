"""From `Datum` to rows of the training client and back, and the losses by the service's names.

Tinker's losses are sums over all positions of a datum, also those of its prompt, whose weight or
advantage is 0; so are the log-probabilities that it returns.

Legend: N positions of a datum, K targets of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker import types

from automodel_lite.extras.client import Output
from automodel_lite.extras.client.targets import IDS, NO_TARGET, WEIGHTS, WeightedTargets
from automodel_lite.models.loss import CrossEntropy, Loss
from automodel_lite.parts.losses.policy import Cispo, Dro, Gspo, ImportanceSampling, Ppo
from automodel_lite.tinker.refusals import bad_request

Row = dict[str, Any]
_RL = frozenset({"target_tokens", "logprobs", "advantages"})
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OURS = {
    "logprobs": "old_log_probs",
    "advantages": "advantages",
    "weights": "loss_weights",
    "sequence_ratio_mask": "in_ratio",
}


@dataclass(frozen=True)
class LossFn:
    """make      of the configuration, defaults filled in
    needs     loss_fn_inputs that a datum must bring; `takes` others that it may
    defaults  of loss_fn_config
    """

    make: Callable[[Mapping[str, float]], Loss]
    needs: frozenset[str]
    takes: frozenset[str] = frozenset({"weights"})
    defaults: Mapping[str, float] | None = None


def _clipped(kind: type[Ppo] | type[Cispo], config: Mapping[str, float]) -> Loss:
    """Returns the loss with our widths of the service's thresholds."""
    low = 1 - config["clip_low_threshold"]
    return kind(clip_low=low, clip_high=config["clip_high_threshold"] - 1)


LOSSES = {
    "cross_entropy": LossFn(lambda config: CrossEntropy(), frozenset({"target_tokens"})),
    "importance_sampling": LossFn(lambda config: ImportanceSampling(), _RL),
    "ppo": LossFn(lambda config: _clipped(Ppo, config), _RL, defaults=_CLIP),
    "cispo": LossFn(
        lambda config: _clipped(Cispo, config),
        _RL,
        # a weight is bounded from above alone (tinker-cookbook 0.6.1, tutorials/202)
        defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": LossFn(lambda config: Dro(beta=config["beta"]), _RL, defaults={"beta": 0.05}),
    "gspo": LossFn(
        lambda config: _clipped(Gspo, config),
        _RL | {"sequence_ratio_mask"},
        # the paper's widths (arXiv:2507.18071)
        defaults={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
}
_NOT_HERE = (
    "stable_reinforce needs what the service records while it samples, and its objective is not "
    "published: use loss_fn='importance_sampling', 'cispo' or 'gspo'."
)


def loss_of(name: str, config: Mapping[str, float | str] | None) -> Loss:
    """Returns the loss of a name and its configuration; raises BadRequestError."""
    if name == "stable_reinforce":
        raise bad_request(_NOT_HERE)
    if name not in LOSSES:
        raise bad_request(f"loss_fn={name!r} is none of {', '.join(LOSSES)}.")
    defaults = dict(LOSSES[name].defaults or {})
    given = dict(config or {})
    if unknown := sorted(given.keys() - defaults.keys()):
        raise bad_request(
            f"loss_fn_config has {', '.join(unknown)}, which {name} does not use: it takes "
            f"{', '.join(defaults) or 'nothing'}."
        )
    values = {key: float(value) for key, value in (defaults | given).items()}
    low = values.get("clip_low_threshold", 0.0)
    high = values.get("clip_high_threshold", 1.0)
    if not all(map(math.isfinite, values.values())) or not low <= 1 <= high or low < 0:
        raise bad_request(
            f"loss_fn_config={given}: clip_low_threshold is from 0 to 1 and clip_high_threshold at "
            "least 1; all are finite numbers."
        )
    return LOSSES[name].make(values)


def rows_of(data: Sequence[Any], name: str) -> tuple[list[Row], Loss | None]:
    """Returns the rows of a loss by its name, and the loss of several targets where a datum has
    them; raises BadRequestError, which names the datum.
    """
    if not data:
        raise ValueError("No data provided")
    fn = LOSSES[name]
    inputs = [_inputs_of(datum, fn, name, number) for number, datum in enumerate(data)]
    ids = [token_ids(datum.model_input, f"datum {number}") for number, datum in enumerate(data)]
    widths = [found["target_tokens"].shape[1:] for found in inputs]
    if not any(widths):
        rows = []
        for own, found in zip(ids, inputs):
            row: Row = {"input_ids": own, "labels": found["target_tokens"]}
            row.update({OURS[key]: found[key] for key in found if key in OURS})
            rows.append(row)
        return rows, None
    if name != "cross_entropy":
        raise bad_request(f"{name} takes one target per position: target_tokens of shape [N].")
    # one width for all, the positions that have fewer are filled up
    most = max(width[0] if width else 1 for width in widths)
    return [_row_of_many(own, found, most) for own, found in zip(ids, inputs)], WeightedTargets()


def _row_of_many(ids: list[int], found: Mapping[str, np.ndarray], most: int) -> Row:
    targets_NK = found["target_tokens"].reshape(len(ids), -1)
    ones = np.ones(targets_NK.shape, np.float32)
    weights_NK = found.get("weights", ones).reshape(targets_NK.shape)
    missing = [(0, 0), (0, most - targets_NK.shape[1])]
    return {
        "input_ids": ids,
        IDS: np.pad(targets_NK, missing, constant_values=NO_TARGET),
        WEIGHTS: np.pad(weights_NK, missing),
    }


def _inputs_of(datum: Any, fn: LossFn, name: str, number: int) -> dict[str, np.ndarray]:
    found = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
    if missing := sorted(fn.needs - found.keys()):
        raise bad_request(f"datum {number}: loss_fn={name!r} needs loss_fn_inputs[{missing[0]!r}].")
    if unused := sorted(found.keys() - fn.needs - fn.takes):
        raise bad_request(
            f"datum {number}: loss_fn={name!r} does not use loss_fn_inputs[{unused[0]!r}]: leave "
            "it out."
        )
    length = datum.model_input.length
    shape = found["target_tokens"].shape
    for key, value in found.items():
        if value.shape[:1] != (length,) or (key == "weights" and value.shape != shape):
            raise bad_request(
                f"datum {number}: loss_fn_inputs[{key!r}] has the shape {list(value.shape)}, and "
                f"model_input has {length} tokens, target_tokens the shape {list(shape)}."
            )
        if not np.isfinite(value).all():
            position = int(np.argwhere(~np.isfinite(value))[0][0])
            raise bad_request(
                f"datum {number}: loss_fn_inputs[{key!r}] is not finite at position {position}: "
                "look at what computed it, or leave the datum out."
            )
    _check_log_probs(found, number)
    if "sequence_ratio_mask" in found:
        mask = found["sequence_ratio_mask"] != 0
        if not mask.any():
            raise bad_request(f"datum {number}: sequence_ratio_mask marks no token.")
        found["sequence_ratio_mask"] = mask.astype(np.float32)
    return found


def _check_log_probs(found: Mapping[str, np.ndarray], number: int) -> None:
    """Raises BadRequestError for probabilities in place of their logarithms, where they count."""
    if "logprobs" not in found:
        return
    # a server's arithmetic may round a certain token's above 0
    is_wrong = (found["logprobs"] > 1e-2) & (found["advantages"] != 0)
    if is_wrong.any():
        position = int(is_wrong.argmax())
        raise bad_request(
            f"datum {number}: loss_fn_inputs['logprobs'] is {found['logprobs'][position]:g} at "
            f"position {position}, and the logarithm of a probability is at most 0: pass the "
            "logprobs of the sampled sequence, for each target one."
        )


def token_ids(model_input: Any, whose: str) -> list[int]:
    """Returns the ids of a `ModelInput`; raises BadRequestError for images and sound."""
    try:
        return list(map(int, model_input.to_ints()))
    except ValueError:
        raise bad_request(
            f"{whose} has chunks that are not tokens: images and sound are not taken here."
        ) from None


def output_of(out: Output, data: Sequence[Any], metrics: Mapping[str, float]) -> Any:
    """Returns the service's record: log-probabilities of the targets, in their shape."""
    records = []
    for datum, found in zip(data, out.log_probs):
        own = np.ascontiguousarray(values_of(datum, found))
        records.append({"logprobs": types.TensorData.from_numpy(own)})
    return types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=dict(metrics)
    )


def values_of(datum: Any, values: Any) -> Any:
    """Returns values of a row in the shape of the datum's targets, [N] or [N, K]: rows of one call
    have as many targets as the widest of them.
    """
    shape = datum.loss_fn_inputs["target_tokens"].to_numpy().shape
    return values[:, : shape[1]] if len(shape) > 1 else values.reshape(len(values), -1)[:, 0]
