"""Settings of the Python interpreter: when it looks for garbage, and when freed memory goes back to
the system.

Importing makes a million objects that stay: looking through them again and again takes 0.4 of the
4.2 CPU-s that torch and a model's code take to import.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (100_000, 20, 100)  # Python's own: (700, 10, 10)
# glibc's name and upper end of it, from malloc.h
_M_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD = 32 << 20


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """While modules are imported and parts are built. Not while training: cycles may
    hold tensors.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def trim_malloc() -> Iterator[None]:
    """Freed blocks of 1 MiB and more go back to the system at once. glibc raises its limit up to 32
    MiB, and a sharded model on the CPU would keep the memory of several gathered layers after its
    first forward.
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
