"""Trackio: a dashboard on this machine (`trackio show`), or in a Space of the hub."""

from __future__ import annotations

import trackio

from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo, numbers


class TrackioTracker(Callback):
    """The config node `logger.trackio`; a run that continues goes on under its name."""

    def __init__(
        self,
        run: RunInfo,
        project: str = "automodel_lite",  # made where there is none
        group: str | None = None,  # runs of a group are shown together
        space_id: str | None = None,  # owner/name of a Space; null = on this machine
        private: bool = True,  # of a Space that is made
    ) -> None:
        self.run = trackio.init(
            project=scrub(project),
            name=run.name,
            group=group and scrub(group),
            space_id=space_id,
            private=private,
            config=scrub_tree(run.config),
            resume="allow" if run.first_step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, row: Row) -> None:
        self.run.log(numbers(row), step=row["step"])

    def text(self, step: int, name: str, value: str) -> None:
        rows = [[step, name, value]]
        table = trackio.Table(columns=["step", "prompt", "answer"], data=rows)
        self.run.log({"samples": table}, step=step)

    def close(self) -> None:
        self.run.finish()
