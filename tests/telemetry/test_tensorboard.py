"""TensorBoard event files over a restart."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.runs import train


def test_tensorboard_of_a_continued_run_has_each_step_once(tmp_path: Path):
    run = tmp_path / "run"
    options = ["logger=tensorboard", "checkpoint.accept_changes=true", "lr_scheduler=constant"]
    train("smoke", run, *options, "training.max_steps=4")
    train("smoke", run, *options)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("val_loss/held_out")] == [3, 4, 6]
