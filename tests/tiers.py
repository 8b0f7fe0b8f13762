"""Cases that are left to `make test-slow`, beside like ones that CI runs."""

from __future__ import annotations

from typing import Any

import pytest


def rarely(*cases: Any) -> list[Any]:
    """The cases, marked slow; one of several arguments is a tuple."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
