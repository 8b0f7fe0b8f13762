"""Which way a number of metrics.jsonl gets better: early stopping and trackers share the table."""

from __future__ import annotations

from automodel_lite.errors import did_you_mean

# keys, and kinds of `loss/<kind>`, `val_<kind>/<set>` and `score/<name>`
RISING = (
    "answers_right",
    "score",
    "task_score",
    "token_accuracy",
    "accuracy",
    "records_right",
    "reward_margin",
    "chosen_log_prob",
    "chosen_reward",
    "f1",
    "pearson",
    "tokens_per_s",
    "label_tokens_per_s",
    "slots_per_s",
    "tflops_per_s",
    "mfu_frac",
    "fill_frac",
)
FALLING = (
    "loss",
    "cross_entropy",
    "perplexity",
    "mtp_loss",
    "brier",
    "ece",
    "calibrated_ece",
    "kl",
    "kl_old",
    "clipped",
    "rejected_log_prob",
    "rejected_reward",
    "ece",
    "absolute_error",
    "grad_norm",
    "step_s",
    "data_wait_s",
    "memory_gib",
)


def rises(metric: str) -> bool | None:
    """Returns whether a number should rise, False where it should fall; None of an unknown one.

    >>> rises("val_token_accuracy/val"), rises("val_loss"), rises("loss/kl"), rises("lr")
    (True, False, False, None)
    >>> rises("task_pass_at_4/sums")
    True
    """
    kind, _, part = metric.partition("/")
    if kind == "loss" and part:
        kind = part
    kind = kind.removeprefix("val_")
    if kind in RISING or kind.startswith("task_pass_at_"):
        return True
    return False if kind in FALLING else None


def direction_problem(metric: str, asked: bool | None, key: str) -> str:
    """Returns why nobody knows when a number gets better, by the settings under `key`; nothing
    where it is known, by its name or by `asked`.
    """
    if asked is not None or rises(metric) is not None:
        return ""
    known = ("val_loss", "val_perplexity", "val_accuracy", "val_token_accuracy", *RISING, *FALLING)
    near = did_you_mean(metric, known)
    return (
        f"{key}.metric={metric} has no known direction: set {key}.rises=true where it should "
        f"rise, or {key}.rises=false{near}"
    )
