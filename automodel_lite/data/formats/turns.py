"""The turn of a chat becomes `{"role", "content", ...}`, from the shapes that turns have.

What is understood is mapped to what it means: OpenAI's messages and its older `function_call`,
ShareGPT's turns with their function calls, lists of text parts. What is not understood is an error
that names the place: a part, a weight or a picture that is passed over in silence trains another
model than the data describe.
"""

from __future__ import annotations

import json
import re
from typing import Any

from automodel_lite.data.reading.documents import MEDIA, NAMES, NOT_READ, Message, sound_text
from automodel_lite.errors import DataError, explained

ROLES = NAMES["roles"]
TEXT_PARTS = ("text", "input_text", "output_text")
TEXT_KEYS = ("text", "value", "content")
MASKS = re.compile(
    r"(.*_)?(train|training|trainable|trained|loss|mask|masked|learn|learnable|supervised?)(_.*)?"
)
"""Keys by which other programs say what is trained on; here it is `weight`."""
KNOWN_ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "model",
    "tool",
    "ipython",
    "environment",
    "context",
)
"""Roles of which it is clear whether they are trained on; others are, if at all, by another
program.
"""


def read_turn(turn: Any, where: str) -> Message:
    """Returns the message of one turn; raises DataError with its place, `messages[2]`, and what is
    wrong.
    """
    if not isinstance(turn, dict):
        raise DataError(
            f"{where} must be an object with role and content, not {type(turn).__name__}."
        )
    message = {key: value for key, value in turn.items() if value is not None}
    _check_keys(message, where)
    if "from" in message:
        message = _sharegpt(message, where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where}.role must be a text, not {role!r}.")
    message["role"] = ROLES.get(role, role)
    if "function_call" in message:  # OpenAI's own, before there were tool_calls
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if message.get("tool_calls"):
        calls = maybe_json(message["tool_calls"], f"{where}.tool_calls")
        if not isinstance(calls, list):
            raise DataError(f"{where}.tool_calls must be a list, not {type(calls).__name__}.")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    if "weight" in message:
        weight = message["weight"]  # anything between 0 and 1 would be trained like 1
        if not isinstance(weight, (bool, int, float)) or weight not in (0, 1):
            raise DataError(f"{where}.weight must be 0 (not trained on) or 1, not {weight!r}.")
        message["weight"] = int(weight)
    if message["role"] not in KNOWN_ROLES and message.get("weight") != 0:
        raise DataError(
            f"{where}.role={message['role']!r} is written by many templates, and never trained on: "
            "call it assistant, or set weight: 0 for such turns if that is meant."
        )
    message["content"] = _content(
        message.get("content"), where, may_lack=bool(message.get("tool_calls"))
    )
    return message


def _check_keys(message: Message, where: str) -> None:
    for key in message:
        if MASKS.fullmatch(key):
            raise DataError(
                f"{where}.{key}={message[key]!r} is another program's loss mask: set weight: 1 for "
                "a turn to train on and weight: 0 for the others."
            )
    for key in MEDIA:
        if message.get(key) not in (None, [], {}, ""):
            raise DataError(f"{where}.{key} would be ignored: {NOT_READ}.")


def _sharegpt(message: Message, where: str) -> Message:
    """`{"from", "value"}` as `{"role", "content"}`; the value of a function call is JSON."""
    sender = message["from"]
    value = message.get("value", message.get("content"))
    if not isinstance(sender, str) or sender not in ROLES:
        raise DataError(f"{where}: from={sender!r} is none of {', '.join(ROLES)}.")
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "content")}
    if sender != "function_call":
        return {**rest, "role": sender, "content": value}
    calls = maybe_json(value, f"{where}.value")
    calls = calls if isinstance(calls, list) else [calls]
    names = [call.get("name") if isinstance(call, dict) else None for call in calls]
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{where}.value of a function_call must be JSON such as "
            f'{{"name": "f", "arguments": {{}}}}, not '
            f"{str(value)[:40]!r}."
        )
    return {
        **rest,
        "role": sender,
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """OpenAI keeps a call's arguments as JSON text; templates write them out as an object."""
    if not isinstance(call, dict):
        raise DataError(f"{where}.tool_calls must hold objects, not {type(call).__name__}.")
    function = call.get("function", call if "name" in call else None)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where}.tool_calls must hold objects with a function and its name, not "
            f"{str(call)[:40]!r}."
        )
    arguments = maybe_json(function.get("arguments", {}), f"{where}.tool_calls.arguments")
    rest = {key: value for key, value in call.items() if key not in ("name", "arguments")}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _content(content: Any, where: str, may_lack: bool) -> str:
    if content is None and may_lack:
        return ""
    if isinstance(content, list):
        content = "".join(
            _part(part, f"{where}.content[{place}]") for place, part in enumerate(content)
        )
    if not isinstance(content, str):
        shown = "missing" if content is None else f"{type(content).__name__}"
        raise DataError(f"{where}.content must be a text, not {shown}.")
    return sound_text(content, f"{where}.content")


def _part(part: Any, where: str) -> str:
    """Returns the text of one part of a content: `{"type": "text", "text": "Hi"}`, or its text
    under another name.
    """
    if not isinstance(part, dict):
        raise DataError(
            f'{where} must be an object such as {{"type": "text", "text": ...}}, not {part!r:.40}.'
        )
    kind = part.get("type", "text")
    if kind not in TEXT_PARTS:
        raise DataError(
            f"{where} is of type {kind!r}, but only text is supported, and images with "
            "dataset=images: remove it, or convert it to "
            "text."
        )
    found = {key: part[key] for key in TEXT_KEYS if part.get(key) is not None}
    if len(found) != 1 or not all(isinstance(value, str) for value in found.values()):
        shown = str(part)
        raise DataError(
            f"{where} must hold its text once, under text: it is "
            f"{shown[:60]}{'...' * (len(shown) > 60)}."
        )
    _check_keys(part, where)
    return str(next(iter(found.values())))


def maybe_json(value: Any, where: str) -> Any:
    """Returns the value, parsed if it is a text of JSON."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    with explained(f"{where} is not valid JSON", ValueError, RecursionError, kind=DataError):
        return json.loads(value)
