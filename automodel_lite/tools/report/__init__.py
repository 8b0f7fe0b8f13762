"""A run on one screen: what was logged, drawn. matplotlib is an extra; without it a run ends without a picture."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

CAN_DRAW = find_spec("matplotlib") is not None
HOW_TO_DRAW = "drawing a report needs the package matplotlib: pip install 'automodel-lite[plots]'."


def draw_at_end(run: Path, say: Callable[[str, str], None]) -> None:
    """report.html and report.png in the run's folder; whatever happens here, the run is finished and stays so."""
    if not CAN_DRAW:
        say("report", f"none: {HOW_TO_DRAW}")
        return
    from automodel_lite.tools.report.page import write_report

    try:
        page, _ = write_report([run], run)
        say("report", str(page))
    except Exception as error:
        say("report", f"WARNING: not drawn: {type(error).__name__}: {error}")
