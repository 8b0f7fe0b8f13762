"""The folder of a run that somebody names."""

from __future__ import annotations

from pathlib import Path

from automodel_lite.errors import ConfigError, did_you_mean_path
from automodel_lite.run.folder import RunFolder


def existing_run(path: Path, flag: str = "") -> RunFolder:
    """Raises ConfigError, which begins with `flag`, for a folder that is not a run's."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        near = "." if path.exists() else did_you_mean_path(str(path))
        raise ConfigError(f"{flag}{path} is not the folder of a run: it has no config.yaml{near}")
    return folder
