"""JSON of which nothing is dropped: a key that is there twice is an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def read_json(text: str) -> Any:
    """Parses as `json.loads`, which takes the last of the values under one key and drops the others
    in silence; raises ValueError.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("brackets are nested a thousand deep") from None


def key_twice(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Returns the first key that several pairs of a key and a value have; None without one."""
    if len(dict(pairs)) == len(pairs):
        return None
    keys = [key for key, _ in pairs]
    return next(key for key in keys if keys.count(key) > 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = key_twice(pairs)
        raise ValueError(f"the key {twice!r} is there twice in one object: keep one of them")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
