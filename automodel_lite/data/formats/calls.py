"""Tool calls, their arguments and the tools of a chat, from the shapes that programs keep them in.

OpenAI's `{"function": {"name", "arguments"}}`, Llama's `parameters`, LangChain's `args`,
Anthropic's `input`; objects, their JSON text, text of such text, or the pairs of an Arrow map. Each
becomes the one shape that chat templates write, or an error that names its place: of arguments that
are not an object, a template makes JSON that no program reads again.
"""

from __future__ import annotations

import math
from typing import Any

from automodel_lite.data.document import shown
from automodel_lite.data.strict_json import key_twice, read_json
from automodel_lite.errors import DataError, explained

ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys of a call's arguments: of OpenAI, Llama 3, LangChain, Anthropic."""
CALL_TYPES = ("function", "function_call", "tool_call", "tool_use")
_FUNCTION_KEYS = ("name", *ARGUMENTS)
# a status and an index say how a call was sent, not what it is
_CALL_KEYS = (*_FUNCTION_KEYS, "function", "type", "id", "call_id", "index", "status")


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Returns the calls of a turn, each `{"type": "function", "id", "function": {"name",
    "arguments"}}`: the arguments an object, the id only where there is one.
    """
    calls = parsed(value, where)
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise DataError(f"{where} must be a list, not {type(calls).__name__}.")
    return [read_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def read_call(value: Any, where: str) -> dict[str, Any]:
    """Returns one call, as `read_calls` does; raises DataError for a key that is not known."""
    call = parsed(value, where)
    if not isinstance(call, dict):
        raise DataError(f"{where} must be an object, not {shown(call)}.")
    call = {key: item for key, item in call.items() if item is not None}
    function = parsed(call.get("function"), f"{where}.function")
    if function is None:
        function = {}
    name = function.get("name", call.get("name")) if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{where} must be an object with a function and its name, not {str(call)[:40]!r}."
        )
    if call.get("name", name) != name:
        raise DataError(f"{where} has two names, {name!r} and {call['name']!r}: keep one of them.")
    if (kind := call.get("type", "function")) not in CALL_TYPES:
        raise DataError(
            f"{where}.type={kind!r} is none of {', '.join(CALL_TYPES)}: calls of other kinds are "
            "not rendered."
        )
    _check_known(function, _FUNCTION_KEYS, f"{where}.function")
    _check_known(call, _CALL_KEYS, where)

    # Logs keep an empty `arguments` beside a full `input`: what is empty says nothing.
    found: dict[str, dict[str, Any]] = {}
    for holder, at in ((function, f"{where}.function"), (call, where)):
        for key in ARGUMENTS:
            if key in holder and (arguments := read_arguments(holder[key], f"{at}.{key}")):
                found[key if holder is call else f"function.{key}"] = arguments
    values = list(found.values())
    if any(other != values[0] for other in values[1:]):
        raise DataError(f"{where} has several arguments, {' and '.join(found)}: keep one of them.")

    read: dict[str, Any] = {"type": "function"}
    # results name the call_id, where a log has both
    for key in ("call_id", "id"):
        if call.get(key) and "id" not in read:
            read["id"] = call[key]
    if "index" in call:
        read["index"] = call["index"]
    return {**read, "function": {"name": name, "arguments": values[0] if values else {}}}


def read_arguments(value: Any, where: str) -> dict[str, Any]:
    """Returns the arguments of a call, an object; `""` and null, as gateways write them for a call
    without arguments, are `{}`.

    >>> read_arguments('{"city": "Oslo"}', "messages[1].tool_calls[0].arguments")
    {'city': 'Oslo'}
    """
    arguments = parsed(value, where, is_strict=True)
    if arguments is None:
        return {}
    if _is_pairs(arguments):
        arguments = _object_of_pairs(arguments, where)
    if not isinstance(arguments, dict):
        raise DataError(f"{where} must be a JSON object, not {shown(arguments)}.")
    return _sound(arguments, where)


def read_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Returns the tools of a chat, objects with a name, as they are; Anthropic's `input_schema`
    becomes the `parameters` that templates know.
    """
    tools = parsed(value, where)
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise DataError(f"{where} must be a list, not {type(tools).__name__}.")
    return [_read_tool(tool, f"{where}[{place}]") for place, tool in enumerate(tools)]


def _read_tool(value: Any, where: str) -> dict[str, Any]:
    tool = _sound(parsed(value, where), where)
    function = parsed(tool.get("function"), f"{where}.function") if isinstance(tool, dict) else None
    named = function if function is not None else tool
    if not isinstance(named, dict) or not isinstance(named.get("name"), str) or not named["name"]:
        raise DataError(
            f"{where} must be an object with the name of a function, not {shown(tool)}."
        )
    if function is not None:
        return {**tool, "function": function}
    if "input_schema" in tool:
        rest = {key: item for key, item in tool.items() if key not in ("input_schema", "type")}
        schema = parsed(tool["input_schema"], f"{where}.input_schema")
        return {"type": "function", "function": {**rest, "parameters": schema}}
    return dict(tool)


def parsed(value: Any, where: str, is_strict: bool = False) -> Any:
    """Returns the value, parsed until it is no JSON text; None for `""`, white space and `null`.

    is_strict: what is no JSON text is an error, also where it does not look like one
    """
    while isinstance(value, str):
        text = value.strip()
        if text in ("", "null"):
            return None
        if text[0] not in '{["' and not is_strict:
            return value
        with explained(f"{where} is not valid JSON", ValueError, RecursionError, kind=DataError):
            value = read_json(text)
    return value


def _check_known(found: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key, value in found.items():
        if key not in known and value not in (None, "", [], {}):
            raise DataError(
                f"{where}.{key} would be ignored: a call has a name and "
                f"{', '.join(ARGUMENTS[:-1])} or {ARGUMENTS[-1]}: remove it, or put it there."
            )


def _is_pairs(value: Any) -> bool:
    """Is it an Arrow map, which Python gets as a list of pairs, or its JSON? An empty one is
    `[]`.
    """
    return isinstance(value, list) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)
        for pair in value
    )


def _object_of_pairs(pairs: list[Any], where: str) -> dict[str, Any]:
    if (twice := key_twice(pairs)) is not None:
        raise DataError(f"{where} has the key {twice!r} twice: keep one of them.")
    return dict(pairs)


def _sound(value: Any, where: str) -> Any:
    """Returns a value that JSON can hold: Arrow maps inside become objects.

    Raises DataError: NaN or an infinity (`1e400` is one), which are no JSON; a key that is no text.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where} holds {value}, which JSON has no number for: write null or text.")
    # only Arrow makes tuples
    if isinstance(value, list) and value and _is_pairs(value) and isinstance(value[0], tuple):
        value = _object_of_pairs(value, where)
    if isinstance(value, dict):
        if other := [key for key in value if not isinstance(key, str)]:
            raise DataError(f"{where} has the key {other[0]!r}: keys of JSON are texts.")
        return {key: _sound(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sound(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if value is not None and not isinstance(value, (str, int, float)):
        raise DataError(f"{where} must be a value of JSON, not {shown(value)}.")
    return value
