"""What is asked of the Python interpreter: a time limit for other people's code, and when it looks for garbage.

A chat template may hold loops that never end. And importing makes a million objects that stay: looking through them
again and again takes 0.4 of the 4.2 CPU-s that torch and a model's code take to import.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

CHECK_EVERY_S = 0.5


class DeadlineExceeded(Exception):
    """Raised inside the block that takes too long."""


class Deadline:
    """Ends a block of pure Python after `limit_s`, in whatever thread it runs; costs a microsecond per block.

    A thread looks at the clock twice a second and raises DeadlineExceeded in the block's thread. (A signal would only
    reach the main thread, and documents are rendered in others too.) Blocks of one Deadline run one at a time. The
    watching thread is started by the first block of a process, and ends when its Deadline is gone.

        with deadline:
            render()
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process_id = os.getpid()
        self._watcher: threading.Thread | None = None
        self._thread_id: int | None = None  # of the block that runs now
        self._started = 0.0
        self._is_over = False

    def __enter__(self) -> None:
        if self._process_id != os.getpid():  # forked: perhaps while the watcher held the lock
            self._lock, self._process_id, self._watcher = threading.Lock(), os.getpid(), None
        if self._watcher is None or not self._watcher.is_alive():
            self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name="deadline")
            self._watcher.start()
        with self._lock:
            self._started, self._thread_id, self._is_over = time.monotonic(), threading.get_ident(), False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._thread_id = None
        if self._is_over and kind is not DeadlineExceeded:
            # it is on its way, or was swallowed inside the block: by a __del__, for example
            _raise_in(threading.get_ident(), None)
            raise DeadlineExceeded

    def check(self) -> None:
        """Ends the block that runs now if its time is over."""
        with self._lock:
            late = self._thread_id is not None and time.monotonic() - self._started > self._limit_s
            if late and not self._is_over:
                self._is_over = True
                _raise_in(self._thread_id or 0, ctypes.py_object(DeadlineExceeded))

    def __reduce__(self) -> tuple[Any, ...]:
        return Deadline, (self._limit_s,)


def _raise_in(thread_id: int, kind: Any) -> None:
    """In that thread, at its next bytecode; None takes back what has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), kind)


def _watch(reference: weakref.ref[Deadline]) -> None:
    while True:
        time.sleep(CHECK_EVERY_S)
        deadline = reference()
        if deadline is None:
            return
        deadline.check()
        del deadline  # not held while asleep


_SELDOM = (100_000, 20, 100)  # Python's own: (700, 10, 10)
_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD = -3, 32 << 20  # glibc's name and upper end of it, from malloc.h


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """While modules are imported and parts are built. Not while training: cycles may hold tensors."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def returning_blocks() -> Iterator[None]:
    """Freed blocks of 1 MiB and more go back to the system at once. glibc raises its limit up to 32 MiB, and a sharded
    model on the CPU would keep the memory of several gathered layers after its first forward.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)  # where glibc's own rule ends
