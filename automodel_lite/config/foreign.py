"""What the settings of other frameworks are called here: foreign.yaml, one table for who types one
of their keys and for who converts a whole configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FIRST = ("trl", "axolotl", "llama_factory", "nemo_automodel", "torchtune")
"""Whose answer counts where two frameworks have a key of one name."""
_SAYS_NOTHING = re.compile(r"- |by hand|none")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def table() -> dict[str, Any]:
    """Returns the table: framework -> its keys, defaults and refusals; `others` -> names of no
    framework in it.
    """
    text = Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8")
    return dict(yaml.load(text, Loader=_LOADER))


@cache
def elsewhere() -> Mapping[str, str]:
    """Returns a foreign key -> the key, or the option of a group, that it is here."""
    found = dict(table()["others"])
    for peer in _FIRST:
        for pattern, answer in table()[peer]["keys"].items():
            for key in pattern.split("|"):
                is_plain = "*" not in key and "[]" not in key and not key.startswith("_")
                if is_plain and (meant := _setting(answer)):
                    found.setdefault(key, meant)
    return found


def _setting(answer: Any) -> str | None:
    """Returns the first setting of an answer: `peft=lora peft.r` -> peft=lora, `a.b=1` -> a.b."""
    for one in answer.values() if isinstance(answer, dict) else [answer]:
        said = one.removeprefix("= ")
        if _SAYS_NOTHING.match(said):
            continue
        word = said.split()[0].replace("~", "")
        key = word.partition("=")[0]
        return word if "." not in key else key
    return None
