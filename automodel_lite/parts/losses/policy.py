"""Losses of policies: rows that a model has sampled, how good each was, and how likely it was then.

advantages           of each label: how much better its row was than expected; made of the next two
                     where they are not given
reward, group        of a row: how good it was, and which rows answer the same prompt
old_log_probs        of the labels, by the weights that sampled them; without, those of now, so that
                     every ratio is 1 and its gradient that of the log-probability
sampler_log_probs    of the labels, by the sampler's own arithmetic, where that is another
reference_log_probs  of the labels, by the start model

    ratio = exp(new - old)         of a label; of GSPO the mean over its row, in the logarithm
    sum over labels of  weight * (-objective(ratio, advantage) + kl * divergence from the reference)

A loss is divided by the labels of the whole optimizer step, or by its rows, each of which is then
the mean over its labels, or has the same constant length. What the rows are is known inside of
trees, too: the rows of a tree share no label.

Legend: R rows that carry a label (labels), M rows as they were given (rows).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from automodel_lite.columns import IGNORE_INDEX, Column
from automodel_lite.config.rules import Only, Range
from automodel_lite.errors import counted
from automodel_lite.models.loss import AveragedLoss, LossInputs, LossOutput
from automodel_lite.thd import ThdBatch

Share = Annotated[float, Range(0, 1_000_000)]
Length = Annotated[float, Range(1, 1_000_000)]
PolicyAverage = Literal["labels", "documents", "rows", "turns", "constant"]
Kl = Literal["k1", "k2", "k3"]
Advantage = Literal["grpo", "dr_grpo", "leave_one_out"]
OF_ROWS = frozenset({"reward", "row_group", "row_number"})
LEAST_DEVIATION = 1e-4  # as TRL's GRPO adds to the standard deviation


@dataclass(frozen=True)
class PolicyLoss(AveragedLoss):
    """An objective per label, and what all of them share: weights, divergence, averages.

    kl               weight of the divergence from `reference_log_probs`
    kl_kind          its estimate: k1 = new - reference, k2 = half its square, k3 = exp(-k1) - 1 +
                     k1 (http://joschu.net/blog/kl-approx.html); gradients are those of the estimate
    average          labels: the mean over all labels of the step (DAPO); documents, or rows, which
                     is the same: over its rows, of the mean over each (GRPO); turns: of the mean
                     over each turn; constant: over its rows, of the sum over each divided by
                     `constant_length` (Dr. GRPO)
    advantage        made of rewards, which are compared inside each group: grpo divides their
                     distance from the mean by the standard deviation, dr_grpo does not, and
                     leave_one_out takes the mean of the others
    truncation       largest weight of a label whose sampler had other numbers: min(exp(old -
                     sampler), truncation); 0 = no weights
    """

    own_columns: ClassVar[Mapping[str, Column]] = {
        # -inf tells rows that bring none; NaN would be no equal beginning of two rows
        "advantages": Column("float32", "float32", -math.inf),
        "old_log_probs": Column("float32", "float32", -math.inf),
        "sampler_log_probs": Column("float32", "float32", -math.inf),
        "reward": Column("float32", "float32", -math.inf, of_row="value"),
        "row_group": Column("int64", "int64", 0, of_row="group"),
        "row_number": Column("int64", "int64", 0, of_row="number"),
    }
    columns = AveragedLoss.columns | {"reference_log_probs"}
    required = frozenset({"advantages"})
    settings_of: ClassVar[Mapping[str, str]] = {
        "truncation": "sampler_log_probs",
        "advantage": "reward",
        "clip_low": "old_log_probs",
        "clip_high": "old_log_probs",
        "beta": "old_log_probs",
    }
    needs_documents = True
    separates_rows = True

    kl: Share = 0.0  # weight of the divergence from the reference
    kl_kind: Annotated[Kl, Only("kl")] = "k3"  # its estimate
    # over labels, documents (rows), turns, or rows of a constant length
    average: PolicyAverage = "labels"
    constant_length: Annotated[Length, Only("average", "constant")] = 1024.0  # of average=constant
    advantage: Advantage = "grpo"  # made of the columns reward and group
    truncation: Share = 2.0  # largest weight of a label whose sampler had other numbers; 0 = none

    def __post_init__(self) -> None:
        if self.kl:
            object.__setattr__(self, "required", self.required | {"reference_log_probs"})
            object.__setattr__(self, "needs_reference", True)

    def complete(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Any]]:
        """Returns the rows with advantages where they bring a reward; rows of one list are a group
        unless they name theirs. Where all groups have equal rewards, which a step of few prompts
        may have, all advantages are 0: only the divergence is left to learn.
        """
        rows = [(row, number) for number, group in enumerate(groups) for row in group]
        if not any("reward" in row for row, _ in rows):
            return super().complete(groups)
        for number, (row, _) in enumerate(rows):
            if "reward" not in row or "advantages" in row:
                raise ValueError(
                    f"row {number} must bring a reward and no advantages, as others do."
                )
        rewards = np.array([float(row["reward"]) for row, _ in rows])
        names = [str(row.get("group", number)) for row, number in rows]
        found = iter(_compared(rewards, names, self.advantage).tolist())
        return [[_with_advantage(row, next(found)) for row in group] for group in groups]

    def counts_of(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
        """Returns the number of groups whose rows have equal rewards, a row that is alone among
        them, where rows bring rewards.
        """
        named = [
            (str(row.get("group", number)), float(row["reward"]))
            for number, group in enumerate(groups)
            for row in group
            if "reward" in row
        ]
        if not named:
            return {}
        names, rewards = zip(*named)
        distances = _compared(rewards, names, "dr_grpo")
        differing = {name for name, distance in zip(names, distances) if distance}
        return {"equal_groups": float(len({*names} - differing))}

    def derived(self, brought: Iterable[str]) -> frozenset[str]:
        """Names the advantages, where rows bring rewards and groups in their place."""
        names = {*brought}
        is_made = names >= OF_ROWS and "advantages" not in names
        return frozenset({"advantages"} if is_made else ())

    def derive(
        self, columns: Mapping[str, np.ndarray], offsets: np.ndarray, trains: bool
    ) -> dict[str, np.ndarray]:
        """Returns the advantages at the labels of rows that bring rewards and groups; rows that
        are not learned from may have equal rewards, and advantages of 0.
        """
        at_R = np.flatnonzero(np.asarray(columns["labels"]) != IGNORE_INDEX)
        # rows of a tree share no label, as their numbers differ there
        _, first_M, row_R = np.unique(
            columns["row_number"][at_R], return_index=True, return_inverse=True
        )
        rewards_M = columns["reward"][at_R][first_M]
        groups_M = columns["row_group"][at_R][first_M]
        is_lacking_M = (groups_M == 0) | ~np.isfinite(rewards_M)
        if is_lacking_M.any():
            raise ValueError(
                f"{counted(int(is_lacking_M.sum()), 'row', 'brings')} no `reward` or no `group`, "
                "and others do: rewards are compared among the rows that answer the same prompt."
            )
        advantages_T = np.zeros(int(offsets[-1]), np.float32)
        compare = advantages_of if trains else _compared
        advantages_T[at_R] = compare(rewards_M, groups_M, self.advantage)[row_R]
        return {"advantages": advantages_T}

    @abstractmethod
    def objective(self, inputs: LossInputs, log_ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what each label adds to the objective, [R], and whether its ratio was clipped.

        log_ratio_R  new - old, with gradients
        """

    def log_ratio(self, inputs: LossInputs, log_ratio_R: Tensor) -> Tensor:
        """Returns the ratio that is clipped or truncated, in the logarithm: that of each label."""
        return log_ratio_R

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        """Makes values that any row could bring."""
        made = super().example_columns(batch)
        return {name: torch.zeros_like(values) for name, values in made.items()}

    def __call__(self, inputs: LossInputs) -> LossOutput:
        new_R = inputs.log_probs()
        old_R = inputs.columns.get("old_log_probs", new_R.detach())
        values_R, is_clipped_R = self.objective(inputs, new_R - old_R)
        losses_R = -values_R
        parts = {
            "ratio": (new_R - old_R).exp(),
            "clipped": is_clipped_R.to(new_R.dtype),
            "kl_old": (old_R - new_R).exp() - 1 - (old_R - new_R),
        }
        if (sampled_R := inputs.columns.get("sampler_log_probs")) is not None and self.truncation:
            weights_R = self.log_ratio(inputs, old_R - sampled_R).exp().clamp(max=self.truncation)
            losses_R = losses_R * weights_R
            parts["sampler_weight"] = weights_R
        if (reference_R := inputs.columns.get("reference_log_probs")) is not None:
            divergence_R = divergence(new_R, reference_R, self.kl_kind)
            losses_R = losses_R + self.kl * divergence_R
            parts["kl"] = divergence_R
        weights_R = self._weights(inputs, new_R)
        return LossOutput(
            (losses_R * weights_R).sum(),
            {name: (part.detach() * weights_R).sum() for name, part in parts.items()},
        )

    def _weights(self, inputs: LossInputs, like_R: Tensor) -> Tensor:
        """Returns what each label weighs, so that the sum over a row is its average."""
        if self.average == "constant":
            weights_R = inputs.columns.get("loss_weights", torch.ones_like(like_R))
            return weights_R / self.constant_length
        found_R = self.label_weights(inputs)
        return torch.ones_like(like_R) if found_R is None else found_R


@dataclass(frozen=True)
class ImportanceSampling(PolicyLoss):
    """ratio * advantage: REINFORCE where `old_log_probs` are not given."""

    def objective(self, inputs: LossInputs, log_ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        advantages_R = inputs.columns["advantages"]
        return log_ratio_R.exp() * advantages_R, torch.zeros_like(log_ratio_R)


@dataclass(frozen=True)
class Ppo(PolicyLoss):
    """The smaller of ratio * advantage and clipped ratio * advantage (arXiv:1707.06347), with two
    widths (DAPO, arXiv:2503.14476); with advantages of groups it is GRPO (arXiv:2402.03300).
    """

    clip_low: Share = 0.2  # the ratio is clipped below 1 - clip_low
    clip_high: Share = 0.2  # and above 1 + clip_high

    def objective(self, inputs: LossInputs, log_ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        advantages_R = inputs.columns["advantages"]
        ratio_R = self.log_ratio(inputs, log_ratio_R).exp()
        plain_R = ratio_R * advantages_R
        clipped_R = ratio_R.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_R
        return torch.minimum(plain_R, clipped_R), clipped_R < plain_R


@dataclass(frozen=True)
class Gspo(Ppo):
    """PPO with the ratio of the whole row, to the power of 1 / its labels (arXiv:2507.18071).

    Its value is the row's and its gradient the label's own (GSPO-token): where the advantages of a
    row are equal, that is the gradient of GSPO. The column `in_ratio`, 1 or 0, tells the labels
    that the row's ratio is the mean of, where it is not of all.
    """

    own_columns: ClassVar[Mapping[str, Column]] = {"in_ratio": Column("float32", "float32", 1.0)}

    clip_low: Share = 3e-4
    clip_high: Share = 4e-4

    def log_ratio(self, inputs: LossInputs, log_ratio_R: Tensor) -> Tensor:
        """Returns the mean over the row, at each of its labels."""
        own_R = log_ratio_R.detach()
        in_R = inputs.columns.get("in_ratio", torch.ones_like(own_R))
        sums_M, counts_M = inputs.per_row(torch.stack([own_R * in_R, in_R], 1)).unbind(1)
        return inputs.at_labels(sums_M / counts_M.clamp(min=1)) + (log_ratio_R - own_R)


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """log-probability * advantage, weighted by the clipped ratio, which has no gradient
    (arXiv:2506.13585).
    """

    clip_low: Share = 1.0  # the ratio is clipped below 1 - clip_low
    clip_high: Share = 4.0  # and above 1 + clip_high

    def objective(self, inputs: LossInputs, log_ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        ratio_R = log_ratio_R.detach().exp()
        weights_R = ratio_R.clamp(1 - self.clip_low, 1 + self.clip_high)
        values_R = weights_R * inputs.columns["advantages"] * inputs.log_probs()
        return values_R, weights_R != ratio_R


@dataclass(frozen=True)
class Dro(PolicyLoss):
    """log-probability * advantage - beta / 2 * log(ratio)^2 (arXiv:2405.19107), per label."""

    beta: Share = 0.05  # weight of the distance from the weights that sampled

    def objective(self, inputs: LossInputs, log_ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        values_R = inputs.log_probs() * inputs.columns["advantages"]
        values_R = values_R - self.beta / 2 * log_ratio_R.square()
        return values_R, torch.zeros_like(log_ratio_R)


def advantages_of(rewards: ArrayLike, groups: ArrayLike, kind: Advantage = "grpo") -> np.ndarray:
    """Returns how much better each row was than its group, fp64 [M]; 0 for one that is alone.

    rewards  [M], finite
    groups   [M], equal for rows that answer the same prompt
    Raises ValueError where all are 0, as there is nothing to learn.

    >>> advantages_of([1.0, 0.0, 0.0, 0.0], "aabb", "dr_grpo")
    array([ 0.5, -0.5,  0. ,  0. ])
    """
    advantages_M = _compared(rewards, groups, kind)
    if not advantages_M.any():
        raise ValueError(
            "the rewards of each group are equal, so all advantages are 0 and there is nothing to "
            "learn: draw several answers to a prompt, and prompts of which some answers are right "
            "and some wrong."
        )
    return advantages_M


def _compared(rewards: ArrayLike, groups: ArrayLike, kind: Advantage) -> np.ndarray:
    rewards_M = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards_M).all():
        row = int(np.argmin(np.isfinite(rewards_M)))
        raise ValueError(f"row {row}: its reward is {rewards_M[row]}, and must be a finite number.")
    names = np.asarray(list(groups) if isinstance(groups, str) else groups)
    _, group_M = np.unique(names, return_inverse=True)
    sizes = np.bincount(group_M)[group_M]
    means = np.bincount(group_M, rewards_M)[group_M] / sizes
    distances = rewards_M - means
    distances[np.abs(distances) < 1e-12] = 0.0
    others = np.maximum(sizes - 1, 1)
    if kind == "leave_one_out":
        return distances * sizes / others
    if kind == "dr_grpo":
        return distances
    variances = np.bincount(group_M, distances**2)[group_M] / others
    return distances / (np.sqrt(variances) + LEAST_DEVIATION)


def _with_advantage(row: Mapping[str, Any], advantage: float) -> dict[str, Any]:
    labels = np.asarray(row["labels"])
    kept = {name: value for name, value in row.items() if name not in ("reward", "group")}
    return kept | {"advantages": np.where(labels == IGNORE_INDEX, 0.0, advantage)}


def divergence(new_R: Tensor, reference_R: Tensor, kind: Kl) -> Tensor:
    """Returns the estimate of each label's divergence from the reference, [R]."""
    difference_R = new_R - reference_R
    if kind == "k1":
        return difference_R
    if kind == "k2":
        return difference_R.square() / 2
    return (-difference_R).exp() - 1 + difference_R
