"""What a value of the configuration may be besides its type: `Annotated[int, Range(1)]`.

A rule stands beside its key: in the schema, or in the signature of the part that takes it. The
check before anything is loaded and docs/config.md both read it there. `problem(value)` completes
the sentence `key=value must be ...`, or is None; `str(rule)` is the rule in the table of
docs/config.md.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from automodel_lite.config.model_files import check_model_files
from automodel_lite.errors import (
    ConfigError,
    did_you_mean,
    did_you_mean_path,
    explained,
    format_value,
)

MAX_PATH_BYTES = 4096  # of Linux
MAX_PART_BYTES = 255
MAX_NAME_BYTES = 200  # files beside the run's folder are named after it


@dataclass(frozen=True)
class Range:
    """A number from `least` to `most`; `above` and `below` exclude the bound itself. No number is
    beyond a bound that is NaN.
    """

    least: float = math.nan
    most: float = math.nan
    above: float = math.nan
    below: float = math.nan

    def problem(self, value: float) -> str | None:
        too_small = value < self.least or value <= self.above
        too_large = value > self.most or value >= self.below
        return f"{self}." if too_small or too_large else None

    def __str__(self) -> str:
        bounds = {
            "at least": self.least,
            "over": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return " and ".join(
            f"{name} {bound:,}" for name, bound in bounds.items() if not math.isnan(bound)
        )


@dataclass(frozen=True)
class OneOf:
    """One of these texts; a value of another type is the type's affair."""

    choices: tuple[str, ...]
    text: str = ""  # in place of the list, where other types are allowed beside these texts
    # package.module:function is allowed, too; whether its package is, `check_config` tells
    takes_code: bool = False

    def problem(self, value: object) -> str | None:
        if not isinstance(value, str) or value in self.choices:
            return None
        if self.takes_code and ":" in value:
            return None
        return f"{self}{did_you_mean(value, self.choices)}"

    def __str__(self) -> str:
        own = ", package.module:function" if self.takes_code else ""
        return self.text or f"one of {', '.join(self.choices)}{own}"


@dataclass(frozen=True)
class Condition:
    """A rule of one function; `text` is its row in docs/config.md, "" for one that needs none."""

    problem: Callable[[Any], str | None]
    text: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Only:
    """A setting that counts only where another `key` of its group has this value, or is set at all:
    a scale of what there is none of.
    """

    key: str
    value: Any = ...  # any that is not 0, empty, false or null

    def problem(self, value: object) -> str | None:
        """Any value is one by itself."""
        return None

    def problem_beside(self, group: Mapping[str, Any], prefix: str) -> str | None:
        """Returns why a setting of the group `prefix` would do nothing; completes `key=value`."""
        other = group.get(self.key)
        if self.key not in group or (bool(other) if self.value is ... else other == self.value):
            return None
        return (
            f"does nothing where {prefix}{self.key}={format_value(other)}: set {prefix}"
            f"{self._needed()}, or leave it out."
        )

    def _needed(self) -> str:
        return self.key if self.value is ... else f"{self.key}={format_value(self.value)}"

    def __str__(self) -> str:
        return f"only with {self._needed()}"


RULES = (Range, OneOf, Condition, Only)


def _condition(text: str, condition: Callable[[Any], bool]) -> Condition:
    return Condition(lambda value: None if condition(value) else f"{text}.", text)


_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_NAME = re.compile(r"\w[\w.,=+@ -]*")
_DURATION = re.compile(r"(?:(\d{1,4})-)?(\d{1,6}):([0-5]?\d):([0-5]?\d)", re.ASCII)
PLAUSIBLE = Condition(lambda value: "at most 1,000,000,000." if value > 10**9 else None)
"""A number of steps, documents or processes: a larger one is a slip, and may ask for memory that
nobody has.
"""
# of the Hugging Face hub
REPO_NAME = _condition("owner/name", lambda value: bool(_REPO.fullmatch(value)))
PACKAGES = _condition(
    "names of packages, such as [my_package]",
    lambda value: all(re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*", name) for name in value),
)
PAIR = _condition("a list of 2 values", lambda value: len(value) == 2)
FIRST_AND_LAST = _condition(
    "the first and the last step, such as [10,12]",
    lambda value: len(value) == 2 and 1 <= value[0] <= value[1],
)
FOLDER_NAME = _condition(
    f"a plain folder name (letters, digits, _-.=+@) of at most {MAX_NAME_BYTES} bytes: set "
    "output_dir=... for a path",
    lambda value: bool(_NAME.fullmatch(value)) and len(value.encode()) <= MAX_NAME_BYTES,
)


def _cores_problem(value: int) -> str | None:
    """Processes or threads: at most as many as this machine has cores, and four on any machine."""
    cores = len(os.sched_getaffinity(0))
    most = max(4, cores)
    return f"at most {most}: this machine has {cores} cores." if value > most else None


def _path_problem(value: str) -> str | None:
    """The name of a file, a folder, or a set of the hub: neither empty nor longer than the file
    system allows.
    """
    if not value.strip():
        return "a path, and it is empty: was a shell variable not set?"
    if value.startswith("~") and os.path.expanduser(value) == value:
        return "a path: there is no user of that name."
    longest = max(len(part.encode(errors="surrogateescape")) for part in value.split("/"))
    if longest > MAX_PART_BYTES or len(value.encode(errors="surrogateescape")) > MAX_PATH_BYTES:
        return f"shorter: a name has at most {MAX_PART_BYTES} bytes, a path {MAX_PATH_BYTES}."
    return None


def _duration_problem(value: str | int) -> str | None:
    """`1:30:00`, `2-12:00:00` (days first) or a number of seconds, over 0."""
    if isinstance(value, str) and not _DURATION.fullmatch(value):
        return "hours:minutes:seconds, such as 1:30:00, or a number of seconds."
    return "over 0." if seconds_of(value) <= 0 else None


UP_TO_THE_CORES = Condition(_cores_problem, "at most the cores of the machine")
PATH = Condition(_path_problem)
DURATION = Condition(_duration_problem, "hours:minutes:seconds, or seconds")


def argument(kind: type, *rules: Any) -> Callable[[str], Any]:
    """`type=` of an argparse argument that follows the rules of a setting:
    `argument(int, Range(1))`.
    """

    # what fits 64 bits
    checked = (*rules, Range(most=2**63 - 1)) if kind is int else rules

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            text.encode()
        except ValueError:
            word = {int: "a whole number", float: "a number"}.get(kind, "text in UTF-8")
            raise argparse.ArgumentTypeError(f"{text!a} must be {word}.") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} must be a finite number.")
        for rule in checked:
            if problem := rule.problem(value):
                raise argparse.ArgumentTypeError(f"{text[:80]} must be {problem}")
        return value

    return parse


def seconds_of(duration: str | int) -> float:
    """`1:30:00` or `2-12:00:00` (days first) or a number of seconds, a checked `DURATION` ->
    seconds.
    """
    if isinstance(duration, int):
        return float(duration)
    parts = _DURATION.findall(duration)[0]
    days, hours, minutes, seconds = (int(part or 0) for part in parts)
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


Auto = Annotated[str, OneOf(("auto",), "a number or auto")]
Count = Annotated[int, Range(0), PLAUSIBLE]
Positive = Annotated[int, Range(1), PLAUSIBLE]
# of what memory is taken for at once: packs of a micro-batch, an adapter's rank
Size = Annotated[int, Range(1, 2**17)]
Seconds = Annotated[float, Range(0, 10**7)]
Fraction = Annotated[float, Range(0, 1)]
Seed = Annotated[int, Range(0)]
PathStr = Annotated[str, PATH]


def looks_local(path: str) -> bool:
    """Is this meant as a file or folder, not as a hub name? By its form, or because it or its
    folder is there.
    """
    given = Path(path).expanduser()
    by_form = path.startswith((".", "/", "~")) or path.count("/") > 1 or "*" in path
    return by_form or given.exists() or ("/" in path and given.parent.is_dir())


def read_template(template: str) -> str:
    """Returns a chat template, which is given as its text or as a file; raises ConfigError for a
    file that is not there.
    """
    if "{" in template:
        return template
    sentence = f"tokenizer.chat_template={template} cannot be read"
    with explained(sentence, OSError, UnicodeDecodeError):
        text = Path(template).expanduser().read_text("utf-8-sig")
    # What an editor adds is not of the template, which would write it into every document: a byte
    # order mark before it, blank lines behind it.
    return re.sub(r"(\r?\n[ \t]*)+\Z", "", text)


def check_folder(key: str, source: str) -> bool:
    """Returns whether a model's folder is there; raises ConfigError for what looks like a local
    path and is none, before it is tried as a hub name, and for a damaged file in the folder.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        raise ConfigError(f"{key}={source} is a file: give a model's folder, or a hub name.")
    if looks_local(source) and not folder.is_dir():
        raise ConfigError(f"{key}={source}: there is no such folder{did_you_mean_path(source)}")
    check_model_files(key, folder)
    return folder.is_dir()
