"""Cases of a test that run less often than the one beside them."""

from __future__ import annotations

from typing import Any

import pytest


def only_in_ci(*cases: Any) -> list[Any]:
    """The cases, left to CI; one of several arguments is a tuple."""
    return _marked(cases, pytest.mark.system)


def rarely(*cases: Any) -> list[Any]:
    """The cases, left to `make test-slow`; one of several arguments is a tuple."""
    return _marked(cases, pytest.mark.slow)


def _marked(cases: tuple[Any, ...], mark: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases
    ]
