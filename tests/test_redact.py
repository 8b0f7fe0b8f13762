"""Screens and logs without secrets."""

from __future__ import annotations

from automodel_lite.redact import ScrubbedStream


def test_a_screen_that_takes_nothing_more_ends_no_run() -> None:
    screen = ScrubbedStream(open("/dev/full", "w"))  # noqa: SIM115
    for _ in range(3):
        print("x" * 100_000, file=screen, flush=True)
