"""The shapes in which people keep their data: a row of each of them as a document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, takewhile
from typing import Any

from automodel_lite.data.reading.documents import (
    Document,
    Message,
    maybe_json,
    read_turn,
    sound_text,
)
from automodel_lite.data.reading.labels import packed_tokens, tokens
from automodel_lite.data.reading.readers import RawRow
from automodel_lite.errors import DataError

Normalize = Callable[[RawRow], Document]


@dataclass(frozen=True)
class Format:
    """One shape: the columns that tell it, how a row of it becomes a document, and what more it may
    have.
    """

    name: str
    kind: str
    columns: tuple[str, ...]
    normalize: Normalize
    optional: tuple[str, ...] = ()


def messages(row: RawRow, column: str = "messages") -> Document:
    """`messages` of `{"role", "content", "tool_calls", "reasoning_content"}`, or ShareGPT's
    `conversations` of `{"from": "human", "value": …}`; optional `tools`, `system`.
    """
    return _chat(_turns(row, column), row)


def alpaca(row: RawRow) -> Document:
    """`instruction`, optional `input`, `output`, optional `system` and `history` of [question,
    answer] pairs.
    """
    prompt = _alpaca_prompt(row)
    history = row.get("history")
    if not history:
        return _prompt_completion(row, prompt, "output")
    texts: list[str] = []
    for place, pair in enumerate(history if isinstance(history, list) else [history]):
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise DataError(f"column history[{place}] must be a pair of texts, not {_shown(pair)}.")
        texts += [sound_text(part, f"column history[{place}]") for part in pair]
    roles = cycle(("user", "assistant"))
    texts = [*texts, prompt, _text(row, "output")]
    return _chat([{"role": role, "content": text} for role, text in zip(roles, texts)], row)


def _alpaca_prompt(row: RawRow) -> str:
    columns = ["instruction", "input"] if row.get("input") else ["instruction"]
    return "\n\n".join(_text(row, column) for column in columns)


def question_answer(row: RawRow) -> Document:
    """`question`, optional `context` (put before it), `answer`, optional `system`."""
    context = [_text(row, "context")] if row.get("context") else []
    return _prompt_completion(row, "\n\n".join([*context, _text(row, "question")]), "answer")


def prompt_completion(row: RawRow) -> Document:
    """`prompt` and `completion`: texts, or both lists of messages (trained on: the assistant's of
    the completion).
    """
    if isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list):
        before = _turns(row, "prompt")
        after = _turns(row, "completion")
        return _chat([*({**turn, "weight": 0} for turn in before), *after], row)
    return _prompt_completion(row, _text(row, "prompt"), "completion")


def responses(row: RawRow) -> Document:
    """`prompt`, a text or a list of messages, and `responses`, several answers to it (texts,
    messages, or lists of these), each of which is trained on.
    """
    answers = row.get("responses")
    if not isinstance(answers, list) or not answers:
        raise DataError(f"column responses must be a list of answers, not {_shown(answers)}.")
    prompt = row.get("prompt")
    if isinstance(prompt, str) and not all(isinstance(answer, str) for answer in answers):
        prompt = [{"role": "user", "content": prompt}]
    documents = []
    for number, answer in enumerate(answers):
        if isinstance(prompt, list) and isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        if isinstance(prompt, list) and not isinstance(answer, list):
            answer = [answer]
        try:
            documents.append(prompt_completion({**row, "prompt": prompt, "completion": answer}))
        except DataError as error:
            text = str(error).replace("column completion", f"responses[{number}]")
            raise DataError(text.replace("completion[", f"responses[{number}][")) from None
    return {"documents": documents}


def text(row: RawRow) -> Document:
    """`text`, trained on whole."""
    return {"text": _text(row, "text")}


def preference(row: RawRow) -> Document:
    """`chosen` and `rejected`: answers (texts, messages, or one message) to a `prompt` (text or
    messages), an Alpaca `instruction` or a ShareGPT `conversations`; or whole chats, or whole
    texts, that begin with the same prompt.
    """
    for name in ("chosen", "rejected"):
        if row.get(name) in (None, "", []):
            raise DataError(f"column {name} is empty: a preference pair has two answers.")
    if row["chosen"] == row["rejected"]:
        raise DataError(
            "column chosen and column rejected are equal, so there is nothing to prefer."
        )
    if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        raise DataError(
            "column chosen and column rejected must be of one kind: both texts, or both lists of "
            "messages."
        )
    if not isinstance(row["chosen"], str):
        return {
            name: _chat(turns, row)
            for name, turns in zip(("chosen", "rejected"), _answer_turns(row))
        }
    if isinstance(row.get("prompt"), list) or row.get("conversations"):
        before = [{**turn, "weight": 0} for turn in _prompt_turns(row)]
        answers = {
            name: [*before, {"role": "assistant", "content": _text(row, name)}]
            for name in ("chosen", "rejected")
        }
        return {name: _chat(turns, row) for name, turns in answers.items()}
    if row.get("prompt") is not None or row.get("instruction") is not None:
        prompt = _alpaca_prompt(row) if row.get("prompt") is None else _text(row, "prompt")
        return {name: _prompt_completion(row, prompt, name) for name in ("chosen", "rejected")}
    # Whole texts: what they share, to its last white space, is the prompt.
    texts = {name: _text(row, name) for name in ("chosen", "rejected")}
    shared = takewhile(lambda both: both[0] == both[1], zip(*texts.values()))
    cut = max(
        (place + 1 for place, (character, _) in enumerate(shared) if character.isspace()), default=0
    )
    if not cut or any(not text[cut:].strip() for text in texts.values()):
        raise DataError(_NO_COMMON_PROMPT)
    return {name: {"prompt": text[:cut], "completion": text[cut:]} for name, text in texts.items()}


_NO_COMMON_PROMPT = (
    "column chosen and column rejected must begin with the same prompt, and go on with an answer."
)


def _prompt_turns(row: RawRow) -> list[Message]:
    """Returns the turns before the answers, as far as they stand in a column of their own."""
    if row.get("conversations"):
        return _turns(row, "conversations")
    if isinstance(row.get("prompt"), list):
        return _turns(row, "prompt")
    text = (
        _text(row, "prompt")
        if row.get("prompt")
        else _alpaca_prompt(row)
        if row.get("instruction")
        else ""
    )
    return [{"role": "user", "content": text}] if text else []


def _answer_turns(row: RawRow) -> list[list[Message]]:
    """Returns both chats, whose common beginning is not trained on."""
    listed = {
        name: row[name] if isinstance(row[name], list) else [row[name]]
        for name in ("chosen", "rejected")
    }
    chats = [_turns(listed, name) for name in listed]
    # answers alone, else the whole chat is in both
    if any(turns[0]["role"] == "assistant" for turns in chats):
        chats = [[*_prompt_turns(row), *turns] for turns in chats]
    pairs = list(zip(*chats))
    num_shared = next(
        (place for place, (one, other) in enumerate(pairs) if one != other), len(pairs)
    )
    # Answers may begin alike: what is shared ends with the last turn that is not the assistant's.
    while num_shared and chats[0][num_shared - 1]["role"] == "assistant":
        num_shared -= 1
    for turns in chats:
        answers = turns[num_shared:]
        if not num_shared or not answers or answers[0]["role"] != "assistant":
            raise DataError(_NO_COMMON_PROMPT)
    return [
        [*({**turn, "weight": 0} for turn in turns[:num_shared]), *turns[num_shared:]]
        for turns in chats
    ]


SYSTEM = ("system", "system_prompt")
CHAT_EXTRAS = ("tools", "functions", *SYSTEM)
# column of any format: rows of one name may share their beginning (data/tokens/trees.py)
GROUP = "group"
FORMATS = (
    Format(
        "packed",
        "tokens",
        ("input_ids", "labels", "seq_lens"),
        packed_tokens,
        ("seq_lens_padded", "loss_weights"),
    ),
    Format(
        "tokens",
        "tokens",
        ("input_ids",),
        tokens,
        ("labels", "loss_mask", "attention_mask", "loss_weights"),
    ),
    Format("messages", "messages", ("messages",), messages, CHAT_EXTRAS),
    Format(
        "sharegpt",
        "messages",
        ("conversations",),
        partial(messages, column="conversations"),
        CHAT_EXTRAS,
    ),
    Format(
        "prompt_completion",
        "prompt_completion",
        ("prompt", "completion"),
        prompt_completion,
        CHAT_EXTRAS,
    ),
    Format("responses", "prompt_completion", ("prompt", "responses"), responses, CHAT_EXTRAS),
    Format(
        "alpaca",
        "prompt_completion",
        ("instruction", "output"),
        alpaca,
        ("input", "history", *SYSTEM),
    ),
    Format(
        "question_answer",
        "prompt_completion",
        ("question", "answer"),
        question_answer,
        ("context", *SYSTEM),
    ),
    Format("text", "text", ("text",), text),
    Format(
        "preference",
        "preference",
        ("chosen", "rejected"),
        preference,
        ("prompt", "instruction", "input", "conversations", *CHAT_EXTRAS),
    ),
)


def own_format(name: str, function: Callable[[RawRow], Any]) -> Format:
    """Returns the format of a function of the user's: it makes of a raw row a list of messages, or
    an object with `messages`, with `prompt` and `completion`, or with `text`, as a row of that
    format has them.
    """

    kinds = ("messages", "prompt_completion", "text")

    def normalize(row: RawRow) -> Document:
        made = function(row)
        made = {"messages": made} if isinstance(made, list) else made
        keys = made.keys() if isinstance(made, dict) else ()
        found = next(
            (known for known in FORMATS if known.kind in kinds and {*known.columns} <= {*keys}),
            None,
        )
        if found is None:
            raise DataError(
                f"dataset.format={name} must return a list of messages, or an object with "
                f"messages, with prompt and completion, or with text, not {_shown(made)}."
            )
        return found.normalize(made)

    return Format(name, "own", (), normalize)


def _turns(row: RawRow, column: str) -> list[Message]:
    turns = maybe_json(row.get(column), f"column {column}")
    if not isinstance(turns, list):
        raise DataError(f"column {column} must be a list of messages, not {_shown(turns)}.")
    return [read_turn(turn, f"{column}[{place}]") for place, turn in enumerate(turns)]


def _chat(turns: list[Message], row: RawRow) -> Document:
    system = _system(row)
    if system and turns and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    elif system and turns and turns[0]["content"] != system:
        raise DataError(
            "column system would be ignored: the first message is another system prompt; keep one "
            "of them."
        )
    if not turns:
        raise DataError("an empty list of messages.")
    document: Document = {"messages": turns}
    column = "tools" if row.get("tools") else "functions"  # OpenAI's own, before there were tools
    tools = maybe_json(row.get(column), f"column {column}")
    if tools:
        if not isinstance(tools, list):
            raise DataError(f"column {column} must be a list, not {type(tools).__name__}.")
        is_old = column == "functions"
        document["tools"] = (
            [{"type": "function", "function": tool} for tool in tools] if is_old else tools
        )
    return document


def _prompt_completion(row: RawRow, prompt: str, completion_column: str) -> Document:
    if column := next((name for name in ("tools", "functions") if row.get(name)), None):
        raise DataError(
            f"column {column} would be ignored: only a chat template renders tools, so use "
            "messages."
        )
    document = {"prompt": prompt, "completion": _text(row, completion_column)}
    if system := _system(row):
        document["system"] = system
    return document


def _system(row: RawRow) -> str:
    column = "system" if row.get("system") else "system_prompt"
    return _text(row, column) if row.get(column) else ""


def _text(row: RawRow, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"column {column} must be a text, not {_shown(value)}.")
    return sound_text(value, f"column {column}")


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
