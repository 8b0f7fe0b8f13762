"""What a run that has finished should be told of how it ended: that it was too short, and what to
set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from automodel_lite.config.schema import TrainingConfig

FALL = 0.05  # of the loss, from one third of the run to the next: noise is less
LEAST_FALL = 0.02  # nats
LEARNED = 0.05  # nats per label: less to learn is left than a longer run is worth
FEWEST_ROWS = 5  # of the log, of which a trend can be told
LEAST_IN_FORM = 0.5  # of the answers
MOST_STEPS = 1000  # the length of longer runs is somebody's plan


def ending_notes(
    rows: Sequence[Mapping[str, Any]],
    training: TrainingConfig,
    num_epochs: float | None,
    should_settle: bool = True,
) -> Iterator[str]:
    """Yields the notes of a run with these rows of metrics.jsonl.

    num_epochs     that it made; None of a stream
    should_settle  its loss falls until the data are learned: not that of pairs or of policies
    """
    longer = longer_settings(training, num_epochs)
    losses = [float(row["loss"]) for row in rows if isinstance(row.get("loss"), int | float)]
    is_short = all(row["step"] <= MOST_STEPS for row in rows)
    if should_settle and is_short and (fall := loss_fall(losses)):
        before, last = fall
        held_out = held_out_loss(rows)
        # Rows that were read before have a lower loss each time, learned by heart or not. What a
        # longer run is worth, held-out rows tell: their loss is near where it falls for all rows.
        if held_out and num_epochs and num_epochs > 1 and held_out - last > before - last:
            yield (
                f"the loss still fell at the end, to {last:.3f}, on rows that were read "
                f"{num_epochs:.3g} times, and is {held_out:.3f} on held-out ones: more rows teach "
                "more than more epochs"
            )
        else:
            yield f"the loss still fell at the end, from {before:.3f} to {last:.3f}: {longer}"
    asked = [row for row in rows if row.get("answers_in_form") is not None and row.get("answers")]
    if asked and asked[-1]["answers_in_form"] < LEAST_IN_FORM * asked[-1]["answers"]:
        found, of = asked[-1]["answers_in_form"], asked[-1]["answers"]
        yield (
            f"only {found} of {of} held-out answers have the form of the data's: {longer}, or "
            "learn faster with a larger optimizer.lr"
        )


def loss_fall(losses: Sequence[float]) -> tuple[float, float] | None:
    """Returns the mean loss of the middle third and of the last one, if it fell between them.

    >>> loss_fall([3.0, 2.5, 2.0, 1.9, 1.6, 1.5])
    (1.95, 1.55)
    """
    third = len(losses) // 3
    if len(losses) < FEWEST_ROWS or not third:
        return None
    before = fmean(losses[-2 * third : -third])
    last = fmean(losses[-third:])
    is_fall = last > LEARNED and before - last > max(FALL * before, LEAST_FALL)
    return (before, last) if is_fall else None


def held_out_loss(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the loss of the last validation, of several sets their mean; None without one, or
    where one is not finite, which rows have as text.
    """
    validated = [row for row in rows if any(key.startswith("val_loss/") for key in row)]
    if not validated:
        return None
    found = [value for key, value in validated[-1].items() if key.startswith("val_loss/")]
    return fmean(found) if all(isinstance(value, int | float) for value in found) else None


def longer_settings(training: TrainingConfig, num_epochs: float | None) -> str:
    """Returns how the same run is typed twice as long."""
    if training.max_steps is not None or num_epochs is None:
        setting = f"training.max_steps={2 * (training.max_steps or 1)}"
    else:
        setting = f"training.num_epochs={max(2, round(2 * num_epochs))}"
    return f"train longer under another name, {setting} name=..."
