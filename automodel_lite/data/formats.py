"""The shapes in which people keep their data: found from the columns, normalised row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_lite.data.documents import Document
from automodel_lite.data.readers import RawRow, RawRows
from automodel_lite.data.token_rows import packed_tokens, tokens
from automodel_lite.errors import ConfigError, DataError

Normalise = Callable[[RawRow], Document]


@dataclass(frozen=True)
class Format:
    """One shape: the columns that tell it (any of these sets), and how a row of it becomes a document."""

    name: str
    kind: str
    signs: tuple[tuple[str, ...], ...]
    normalise: Normalise


def messages(row: RawRow) -> Document:
    """`messages` of `{"role", "content", "tool_calls", "reasoning_content"}`, optional `tools`."""
    turns = [_message(turn, place) for place, turn in enumerate(_list(row, "messages"))]
    return _chat(turns, row)


def sharegpt(row: RawRow) -> Document:
    """`conversations` of `{"from": "human", "value": …}`, optional `system`."""
    turns = []
    for place, turn in enumerate(_list(row, "conversations")):
        if isinstance(turn, dict) and "from" in turn:
            role = SHAREGPT_ROLES.get(str(turn["from"]))
            if role is None:
                known = ", ".join(SHAREGPT_ROLES)
                raise DataError(f"conversations[{place}]: from={turn['from']!r} is none of {known}.")
            turn = {"role": role, "content": turn.get("value")}
        turns.append(_message(turn, place, column="conversations"))
    return _chat(turns, row)


SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "assistant",
}  # fmt: skip


def alpaca(row: RawRow) -> Document:
    """`instruction`, optional `input`, `output`, optional `system` and `history` of [question, answer] pairs."""
    return _prompt_completion(row, ("instruction", "input"), "output")


def question_answer(row: RawRow) -> Document:
    """`question`, optional `context` (put before it), `answer`."""
    return _prompt_completion(row, ("context", "question"), "answer")


def prompt_completion(row: RawRow) -> Document:
    """`prompt` and `completion`: texts, or both lists of messages (trained on: the assistant's of the completion)."""
    if isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list):
        before = [_message(turn, place, "prompt") for place, turn in enumerate(_list(row, "prompt"))]
        after = [_message(turn, place, "completion") for place, turn in enumerate(_list(row, "completion"))]
        return _chat([*({**turn, "weight": 0} for turn in before), *after], row)
    return _prompt_completion(row, ("prompt",), "completion")


def text(row: RawRow) -> Document:
    """`text`, trained on whole."""
    return {"text": _text(row, "text")}


FORMATS = (
    Format("packed", "tokens", (("input_ids", "labels", "seq_lens"),), packed_tokens),
    Format("tokens", "tokens", (("input_ids",),), tokens),
    Format("messages", "messages", (("messages",),), messages),
    Format("sharegpt", "messages", (("conversations",),), sharegpt),
    Format("prompt_completion", "prompt_completion", (("prompt", "completion"),), prompt_completion),
    Format("alpaca", "prompt_completion", (("instruction", "output"),), alpaca),
    Format("question_answer", "prompt_completion", (("question", "answer"),), question_answer),
    Format("text", "text", (("text",),), text),
)

# Other names of the same columns; a set that uses them is told so by the printed line.
ALIASES = {
    "messages": ("conversation", "dialogue", "chat"),
    "output": ("response", "completion"),
    "completion": ("response", "chosen_response", "target"),
    "prompt": ("query", "problem", "source"),
    "answer": ("solution", "response"),
    "text": ("content", "document"),
}


@dataclass(frozen=True)
class Detected:
    """The format of a set and the names that its columns have there: canonical name -> column."""

    format: Format
    renames: Mapping[str, str]
    description: str


def detect(columns: Sequence[str], format_name: str | None, renames: Mapping[str, str] | None) -> Detected:
    """Finds the format from the columns, or checks the given one.

    Args:
        renames: canonical name -> column of the file (`{"question": "Frage"}`).

    Raises:
        ConfigError: unknown format, a column that is not there, or columns of no known format.
    """
    renames = dict(renames or {})
    for canonical, column in renames.items():
        if column not in columns:
            raise ConfigError(
                f"dataset.columns.{canonical}={column} is not a column of the data, which has {', '.join(columns)}."
            )
    candidates = FORMATS if format_name is None else [_by_name(format_name)]
    named = {*columns, *renames}
    for candidate in candidates:
        for sign in candidate.signs:
            if named.issuperset(sign):
                return _detected(candidate, columns, renames)
    for candidate in candidates:
        for sign in candidate.signs:
            aliased = _aliases(sign, named)
            if aliased is not None:
                return _detected(candidate, columns, {**aliased, **renames})
    if format_name is not None:
        wanted = " or ".join(" + ".join(sign) for sign in candidates[0].signs)
        raise ConfigError(
            f"dataset.format={format_name} needs the columns {wanted}, the data have {', '.join(columns)}: "
            f"name them with dataset.columns."
        )
    known = ", ".join(" + ".join(known.signs[0]) for known in FORMATS)
    raise ConfigError(
        f"the columns {', '.join(columns)} are of no known format: name them, for instance "
        f"dataset.columns.prompt={columns[0]} dataset.columns.completion={columns[-1]}. Known are {known}."
    )


def _by_name(name: str) -> Format:
    for known in FORMATS:
        if known.name == name:
            return known
    raise ConfigError(f"dataset.format={name} is none of {', '.join(known.name for known in FORMATS)}.")


def _aliases(sign: Sequence[str], named: set[str]) -> dict[str, str] | None:
    """The other names under which all columns of `sign` are there."""
    found: dict[str, str] = {}
    for canonical in sign:
        if canonical in named:
            continue
        other = next((alias for alias in ALIASES.get(canonical, ()) if alias in named), None)
        if other is None:
            return None
        found[canonical] = other
    return found


def _detected(found: Format, columns: Sequence[str], renames: Mapping[str, str]) -> Detected:
    mapped = ", ".join(f"{canonical} = {column}" for canonical, column in renames.items())
    description = f"columns {','.join(columns)} → {found.name}" + (f" ({mapped})" if mapped else "")
    return Detected(found, renames, description)


@dataclass(frozen=True)
class NormalisedRows:
    """Raw rows as documents; a row that does not fit its format raises `DataError` with its place and column."""

    raw: RawRows
    normalise: Normalise
    renames: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> Document:
        row = self.raw[index]
        if self.renames:
            row = {**row, **{canonical: row.get(column) for canonical, column in self.renames.items()}}
        try:
            return self.normalise(row)
        except DataError as error:
            raise DataError(f"{self.where(index)}: {self._own_names(str(error))}") from error

    def where(self, index: int) -> str:
        return self.raw.where(index)

    def _own_names(self, message: str) -> str:
        for canonical, column in self.renames.items():
            message = message.replace(f"column {canonical} ", f"column {column} ")
        return message


def _chat(turns: list[dict[str, Any]], row: RawRow) -> Document:
    system = row.get("system") or row.get("system_prompt")
    if system and turns and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": _text({"system": system}, "system")}, *turns]
    if not turns:
        raise DataError("an empty list of messages.")
    document: Document = {"messages": turns}
    tools = _maybe_json(row.get("tools"), "tools")
    if tools:
        if not isinstance(tools, list):
            raise DataError(f"column tools must be a list, not {type(tools).__name__}.")
        document["tools"] = tools
    return document


def _message(turn: Any, place: int, column: str = "messages") -> dict[str, Any]:
    where = f"{column}[{place}]"
    if not isinstance(turn, dict):
        raise DataError(f"{where} must be an object with role and content, not {type(turn).__name__}.")
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where}.role must be a text, not {role!r}.")
    message = {key: value for key, value in turn.items() if value is not None}
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in _maybe_json(message["tool_calls"], "tool_calls")]
    message["content"] = _content(turn.get("content"), where, may_lack=bool(message.get("tool_calls")))
    return message


def _content(content: Any, where: str, may_lack: bool) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and may_lack:
        return ""
    if not isinstance(content, str):
        shown = "an image or another part that is no text" if isinstance(content, list) else type(content).__name__
        raise DataError(f"{where}.content must be a text, not {shown}.")
    return _sound_text(content, f"{where}.content")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """OpenAI keeps a call's arguments as JSON text; templates write them out as an object."""
    if not isinstance(call, dict):
        raise DataError(f"{where}.tool_calls must hold objects, not {type(call).__name__}.")
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _maybe_json(function.get("arguments"), "arguments")}}


def _maybe_json(value: Any, name: str) -> Any:
    """The value, parsed if it is a text of JSON."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"column {name} is a text that is no JSON: {error}.") from error


def _prompt_completion(row: RawRow, prompt_columns: Sequence[str], completion_column: str) -> Document:
    parts = [_text(row, column) for column in prompt_columns[:-1] if row.get(column)]
    last = prompt_columns[-1]
    if last == "input":  # of Alpaca, may be empty
        parts = [_text(row, "instruction"), *([_text(row, "input")] if row.get("input") else [])]
    else:
        parts.append(_text(row, last))
    document = {"prompt": "\n\n".join(parts), "completion": _text(row, completion_column)}
    if row.get("system"):
        document["system"] = _text(row, "system")
    return document


def _list(row: RawRow, column: str) -> list[Any]:
    value = _maybe_json(row.get(column), column)
    if not isinstance(value, list):
        raise DataError(f"column {column} must be a list of messages, not {_shown(value)}.")
    return value


def _text(row: RawRow, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"column {column} must be a text, not {_shown(value)}.")
    return _sound_text(value, f"column {column}")


def _sound_text(value: str, where: str) -> str:
    """The text, if it is one that can be written as UTF-8: JSON may hold half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds half of a surrogate pair at character {error.start + 1}.") from error
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
