"""Settings that a run of so many steps never comes to: an interval or a window beyond its end, two
intervals that do not meet.
"""

from __future__ import annotations

from math import lcm

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.source import TrainingPlan
from automodel_lite.errors import ConfigError, counted


def check_keep_best(config: Config, max_steps: int) -> None:
    """Raises ConfigError where `checkpoint.keep_best` would compare one checkpoint, the last: a
    save counts as rated where a validation falls on its step.
    """
    keep_best = config.checkpoint.keep_best
    every = config.checkpoint.every_steps
    validates = config.training.val_every_steps
    if not keep_best:
        return
    if every and validates and lcm(every, validates) < max_steps:
        return
    settings = f"checkpoint.every_steps={every} and training.val_every_steps={validates}"
    step = every if 0 < every < max_steps else max(1, max_steps // 2)
    cure = f"training.val_every_steps={step}"
    if step != every:
        cure = f"checkpoint.every_steps={step} {cure}"
    raise ConfigError(
        f"checkpoint.keep_best={keep_best} compares checkpoints whose step is validated, and with "
        f"{settings} the last of {counted(max_steps, 'step')} is the only one: set {cure}, or "
        "keep_best=0."
    )


def notes_beyond_plan(config: Config, plan: TrainingPlan) -> list[str]:
    """Names each setting that does nothing in a run of this length.

    `checkpoint.every_steps` is not among them: the line of the run names the next checkpoint.
    """
    training = config.training
    saves = config.checkpoint.every_steps
    keeps = config.checkpoint.keep_every
    num = plan.max_steps
    notes = []

    def note(setting: str, first_step: int, what: str) -> None:
        if first_step > num:
            notes.append(f"{setting} {what}: this run has {counted(num, 'step')}")

    validates = training.val_every_steps
    note(f"training.val_every_steps={validates}", validates, "validates only at the end")
    if saves and keeps:
        # the first step that is saved and a multiple
        first = lcm(saves, keeps)
        what = f"never falls on a save of checkpoint.every_steps={saves}"
        if first == keeps:
            what = "keeps nothing"
        note(f"checkpoint.keep_every={keeps}", first, what)
    if window := training.profile_steps:
        setting = f"training.profile_steps=[{window[0]},{window[1]}]"
        note(setting, window[0], "profiles nothing")
        if window[0] <= num:
            note(setting, window[1], "is cut short")
    for name, part in config.callbacks.items():
        if "patience" not in part or "rises" not in part:
            continue
        # the value that ends a run comes `patience` after the first one
        is_held_out = part["metric"].startswith("val_")
        every = training.val_every_steps if is_held_out else training.log_every_steps
        first = every * (part["patience"] + 1)
        setting = f"callbacks.{name}.patience={part['patience']}"
        if every:
            note(setting, first + 1, f"ends no run before step {first:,}")
    if training.max_steps and training.num_epochs and plan.num_epochs:
        by_steps = f"training.max_steps={training.max_steps}"
        by_epochs = f"training.num_epochs={training.num_epochs}"
        is_by_steps = num == training.max_steps
        ends, other = (by_steps, by_epochs) if is_by_steps else (by_epochs, by_steps)
        notes.append(f"{other} is not reached: {ends} ends the run first")
    return notes
