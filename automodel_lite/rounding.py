"""Whole numbers, and arrays of them, rounded up."""

from __future__ import annotations

from typing import Any


def ceil_div(number: Any, size: Any) -> Any:
    """Returns how many parts of this size hold the number.

    >>> ceil_div(9, 4)
    3
    """
    return -(-number // size)


def round_up(number: Any, multiple: Any) -> Any:
    """Returns the next multiple.

    >>> round_up(9, 4)
    12
    """
    return ceil_div(number, multiple) * multiple
