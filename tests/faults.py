"""Faults at the n-th call of the system that touches the disk below a folder: no space, a disk that
fails, or the end of the process; and at the n-th piece of memory that Python asks for.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

OPERATIONS = [
    (builtins, "open"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "posix_fallocate"),
    (np.memmap, "flush"),
]


class Faults:
    """Counts what touches the disk below a folder, and does something at the n-th.

    Only there: the process also removes temporary files of others whenever the garbage collector
    comes by.

    in_files  writes to open files count, too, those of pathlib and of numpy among them
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        at: int,
        what: Callable[[], None],
        in_files: bool = False,
    ) -> None:
        self.count, self.folder, self.at, self.what, self.is_on = 0, folder, at, what, False
        self.in_files = in_files
        operations = OPERATIONS + [(io, "open")] * in_files
        for module, name in operations:
            monkeypatch.setattr(module, name, self._wrap(getattr(module, name), name))

    def touch(self) -> None:
        """Counts one touch."""
        self.count += 1
        if self.count == self.at:
            self.what()

    def _wrap(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = str(kwargs.get("mode", args[1] if len(args) > 1 else "r"))
            writes = name != "open" or mode[0] in "wxa"
            where = kwargs.get("dir_fd", args[0])
            if not (self.is_on and writes and _touches(self.folder, where)):
                return real(*args, **kwargs)
            try:
                self.touch()
            except OSError as error:
                if isinstance(where, (str, Path)):  # Python names the path that it was given
                    error.filename = str(where)
                raise
            result = real(*args, **kwargs)
            return _File(result, self) if name == "open" and self.in_files else result

        return call


class _File:
    """An open file whose writes count."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self.file, self.faults = file, faults

    def write(self, content: Any) -> Any:
        if self.faults.is_on:
            self.faults.touch()
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


def _touches(folder: Path, where: Any) -> bool:
    """`where` is a path, a mapped file, or the descriptor of an open file (fsync) or folder
    (deletion of a tree).
    """
    if isinstance(where, np.memmap):
        where = where.filename
    path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else where
    return Path(path).is_relative_to(folder)


def each_fault(
    folder: Path,
    operate: Callable[[Path], object],
    number: int = errno.ENOSPC,
    prepare: Callable[[Path], object] = lambda folder: None,
    every: int = 1,
) -> Iterator[tuple[Path, BaseException | None]]:
    """Yields, for n = 1, 1 + `every`, ..., a folder below `folder` in which the n-th touch of the disk
    failed by the error `number` while `operate` worked in it, after `prepare`, and what that raised; to the
    first n that it does not come to.
    """

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for at in count(1, every):
        own = folder / f"{errno.errorcode[number]}-{at}"
        own.mkdir(parents=True)
        prepare(own)
        raised: BaseException | None = None
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, own, at, fail, in_files=True)
            faults.is_on = True
            try:
                operate(own)
            except Exception as error:
                raised = error
            faults.is_on = False
        if faults.count < at:
            assert raised is None, raised
            assert at > 1, "nothing touched the disk"
            return
        yield own, raised


def each_failed_allocation(
    folder: Path,
    operate: Callable[[Path], object],
    prepare: Callable[[Path], object] = lambda folder: None,
    growth: float = 4.0,
    first: int = 50,
) -> Iterator[tuple[Path, str]]:
    """Yields, for n = `first`, `first` x `growth`, ..., a folder below `folder` in which the n-th
    allocation of Python, and no other, failed while `operate` worked in it, after `prepare`, and
    the traceback of what that raised; to the first n that it does not come to.

    Each time it works in a copy of this process: what it leaves in memory is gone as after an end.
    """
    testcapi = pytest.importorskip("_testcapi")
    at = first
    while True:
        own = folder / f"allocation-{at}"
        own.mkdir(parents=True)
        prepare(own)
        reader, writer = os.pipe()
        copy = os.fork()
        if not copy:
            raised = ""
            is_done = False
            testcapi.set_nomemory(at, at + 1)
            try:
                operate(own)
                is_done = True
                for _ in range(at):  # fails here where it has not yet
                    bytearray(1000)
                is_reached = True
            except BaseException as error:
                testcapi.remove_mem_hooks()
                is_reached = not is_done
                raised = "".join(traceback.format_exception(error)) if is_reached else ""
            os.write(writer, json.dumps([is_reached, raised]).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            answer = pipe.read()
        assert os.waitpid(copy, 0)[1] == 0, f"allocation {at} ended the process"
        is_reached, raised = json.loads(answer)
        if not is_reached:
            assert at > first, "nothing asked for memory"
            return
        yield own, raised
        at = max(at + 1, int(at * growth))
