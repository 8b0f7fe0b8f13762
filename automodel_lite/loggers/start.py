"""The block that a run prints before its first step."""

from __future__ import annotations
