"""TensorBoard event files in the run's folder: `tensorboard --logdir runs`."""

from __future__ import annotations

# torch's writer imports it late; a missing one is named when the config is checked
import tensorboard  # noqa: F401
from torch.utils.tensorboard import SummaryWriter

from automodel_lite.config.rules import Positive
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo, numbers


class TensorboardTracker(Callback):
    """The config node `logger.tensorboard`. Steps that a continued run repeats replace the old
    ones.
    """

    def __init__(
        self,
        run: RunInfo,
        flush_s: Positive = 30,  # seconds between writes
    ) -> None:
        purge_step = run.first_step + 1 if run.first_step else None
        self.writer = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=purge_step, flush_secs=flush_s
        )

    def log(self, row: Row) -> None:
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row["step"])

    def text(self, step: int, name: str, value: str) -> None:
        self.writer.add_text(name, value, step)

    def close(self) -> None:
        self.writer.close()
