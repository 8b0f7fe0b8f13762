"""The errors that a user can mend; each message names the key, its value, the rule and the cure."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work: `packed_sequence.packed_sequence_size=63 must be a multiple of 4: use 64.`"""


class DataError(ValueError):
    """Data that cannot be trained on: names the file, the line and the column."""


class RunStoppedError(RuntimeError):
    """A run that cannot go on, and why, in a sentence that needs no traceback."""
