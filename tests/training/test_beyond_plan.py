"""Settings that a run of so many steps never comes to are named, or refused."""

from __future__ import annotations

import pytest

from automodel_lite.config.check import check_config
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.source import TrainingPlan
from automodel_lite.errors import ConfigError
from automodel_lite.training.beyond_plan import check_keep_best, notes_beyond_plan
from tests.runs import composed


def config_of(typed: str):
    return check_config(composed("smoke", *typed.split(" ")))


@pytest.mark.parametrize(
    ("saves", "validates", "cure"),
    [
        (1, 0, "set training.val_every_steps=1,"),
        (3, 2, "set training.val_every_steps=3,"),
        (0, 1, "set checkpoint.every_steps=2 training.val_every_steps=2,"),
        (1, 4, "set training.val_every_steps=1,"),
        (9, 9, "set checkpoint.every_steps=2 training.val_every_steps=2,"),
    ],
)
def test_the_best_of_one_checkpoint_is_refused(saves: int, validates: int, cure: str) -> None:
    typed = f"checkpoint.every_steps={saves} training.val_every_steps={validates}"
    config = config_of(f"{typed} checkpoint.keep_best=1")
    with pytest.raises(ConfigError, match=r"^checkpoint.keep_best=1 compares") as refused:
        check_keep_best(config, 4)
    assert cure in str(refused.value)
    cured = cure.removeprefix("set ").rstrip(",")
    check_keep_best(config_of(f"{typed} checkpoint.keep_best=1 {cured}"), 4)
    check_keep_best(config_of(typed), 4)


STOPPING = "callbacks=early_stopping training.val_every_steps=2 callbacks.early_stopping"
NOTES = {
    "training.val_every_steps=11": ["training.val_every_steps=11 validates only at the end"],
    "checkpoint.every_steps=4 checkpoint.keep_every=6": [
        "checkpoint.keep_every=6 never falls on a save of checkpoint.every_steps=4"
    ],
    "checkpoint.every_steps=4 checkpoint.keep_every=12": ["checkpoint.keep_every=12 keeps nothing"],
    "training.profile_steps=[50,52]": ["training.profile_steps=[50,52] profiles nothing"],
    "training.profile_steps=[9,12]": ["training.profile_steps=[9,12] is cut short"],
    f"{STOPPING}.patience=4": ["callbacks.early_stopping.patience=4 ends no run before step 10"],
    f"{STOPPING}.patience=3": [],
    f"{STOPPING}.metric=loss callbacks.early_stopping.patience=50": [
        "callbacks.early_stopping.patience=50 ends no run before step 51"
    ],
    "training.num_epochs=7": [
        "training.num_epochs=7 is not reached: training.max_steps=10 ends the run first"
    ],
    "training.max_steps=40 training.num_epochs=2": [
        "training.max_steps=40 is not reached: training.num_epochs=2 ends the run first"
    ],
    "checkpoint.every_steps=5 checkpoint.keep_every=10": [],
    "checkpoint.every_steps=500": [],  # the line of the run names the next checkpoint
}


@pytest.mark.parametrize("typed", NOTES)
def test_a_setting_beyond_the_end_is_named(typed: str) -> None:
    shape = BatchShape(1, 1, 1)
    config = config_of(f"training.max_steps=10 {typed}")
    found = notes_beyond_plan(config, TrainingPlan(10, 5, shape))
    assert [note.partition(": this run has 10 steps")[0] for note in found] == NOTES[typed]
