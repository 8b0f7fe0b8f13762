"""What trackers draw of a row of metrics."""

from __future__ import annotations

from automodel_lite.telemetry.callbacks import Row


def numbers(row: Row) -> dict[str, float]:
    """Returns the values of a row that a chart can show, its step left out."""
    return {
        key: value
        for key, value in row.items()
        if key != "step" and isinstance(value, (int, float))
    }
