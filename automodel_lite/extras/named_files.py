"""Files that a command writes where its user has said."""

from __future__ import annotations

from pathlib import Path

from automodel_lite.errors import explained
from automodel_lite.run.durable import write_atomically

NO_PLACE = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)


def write_named(path: Path, text: str) -> None:
    """Writes a text file and its folders; raises ConfigError where there can be none.

    A disk that is full or may not be written has sentences of its own (run/limits.yaml).
    """
    with explained(f"{path} cannot be written", *NO_PLACE, cure="choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
