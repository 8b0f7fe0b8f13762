"""Something happens at the n-th operation on the disk: no space, or the end of the process."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.run import sharded_files

OPERATIONS = [(builtins, "open"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "unlink")]
SHARDS = (sharded_files, "save_file")


class Faults:
    """Counts what touches the disk below a folder, and does something at the n-th.

    Only there: the process also removes temporary files of others whenever the garbage collector comes by.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, at: int, what: Callable[[], None]) -> None:
        self.count, self.folder, self.at, self.what, self.is_on = 0, folder, at, what, False
        for module, name in [*OPERATIONS, SHARDS]:
            monkeypatch.setattr(module, name, self._wrap(getattr(module, name), name))

    def _wrap(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            writes = name != "open" or (len(args) > 1 and str(args[1])[0] in "wx")
            where = args[1] if name == "save_file" else kwargs.get("dir_fd", args[0])
            if self.is_on and writes and _touches(self.folder, where):
                self.count += 1
                if self.count == self.at:
                    self.what()
            return real(*args, **kwargs)

        return call


def _touches(folder: Path, where: Any) -> bool:
    """`where` is a path, or the descriptor of an open file (fsync) or folder (deletion of a tree)."""
    path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else where
    return Path(path).is_relative_to(folder)
