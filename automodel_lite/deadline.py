"""A time limit for Python code that somebody else wrote: a chat template may hold loops that never end."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from types import TracebackType
from typing import Any

CHECK_EVERY_S = 0.5


class DeadlineExceeded(Exception):
    """Raised inside the block that takes too long."""


class Deadline:
    """Ends a block of pure Python after `limit_s`, in whatever thread it runs; costs a microsecond per block.

    A thread looks at the clock twice a second and raises DeadlineExceeded in the block's thread. (A signal would only
    reach the main thread, and documents are rendered in others too.) Blocks of one Deadline run one at a time. The
    watching thread is started by the first block of a process.

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
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="deadline")
            self._watcher.start()
        with self._lock:
            self._started, self._thread_id, self._is_over = time.monotonic(), threading.get_ident(), False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._thread_id = None
        if self._is_over and kind is not DeadlineExceeded:  # the block ended just then: the exception is on its way
            while True:
                time.sleep(0.001)

    def _watch(self) -> None:
        while True:
            time.sleep(CHECK_EVERY_S)
            with self._lock:
                late = self._thread_id is not None and time.monotonic() - self._started > self._limit_s
                if late and not self._is_over:
                    self._is_over = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._thread_id or 0), ctypes.py_object(DeadlineExceeded)
                    )

    def __reduce__(self) -> tuple[Any, ...]:
        return Deadline, (self._limit_s,)
