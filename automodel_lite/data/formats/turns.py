"""The turn of a chat becomes `{"role", "content", ...}`, from the shapes that turns have.

What is understood is mapped to what it means: OpenAI's messages and its older `function_call`,
ShareGPT's turns with their function calls, lists of text parts, Anthropic's blocks of calls,
results and thoughts. What is not understood is an error that names the place: a part, a weight or a
picture that is passed over in silence trains another model than the data describe.
"""

from __future__ import annotations

import re
from typing import Any

from automodel_lite.data.document import MEDIA, NAMES, NOT_READ, Message, sound_text
from automodel_lite.data.formats.calls import parsed, read_call, read_calls, read_tools
from automodel_lite.errors import DataError

ROLES = NAMES["roles"]
TEXT_PARTS = ("text", "input_text", "output_text")
TEXT_KEYS = ("text", "value", "content")
TURN_TOOLS = ("tools", "functions")
"""Keys of a turn that hold the tools of its chat."""
THOUGHTS = ("thinking", "redacted_thinking")
"""Anthropic's blocks of what a model thinks before it answers."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_BLOCKS = {"tool_use", "tool_result", *THOUGHTS}
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


def read_turns(turn: Any, where: str) -> list[Message]:
    """Returns the message of one turn, or several where it holds results of tools as blocks; raises
    DataError with its place, `messages[2]`, and what is wrong.
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
    for key in TURN_TOOLS:
        read_tools(message.get(key), f"{where}.{key}")
    parts = _split_blocks(message, where)
    return [_read_message(part, role, where) for part in parts]


def _read_message(message: Message, role: str, where: str) -> Message:
    """Returns the message of a turn that was given the role `role`."""
    message = _with_calls(message, role, where)
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
    content = message.get("content")
    message["content"] = _content(content, where, may_lack=bool(message.get("tool_calls")))
    return message | _keys_of_parts(content, where)


_OF_TURNS = ("weight", "tool_calls", "function_call", "reasoning_content", "role")
"""Keys that a turn is read by; in a part of its content they would do nothing."""


def _keys_of_parts(content: Any, where: str) -> Message:
    """Returns what the parts of a content hold beside their texts, under names that no template
    reads, so that it is noted as unused: `content.citations`.
    """
    found = {}
    for place, part in enumerate(content if isinstance(content, list) else ()):
        for key, value in part.items():
            if key in ("type", *TEXT_KEYS) or value in (None, "", [], {}):
                continue
            if key in _OF_TURNS:
                raise DataError(
                    f"{where}.content[{place}].{key} would be ignored: a part of a content has a "
                    f"text alone; write {key} beside the content of the turn."
                )
            found[f"content.{key}"] = value
    return found


def _with_calls(message: Message, role: str, where: str) -> Message:
    """Returns the message with all its calls under `tool_calls`."""
    found = {}
    if "tool_calls" in message:
        found["tool_calls"] = read_calls(message["tool_calls"], f"{where}.tool_calls")
    # OpenAI's own, before there were tool_calls
    if "function_call" in message and message["function_call"] not in ("", {}):
        found["function_call"] = [read_call(message["function_call"], f"{where}.function_call")]
    # a turn of ShareGPT that is a call and nothing else
    if role == "function_call" and message.get("content") not in (None, ""):
        found["content"] = _calls_of_content(message["content"], where)
    found = {key: calls for key, calls in found.items() if calls}
    if len(found) > 1:
        raise DataError(f"{where} has calls in {' and '.join(found)}: keep one of them.")
    rest = {
        key: value for key, value in message.items() if key not in ("tool_calls", "function_call")
    }
    if not found:
        return rest
    if message["role"] in KNOWN_ROLES and message["role"] not in ("assistant", "model"):
        raise DataError(
            f"{where}.{next(iter(found))} would be ignored: a turn of role {message['role']} "
            "calls no tool."
        )
    if "content" in found:
        del rest["content"]
    return {**rest, "tool_calls": next(iter(found.values()))}


def _calls_of_content(content: Any, where: str) -> list[dict[str, Any]]:
    calls = parsed(content, f"{where}.content")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, (dict, str)) for call in calls) or calls == [content]:
        raise DataError(
            f"{where}.value of a function_call must be JSON such as "
            f'{{"name": "f", "arguments": {{}}}}, not '
            f"{str(content)[:40]!r}."
        )
    several = len(calls) > 1
    return [
        read_call(call, f"{where}.value{f'[{place}]' * several}")
        for place, call in enumerate(calls)
    ]


def _split_blocks(message: Message, where: str) -> list[Message]:
    """Returns the messages of a turn whose content is a list of Anthropic's blocks: calls go to
    `tool_calls`, thoughts to `reasoning_content`, and each result becomes a turn of role tool. Any
    other turn is one message.
    """
    content = message.get("content")
    kinds = (
        [part.get("type") for part in content if isinstance(part, dict)]
        if isinstance(content, list)
        else []
    )
    if not _BLOCKS & {kind for kind in kinds if isinstance(kind, str)}:
        return [message]
    # Blocks in their order: texts gather until a result, which is a turn by itself, or until a
    # call, behind which nothing may stand.
    assert isinstance(content, list)
    rest = {key: value for key, value in message.items() if key != "content"}
    thoughts = [
        _thought(part, message, f"{where}.content[{place}]")
        for place, part in enumerate(content)
        if _kind_of(part) in THOUGHTS
    ]
    if thoughts:
        rest["reasoning_content"] = "\n\n".join(thoughts)
    found: list[Message] = []
    texts: list[Any] = []
    calls: list[Any] = []
    for place, part in enumerate(content):
        at = f"{where}.content[{place}]"
        kind = _kind_of(part)
        if kind in THOUGHTS:
            if texts or calls:
                raise DataError(
                    f"{at} stands behind what is said, and templates write thoughts first: put it "
                    "before, or what follows it into a turn of its own."
                )
        elif kind == "tool_result":
            if message["role"] not in ("user", "tool"):
                raise DataError(f"{at} is a tool_result: put it into a turn of role user.")
            # the texts before it are a turn of their own
            if texts:
                found.append({**rest, "content": texts})
                texts = []
            found.append({**rest, **_result(part, at)})
        elif kind == "tool_use":
            calls.append(part)
        elif calls:
            raise DataError(
                f"{at} stands behind a call, and templates write calls last: put it before, or "
                "into a turn of its own."
            )
        else:
            texts.append(part)
    if calls:
        if message.get("tool_calls"):
            raise DataError(f"{where} has calls in tool_calls and content: keep one of them.")
        return [{**rest, "content": texts, "tool_calls": calls}]
    return [*found, {**rest, "content": texts}] if texts or thoughts else found


def _kind_of(part: Any) -> Any:
    """Returns the type of a block; None of what is no block."""
    return part.get("type") if isinstance(part, dict) else None


def _thought(part: dict[str, Any], message: Message, where: str) -> str:
    """Returns the text of a thought; its signature is for Anthropic's servers alone."""
    if part["type"] == "redacted_thinking":
        raise DataError(f"{where} holds thoughts that are encrypted: remove it.")
    if message["role"] not in ("assistant", "model"):
        raise DataError(f"{where} is a thought: put it into a turn of role assistant.")
    if taken := [key for key in THOUGHT_KEYS if message.get(key)]:
        raise DataError(
            f"{where.rpartition('.')[0]} has thoughts in {taken[0]} and content: keep one of them."
        )
    said = part.get("thinking")
    if not isinstance(said, str) or {*part} - {"type", "thinking", "signature"}:
        raise DataError(
            f"{where} must hold a text under thinking, and a signature beside it at most: it is "
            f"{str(part)[:60]}."
        )
    return said


def _result(part: dict[str, Any], where: str) -> Message:
    """Returns the turn of one tool_result."""
    content = part.get("content")
    result = {"role": "tool", "content": "" if content is None else content}
    if part.get("tool_use_id"):
        result["tool_call_id"] = part["tool_use_id"]
    known = ("type", "content", "tool_use_id")
    for key, value in part.items():
        if key not in known and value not in (None, "", [], {}, False):
            raise DataError(
                f"{where}.{key} would be ignored: a tool_result has a content and a tool_use_id: "
                "write it into the content, or remove it."
            )
    return result


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
    """`{"from", "value"}` as `{"role", "content"}`."""
    sender = message["from"]
    value = message.get("value", message.get("content"))
    if not isinstance(sender, str) or sender not in ROLES:
        raise DataError(f"{where}: from={sender!r} is none of {', '.join(ROLES)}.")
    if message.get("content", value) not in (value, ""):
        raise DataError(f"{where} has two texts, in value and in content: keep one of them.")
    if ROLES.get(role := message.get("role", sender), role) != ROLES[sender]:
        raise DataError(f"{where} has two roles, from={sender} and role={role}: keep one of them.")
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "content")}
    return {**rest, "role": sender, "content": value}


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
