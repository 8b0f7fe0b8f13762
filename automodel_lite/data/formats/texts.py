"""Chats, questions with answers, and plain texts."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from automodel_lite.data.document import Document, Message, RawRow, shown, sound_text
from automodel_lite.data.formats.calls import parsed, read_tools
from automodel_lite.data.formats.turns import TURN_TOOLS, read_turns
from automodel_lite.errors import DataError


def messages(row: RawRow) -> Document:
    """`messages` of `{"role", "content", "tool_calls", "reasoning_content"}`, optional `tools` and
    `system`.
    """
    return chat(_with_answer(turns_of(row, "messages"), row), row)


def conversations(row: RawRow) -> Document:
    """ShareGPT's `conversations` of `{"from": "human", "value": …}`; optional `tools`, `system`."""
    return chat(_with_answer(turns_of(row, "conversations"), row), row)


def _with_answer(turns: list[Message], row: RawRow) -> list[Message]:
    """Returns the turns, and behind those that wait for an answer that of column `response`; with
    the thoughts of the answer.
    """
    response = text_of(row, "response") if row.get("response") else ""
    if turns and turns[-1]["role"] not in ("assistant", "model"):
        if response:
            turns = [*turns, {"role": "assistant", "content": response}]
    elif response and not any(response.strip() in turn["content"] for turn in turns):
        raise DataError(
            "column response would be ignored: the messages end with another answer; keep one of "
            "them."
        )
    return _with_thoughts(turns, row)


_SWITCHES = frozenset(["on", "off", "true", "false", "yes", "no", "none", "low", "medium", "high"])


def _thoughts(row: RawRow) -> str:
    """Returns the text of column `reasoning_content`; raises DataError for a switch, `on`."""
    if row.get("reasoning_content") in (None, "", []):
        return ""
    thoughts = text_of(row, "reasoning_content")
    if thoughts.strip().lower() in _SWITCHES:
        raise DataError(
            f"column reasoning_content is {thoughts.strip()!r}, which is no thought: rename the "
            "column, or set dataset.format to train without it."
        )
    return thoughts if thoughts.strip() else ""


def _with_thoughts(turns: list[Message], row: RawRow) -> list[Message]:
    """Returns the turns, the thoughts of column `reasoning_content` in their one answer."""
    thoughts = _thoughts(row)
    answers = [turn for turn in turns if turn["role"] in ("assistant", "model")]
    known = [str(value) for turn in answers for value in turn.values()]
    if not thoughts or any(thoughts.strip() in text for text in known):
        return turns
    if len([turn for turn in answers if turn.get("weight") != 0]) != 1 or turns[-1] != answers[-1]:
        raise DataError(
            "column reasoning_content holds the thoughts of one answer, which must be the only one "
            "and stand at the end: write reasoning_content into the turns."
        )
    return [*turns[:-1], {**turns[-1], "reasoning_content": thoughts}]


def alpaca(row: RawRow) -> Document:
    """`instruction`, optional `input`, `output`, optional `system` and `history` of [question,
    answer] pairs.
    """
    return _behind_history(row, instruction_of(row), "output")


def _behind_history(row: RawRow, prompt: str, completion_column: str) -> Document:
    """Returns the question and its answer; behind the pairs of column `history`, a chat."""
    history = row.get("history")
    if not history:
        return answered(row, prompt, completion_column)
    texts = []
    for place, pair in enumerate(history if isinstance(history, list) else [history]):
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise DataError(f"column history[{place}] must be a pair of texts, not {shown(pair)}.")
        texts += [sound_text(part, f"column history[{place}]") for part in pair]
    roles = cycle(("user", "assistant"))
    texts = [*texts, prompt]
    turns: list[Message] = [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
    ]
    answer = {"role": "assistant", "content": text_of(row, completion_column)}
    if thoughts := _thoughts(row):
        answer["reasoning_content"] = thoughts
    return chat([*turns, answer], row)


def instruction_of(row: RawRow) -> str:
    columns = ["instruction", "input"] if row.get("input") else ["instruction"]
    return "\n\n".join(text_of(row, column) for column in columns)


_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


def alpaca_turn(row: RawRow) -> Document:
    """`instruction`, optional `input`, `output`, in the prompt of Stanford's Alpaca, which is the
    user's turn.
    """
    given = text_of(row, "input") if row.get("input") else ""
    prompt = _ALPACA.format(
        paired=", paired with an input that provides further context" if given else "",
        instruction=text_of(row, "instruction"),
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return {"prompt": prompt, "completion": text_of(row, "output")}


def alpaca_prompt(row: RawRow) -> Document:
    """The same, written as it is, without a chat template."""
    return {**alpaca_turn(row), "raw": True}


def squad(row: RawRow) -> Document:
    """`context`, `question`, `answers` with a list `text`, of which the first one is trained on;
    empty where the list is.
    """
    answers = parsed(row.get("answers"), "column answers")
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"column answers must have a list of texts, text, not {shown(answers)}.")
    prompt = f"Context: {text_of(row, 'context')} Question: {text_of(row, 'question')} Answer: "
    answer = sound_text(texts[0].strip(), "column answers") if texts else ""
    return {"prompt": prompt, "completion": answer}


def question_answer(row: RawRow) -> Document:
    """`question`, optional `context` (put before it), `answer`, optional `system`."""
    context = [text_of(row, "context")] if row.get("context") else []
    return answered(row, "\n\n".join([*context, text_of(row, "question")]), "answer")


def prompt_completion(row: RawRow) -> Document:
    """`prompt` and `completion`: texts, with an optional `history` of [question, answer] pairs; or
    both lists of messages (trained on: the assistant's of the completion).
    """
    return _pair(row, "completion")


def _pair(row: RawRow, completion_column: str) -> Document:
    if isinstance(row.get("prompt"), list) or isinstance(row.get(completion_column), list):
        if row.get("history"):
            raise DataError("column history is read beside texts: put its turns into prompt.")
        before = turns_of(row, "prompt")
        after = turns_of(row, completion_column)
        return chat(_with_thoughts([*({**turn, "weight": 0} for turn in before), *after], row), row)
    return _behind_history(row, text_of(row, "prompt"), completion_column)


def responses(row: RawRow) -> Document:
    """`prompt`, a text or a list of messages, and `responses`, several answers to it (texts,
    messages, or lists of these), each of which is trained on.
    """
    answers = row.get("responses")
    if not isinstance(answers, list) or not answers:
        raise DataError(f"column responses must be a list of answers, not {shown(answers)}.")
    prompt = row.get("prompt")
    if isinstance(prompt, str) and not all(isinstance(answer, str) for answer in answers):
        prompt = [{"role": "user", "content": prompt}]
    documents = []
    for number, answer in enumerate(answers):
        if isinstance(prompt, list) and isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        if isinstance(prompt, list) and not isinstance(answer, list):
            answer = [answer]
        column = f"responses[{number}]"
        documents.append(_pair({**row, "prompt": prompt, column: answer}, column))
    return {"documents": documents}


def text(row: RawRow) -> Document:
    """`text`, trained on whole."""
    return {"text": text_of(row, "text")}


def turns_of(row: RawRow, column: str) -> list[Message]:
    turns = parsed(row.get(column), f"column {column}")
    if not isinstance(turns, list):
        raise DataError(f"column {column} must be a list of messages, not {shown(turns)}.")
    read: list[Message] = []
    for place, turn in enumerate(turns):
        read += read_turns(turn, f"{column}[{place}]")
    return read


def chat(turns: list[Message], row: RawRow) -> Document:
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
    if tools := _tools(turns, row):
        document["tools"] = tools
    return document


def _tools(turns: list[Message], row: RawRow) -> list[Any]:
    """Returns the tools of a chat: of its row, or of a turn. They stay in the turn too: some
    templates read them there.
    """
    found: dict[str, list[Any]] = {}
    for at, holder in [("column ", row), *((f"message {i}.", x) for i, x in enumerate(turns))]:
        for key in TURN_TOOLS:
            if tools := read_tools(holder.get(key), f"{at}{key}"):
                # functions: OpenAI's own, before there were tools
                if key == "functions":
                    tools = [
                        tool if "function" in tool else {"type": "function", "function": tool}
                        for tool in tools
                    ]
                found[f"{at}{key}"] = tools
    values = list(found.values())
    if any(other != values[0] for other in values[1:]):
        raise DataError(
            f"{' and '.join(found)} are several lists of tools, and a chat template writes one: "
            "keep one of them."
        )
    return values[0] if values else []


def answered(row: RawRow, prompt: str, completion_column: str) -> Document:
    if column := next((name for name in ("tools", "functions") if row.get(name)), None):
        raise DataError(
            f"column {column} would be ignored: only a chat template renders tools, so use "
            "messages."
        )
    document = {"prompt": prompt, "completion": text_of(row, completion_column)}
    # Thoughts belong to a turn, which a chat template writes.
    thoughts = _thoughts(row)
    if thoughts and thoughts.strip() not in document["completion"]:
        asked = {"role": "user", "content": prompt}
        answer = {"role": "assistant", "content": document["completion"]}
        return chat([asked, {**answer, "reasoning_content": thoughts}], row)
    if system := _system(row):
        document["system"] = system
    return document


def _system(row: RawRow) -> str:
    column = "system" if row.get("system") else "system_prompt"
    return text_of(row, column) if row.get(column) else ""


def text_of(row: RawRow, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"column {column} must be a text, not {shown(value)}.")
    return sound_text(value, f"column {column}")
