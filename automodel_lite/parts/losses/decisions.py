"""Decisions: the choices of a question against each other, and no other token of the vocabulary.

The columns `choice_ids`, `choice_weights` and `question_numbers` hold the choices of a question on
the tokens up to its label (data/tokens/decisions.py); `prepare` gathers them at the label, before
ranks share the stream.

    loss of a question   - sum over its choices c of target(c) * log softmax over its choices(c)

Legend: T tokens, R rows that carry a label (each is a question), K choices, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from automodel_lite.errors import DataError
from automodel_lite.evaluation.decisions import (
    Answered,
    fit_temperature,
    numbers_by_name,
    numbers_of,
)
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.thd import ThdBatch


@dataclass(frozen=True)
class Decisions(Loss):
    """Cross-entropy over the choices of each question, hard or soft, by its weight: a mean over
    the questions of the step.
    """

    columns: ClassVar[frozenset[str]] = frozenset(
        {"choice_ids", "choice_weights", "question_numbers"}
    )
    required: ClassVar[frozenset[str]] = columns
    of_text: ClassVar[bool] = False
    unit: ClassVar[str] = "nats per question"

    def prepare(self, batch: ThdBatch) -> ThdBatch:
        """Adds the choices of each question at its label, [T, K]."""
        # a pack of padding alone, and one of `example_columns`
        if "choice_ids" not in batch.columns or "choices" in batch.columns:
            return batch
        rows = batch.label_rows
        number_T = batch.columns["question_numbers"]
        if (number_T[rows] == 0).any():
            raise DataError(
                "a label has no choices, and loss=decisions compares those of each: train on "
                "questions with fixed choices alone."
            )
        # A question's tokens are a run of its number, which ends at the label.
        is_first_T = torch.ones_like(number_T, dtype=torch.bool)
        is_first_T[1:] = number_T[1:] != number_T[:-1]
        places_T = torch.arange(len(number_T))
        first_R = torch.where(is_first_T, places_T, 0).cummax(0).values[rows]
        num_choices_R = rows - first_R + 1
        width = int(num_choices_R.max()) if len(rows) else 1
        offsets_K = torch.arange(width)
        at_RK = (first_R[:, None] + offsets_K).clamp(max=max(len(number_T) - 1, 0))
        exists_RK = offsets_K < num_choices_R[:, None]
        choices_TK = torch.full((len(number_T), width), -1)
        targets_TK = torch.zeros(len(number_T), width)
        choices_TK[rows] = torch.where(exists_RK, batch.columns["choice_ids"][at_RK], -1)
        targets_TK[rows] = torch.where(exists_RK, batch.columns["choice_weights"][at_RK], 0.0)
        made = {"choices": choices_TK, "choice_targets": targets_TK}
        return replace(batch, columns=batch.columns | made)

    def num_items(self, batch: ThdBatch) -> float:
        """Counts questions by their weights."""
        if "choice_weights" not in batch.columns:
            return 0.0
        return float(batch.columns["choice_weights"].sum(dtype=torch.float64))

    def rows_to_judge(self, inputs: LossInputs) -> Tensor:
        """Returns number and right place of each question, log-probabilities of its choices, and
        their targets, fp64 [R, 2 + 2 K].
        """
        choices_RK = inputs.columns["choices"]
        log_probs_RK = inputs.rows(choice_log_probs, choices_RK)
        place_R = (choices_RK == inputs.labels_R[:, None]).int().argmax(-1)
        # on the host, as not every device knows fp64, in which numbers are whole
        parts = [inputs.columns["question_numbers"][:, None], place_R[:, None]]
        parts += [log_probs_RK, inputs.columns["choice_targets"]]
        return torch.cat([part.cpu().double() for part in parts], 1)

    def judge(self, rows: Sequence[np.ndarray]) -> dict[str, float]:
        """Returns the calibration error, the share of records with all answers right, and the
        temperature that calibrates these answers, with the error at it.
        """
        answered = Answered.of(rows).known()
        if not len(answered):
            return {}
        temperature = fit_temperature(answered)
        return {
            "ece": answered.metrics()["ece"],
            "records_right": answered.records_right(),
            "temperature": temperature,
            "calibrated_ece": answered.metrics(temperature)["ece"],
        }

    def details(
        self, judged: Mapping[str, Sequence[np.ndarray]], documents: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the numbers of each set, of the questions of each name in it, and the temperature
        that is fitted on the first set.
        """
        sets = {}
        fitted: dict[str, Any] = {}
        for name, rows in judged.items():
            answered = Answered.of(rows).known()
            if not len(answered):
                continue
            temperature = fit_temperature(answered)
            # the first set's, as one model has one temperature
            fitted = fitted or {"temperature": temperature, "set": name, "questions": len(answered)}
            by_name = numbers_by_name(answered, documents[name]) if name in documents else {}
            sets[name] = numbers_of(answered, temperature) | {"by_question": by_name}
        return {"fitted": fitted, "held_out": sets}

    def example_columns(self, batch: ThdBatch) -> dict[str, Tensor]:
        """Makes what is made of a stream, too: two choices."""
        made = super().example_columns(batch)
        shape = len(batch.labels), 2
        made["choices"] = torch.arange(2, device=batch.labels.device).expand(shape)
        made["choice_targets"] = torch.zeros(shape, device=batch.labels.device)
        return made

    def __call__(self, inputs: LossInputs) -> LossOutput:
        choices_RK = inputs.columns["choices"]
        targets_RK = inputs.columns["choice_targets"]
        values_R3 = inputs.rows(loss_hit_and_brier, choices_RK, targets_RK, inputs.labels_R)
        total, hits, brier = values_R3.sum(0).unbind()
        return LossOutput(total, {"accuracy": hits, "brier": brier})


def choice_log_probs(logits: Tensor, choices: Tensor) -> Tensor:
    """Returns log-probabilities of choices [r, K] among themselves; -inf where there is none."""
    own = logits.gather(-1, choices.clamp(min=0)).masked_fill(choices < 0, -torch.inf)
    return own.log_softmax(-1)


def loss_hit_and_brier(logits: Tensor, choices: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each question, whether its likeliest choice is right, and the squared
    error of its probabilities, [r, 3], by its weight.
    """
    targets = targets.to(logits.dtype)
    log_probs = choice_log_probs(logits, choices)
    losses = -(targets * log_probs.masked_fill(choices < 0, 0.0)).sum(-1)
    weights = targets.sum(-1)
    likeliest = choices.gather(-1, log_probs.argmax(-1, keepdim=True)).squeeze(-1)
    # weighted questions: sum of w (p - t)^2, with targets = w t
    wanted = targets / weights.clamp(min=torch.finfo(weights.dtype).tiny)[:, None]
    errors = (log_probs.exp() - wanted).square().sum(-1)
    return torch.stack([losses, weights * (likeliest == labels), weights * errors.detach()], 1)
