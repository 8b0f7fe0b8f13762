"""trackio: local charts without an account (`trackio show`)."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import trackio

from automodel_lite.redact import scrub
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo, numbers


class TrackioTracker(Callback):
    """The config node `logger.trackio`; a restart continues the run of the same name."""

    def __init__(
        self,
        run: RunInfo,
        project: str = "automodel_lite",  # made where there is none
        space_id: str | None = None,  # a Hugging Face Space to write to; null = this machine
    ) -> None:
        resume = "allow" if run.state else "never"
        name = run.state.get("name", run.name)
        with redirect_stdout(StringIO()):  # eight lines of advice
            self.run = trackio.init(
                project=scrub(project),
                name=name,
                space_id=space_id,
                config=run.config,
                resume=resume,
                embed=False,
                auto_log_cpu=False,
            )

    def log(self, row: Row) -> None:
        trackio.log(numbers(row), step=row["step"])

    def text(self, step: int, name: str, value: str) -> None:
        trackio.log({name: trackio.Markdown(value)}, step=step)

    def state(self) -> dict[str, Any]:
        return {"name": self.run.name}

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            trackio.finish()
