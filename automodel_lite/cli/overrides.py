"""Overrides as they are typed, and as Hydra gets them.

Nobody needs a `+`: a key that is not a group is set or added, and whether it exists is checked afterwards, for all keys
at once. Values with letters beyond ASCII, which Hydra's grammar does not know, are quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from automodel_lite.errors import did_you_mean

_PLAIN_VALUE = re.compile(r"[^\[\]{}()'\"$]*")


def split(override: str) -> tuple[str, str | None]:
    """`+a.b=1` -> `a.b`, `1`; without `=` the value is None."""
    key, is_set, value = override.partition("=")
    return key.lstrip("+~").strip(), value if is_set else None


def group_of(override: str, known: Mapping[str, Sequence[str]]) -> str | None:
    """The group whose option the override chooses; None when it sets a value."""
    name = split(override)[0].partition("@")[0]
    return name if name in known or "/" in name else None


def opened(override: str, known: Mapping[str, Sequence[str]]) -> str:
    """`a.b=1` -> `++a.b=1`; group choices, deletions and Hydra's own keys stay as they are."""
    key, value = split(override)
    is_plain = re.match(r"\+?\+?[A-Za-z_]", override) and value is not None
    if not is_plain or group_of(override, known) or "@" in key or key.split(".")[0] == "hydra":
        return override
    return f"++{key}={_quoted(value or '')}"


def check_options(
    overrides: Sequence[str], known: Mapping[str, Sequence[str]], is_multirun: bool = False
) -> Iterator[str]:
    """A sentence for each choice of an option that does not exist, `group=x: no such option ...`, and for several
    values where there is one run.
    """
    for text in overrides:
        group, value = group_of(text, known), split(text)[1]
        if value is not None and not split(text)[0]:
            yield f"{text}: cannot be read as key=value (there is no key)."
            continue
        if not is_multirun and is_sweep(text) and not text.startswith(("~", "hydra.")):
            yield f"{text}: several values: add --multirun to sweep over them, or write a list as {_as_list(text)}."
            continue
        if group is None or group not in known or value is None or text.startswith("~") or "$" in value or "(" in value:
            continue
        if not chosen(text) and not value.strip().startswith(("[", "{")):
            yield f"{text}: choose an option of the group: {', '.join(known[group])}."
        for option in chosen(text):
            if option not in known[group] and "/" not in option and not group.startswith("hydra/"):
                near = did_you_mean(option, known[group]) or "."
                yield f"{text}: no such option{near} The options are {', '.join(known[group])}."
                break


def _as_list(override: str) -> str:
    key, _, value = override.partition("=")
    return f"{key}=[{value}]"


def chosen(override: str) -> list[str]:
    """The options that `group=option` or `group=a,b` names."""
    value = split(override)[1] or ""
    options = [option.strip(" '\"").removesuffix(".yaml") for option in value.strip("[]").split(",")]
    return [option for option in options if option not in ("", "null")]


def _quoted(value: str) -> str:
    if value.isascii() or not _PLAIN_VALUE.fullmatch(value):
        return value
    return ",".join(item if item.isascii() else f"'{_escaped(item)}'" for item in value.split(","))


def _escaped(text: str) -> str:
    """A backslash before the closing quote would quote it."""
    return text + "\\" if text.endswith("\\") else text


_SWEEP_FUNCTION = re.compile(r"\s*(range|interval|choice|glob|tag|sort|shuffle)\(")


def is_sweep(override: str) -> bool:
    """Does it name several values? `lr=1,2` and `lr=range(0,3)` do, `logger=[a,b]` does not."""
    value = split(override)[1] or ""
    if _SWEEP_FUNCTION.match(value):
        return True
    value = re.sub(r"'[^']*'|\"[^\"]*\"", "", value)
    depth = 0
    for letter in value:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            return True
    return False
