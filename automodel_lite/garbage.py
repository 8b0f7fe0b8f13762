"""When Python looks for garbage.

Importing makes a million objects that stay. Looking through them again and again takes 0.4 of the 4.2 CPU-s that torch
and a model's code take to import.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (100_000, 20, 100)  # Python's own: (700, 10, 10)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """While modules are imported and parts are built. Not while training: cycles may hold tensors."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
