"""The shapes in which people keep their data: found from the columns, normalized row by row.

Rows that somebody else tokenized, or packed, are taken as they are, once it is clear what their labels mean. Two
conventions are in use, and they look alike. Ours are next-token aligned; Hugging Face's models shift inside:

    input_ids   a b c d
    labels      _ c d _      aligned: labels[i] is the target of position i
    labels      _ _ c d      unshifted: labels[i] is input_ids[i]

Which one a set uses is found by comparing both with its ids; unshifted labels are shifted here, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from automodel_lite.data.reading.documents import MEDIA, Document, Message, maybe_json, read_turn, sound_text
from automodel_lite.data.reading.readers import RawRow, RawRows
from automodel_lite.data.tokens.token_rows import ID_DTYPE
from automodel_lite.errors import ConfigError, DataError, did_you_mean
from automodel_lite.thd import COLUMNS, IGNORE_INDEX

Normalize = Callable[[RawRow], Document]


Alignment = Literal["aligned", "unshifted"]


def tokens(row: dict[str, Any]) -> Document:
    """`input_ids`, optional `labels`, `loss_mask` (0 = no loss), `attention_mask` (0 = padding, which is cut off), and
    `loss_weights`, numbers that stand where the labels do.
    """
    input_ids = _integers(row, "input_ids")
    labels = _integers(row, "labels", len(input_ids)) if row.get("labels") is not None else None
    if row.get("loss_mask") is not None:
        masked = _integers(row, "loss_mask", len(input_ids)) == 0
        labels = np.where(masked, IGNORE_INDEX, input_ids if labels is None else labels).astype(ID_DTYPE)
    weights = {"loss_weights": _weights(row, len(input_ids))} if row.get("loss_weights") is not None else {}
    if row.get("attention_mask") is not None:
        real = _integers(row, "attention_mask", len(input_ids)) != 0
        input_ids, labels = input_ids[real], None if labels is None else labels[real]
        weights = {name: values[real] for name, values in weights.items()}
    return {"input_ids": input_ids, "labels": labels, "lengths": [len(input_ids)], **weights}


def packed_tokens(row: dict[str, Any]) -> Document:
    """A pack: `input_ids`, `labels`, `seq_lens` (real tokens), optional `seq_lens_padded` (slots) and `loss_weights`;
    taken apart again.

    Padding is left out. The documents are packed again, to the size and by the strategy of the run.
    """
    input_ids = _integers(row, "input_ids")
    columns = {"input_ids": input_ids, "labels": _integers(row, "labels", len(input_ids))}
    if row.get("loss_weights") is not None:
        columns["loss_weights"] = _weights(row, len(input_ids))
    lengths = _integers(row, "seq_lens")
    slots = _integers(row, "seq_lens_padded", len(lengths)) if row.get("seq_lens_padded") is not None else lengths
    if (slots < lengths).any() or slots.sum() > len(input_ids):
        raise DataError(
            f"column seq_lens holds documents of {int(lengths.sum())} tokens in slots of {int(slots.sum())}, for "
            f"{len(input_ids)} input_ids: slots must hold their documents, and the row all slots."
        )
    starts = np.cumsum(slots) - slots
    real = [slice(int(start), int(start + length)) for start, length in zip(starts, lengths)]
    return {
        **{name: np.concatenate([x[part] for part in real] or [x[:0]]) for name, x in columns.items()},
        "lengths": [int(length) for length in lengths],
    }


def find_alignment(documents: Iterable[Document]) -> Alignment:
    """Which convention the labels of some documents follow.

    Raises:
        DataError: neither fits.
    """
    num_labels = num_aligned = num_unshifted = 0
    for document in documents:
        ids, labels = document["input_ids"], document["labels"]
        if labels is None:
            continue
        has_label = labels != IGNORE_INDEX
        num_labels += int(has_label.sum())
        num_unshifted += int((has_label & (labels == ids)).sum())
        num_aligned += int((has_label[:-1] & (labels[:-1] == ids[1:])).sum())
    if num_aligned == num_labels and num_aligned >= num_unshifted:
        return "aligned"
    if num_unshifted == num_labels:
        return "unshifted"
    raise DataError(
        f"of {num_labels:,} labels {num_aligned:,} are the next token and {num_unshifted:,} the token itself: all "
        "labels must be of one kind; set dataset.labels=aligned or dataset.labels=unshifted to take them as they "
        "are."
    )


def align(document: Document) -> Document:
    """Unshifted labels made next-token aligned, document by document."""
    if document["labels"] is None:
        return document
    lasts = np.cumsum(document["lengths"]) - 1
    shifted: dict[str, np.ndarray] = {}
    for name in [name for name in ("labels", "loss_weights") if name in document]:
        shifted[name] = np.roll(document[name], -1)
        shifted[name][lasts[lasts >= 0]] = COLUMNS[name].padding
    return {**document, **shifted}


def _weights(row: dict[str, Any], length: int) -> np.ndarray:
    """Column `loss_weights`; raises DataError for what is no finite number from 0 on, or not one per token."""
    try:
        weights = np.asarray(row["loss_weights"], COLUMNS["loss_weights"].stored)
        is_sound = weights.shape == (length,) and bool((np.isfinite(weights) & (weights >= 0)).all())
    except (TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise DataError(f"column loss_weights must be a list of {length} numbers from 0 on, one per input id.")
    return weights


def _integers(row: dict[str, Any], column: str, length: int | None = None) -> np.ndarray:
    value = row.get(column)
    try:
        numbers = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"column {column} must be a flat list of integers.") from error
    if value is None or numbers.ndim != 1 or (numbers.dtype.kind not in "iub" and len(numbers)):
        raise DataError(f"column {column} must be a list of integers, not {type(value).__name__} {str(value)[:40]!r}.")
    if length is not None and len(numbers) != length:
        raise DataError(f"column {column} has {len(numbers)} values and input_ids {length}: the counts must be equal.")
    if len(numbers) and (numbers.min() < -(2**31) or numbers.max() >= 2**31):
        raise DataError(f"column {column} holds {numbers.max()}, which is not a token id.")
    return numbers.astype(ID_DTYPE)


@dataclass(frozen=True)
class Format:
    """One shape: the columns that tell it, how a row of it becomes a document, and what more it may have."""

    name: str
    kind: str
    columns: tuple[str, ...]
    normalize: Normalize
    optional: tuple[str, ...] = ()


def messages(row: RawRow) -> Document:
    """`messages` of `{"role", "content", "tool_calls", "reasoning_content"}`, optional `tools`, `system`."""
    return _chat(_turns(row, "messages"), row)


def sharegpt(row: RawRow) -> Document:
    """`conversations` of `{"from": "human", "value": …}`, optional `tools`, `system`."""
    return _chat(_turns(row, "conversations"), row)


def alpaca(row: RawRow) -> Document:
    """`instruction`, optional `input`, `output`, optional `system` and `history` of [question, answer] pairs."""
    prompt = "\n\n".join([_text(row, "instruction"), *([_text(row, "input")] if row.get("input") else [])])
    if row.get("history"):
        asked = [{"role": "user", "content": prompt}, {"role": "assistant", "content": _text(row, "output")}]
        return _chat([*_history(row["history"]), *asked], row)
    return _prompt_completion(row, prompt, "output")


def question_answer(row: RawRow) -> Document:
    """`question`, optional `context` (put before it), `answer`, optional `system`."""
    context = [_text(row, "context")] if row.get("context") else []
    return _prompt_completion(row, "\n\n".join([*context, _text(row, "question")]), "answer")


def prompt_completion(row: RawRow) -> Document:
    """`prompt` and `completion`: texts, or both lists of messages (trained on: the assistant's of the completion)."""
    if isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list):
        before, after = _turns(row, "prompt"), _turns(row, "completion")
        return _chat([*({**turn, "weight": 0} for turn in before), *after], row)
    return _prompt_completion(row, _text(row, "prompt"), "completion")


def text(row: RawRow) -> Document:
    """`text`, trained on whole."""
    return {"text": _text(row, "text")}


SYSTEM = ("system", "system_prompt")
CHAT_EXTRAS = ("tools", *SYSTEM)
FORMATS = (
    Format("packed", "tokens", ("input_ids", "labels", "seq_lens"), packed_tokens, ("seq_lens_padded", "loss_weights")),
    Format("tokens", "tokens", ("input_ids",), tokens, ("labels", "loss_mask", "attention_mask", "loss_weights")),
    Format("messages", "messages", ("messages",), messages, CHAT_EXTRAS),
    Format("sharegpt", "messages", ("conversations",), sharegpt, CHAT_EXTRAS),
    Format("prompt_completion", "prompt_completion", ("prompt", "completion"), prompt_completion, CHAT_EXTRAS),
    Format("alpaca", "prompt_completion", ("instruction", "output"), alpaca, ("input", "history", *SYSTEM)),
    Format("question_answer", "prompt_completion", ("question", "answer"), question_answer, ("context", *SYSTEM)),
    Format("text", "text", ("text",), text),
)

# Other names of the same columns; the printed line names what it was taken for.
ALIASES = {
    "messages": ("conversation", "dialogue", "chat"),
    "output": ("response", "completion"),
    "completion": ("response", "chosen_response", "target"),
    "prompt": ("query", "problem", "source"),
    "answer": ("solution", "response"),
    "text": ("content", "document"),
    "input": ("context",),
}
REJECTED = re.compile(r"reject|loser|worse|dispreferred", re.IGNORECASE)  # a column of the answer that is not wanted
CHOSEN = re.compile(r"chosen|prefer|winner|accepted|better", re.IGNORECASE)
VERDICTS = ("label", "kto_tag")  # good or bad: what KTO trains on


@dataclass(frozen=True)
class Detected:
    """The format of a set and the names that its columns have there: canonical name -> column."""

    format: Format
    renames: Mapping[str, str]
    description: str
    media: tuple[str, ...] = ()  # columns of pictures and sounds: a row that has some is refused
    labels: Alignment = "aligned"  # of token rows

    def document(self, row: RawRow, where: str) -> Document:
        """A raw row as a document; raises `DataError` with the row's place and the file's own names of its columns."""
        if self.renames:
            row = {**row, **{canonical: row.get(column) for canonical, column in self.renames.items()}}
        try:
            self._check_media(row)
            document = self.format.normalize(row)
            return align(document) if self.labels == "unshifted" else document
        except DataError as error:
            raise DataError(f"{where}: {self._own_names(str(error))}") from error

    def _check_media(self, row: RawRow) -> None:
        for column in self.media:
            if row.get(column) not in (None, [], {}, ""):
                raise DataError(
                    f"column {column} would be ignored: this program trains only on text; set dataset.format=... to "
                    "train without it."
                )

    def _own_names(self, message: str) -> str:
        for canonical, column in self.renames.items():
            message = message.replace(f"column {canonical} ", f"column {column} ")
        return message


def detect(columns: Sequence[str], format_name: str | None, renames: Mapping[str, str] | None) -> Detected:
    """Finds the format from the columns, or checks the given one.

    Columns that change what the others mean (an answer that was rejected, a verdict, pictures) are refused unless the
    format is given, which says that they are left out on purpose.

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
    if format_name is None:
        _check_preferences(columns, renames)
    candidates = [known for known in FORMATS if format_name in (None, known.name)]
    if not candidates:
        raise ConfigError(f"dataset.format={format_name} is none of {', '.join(known.name for known in FORMATS)}.")
    typed = tuple(renames)
    found, renames = _find(candidates, columns, renames)
    _check_names(typed, found)
    if format_name is not None:
        return _detected(found, columns, renames)
    verdict = next((name for name in VERDICTS if name in columns), None)
    if verdict and found.kind in ("messages", "prompt_completion"):
        raise ConfigError(
            f"column {verdict} says which answers are good and which are bad (KTO), and all rows would be trained on "
            f"the same way: keep only the good rows, or set dataset.format={found.name} to train on all."
        )
    media = tuple(name for name in columns if name in MEDIA) if found.kind != "tokens" else ()
    return _detected(found, columns, renames, media)


def _check_names(typed: Sequence[str], found: Format) -> None:
    """Raises ConfigError for a column that the user named as something that the format does not have."""
    has = [*found.columns, *found.optional]
    for name in typed:
        if name not in has:
            near = did_you_mean(name, has) or "."
            raise ConfigError(
                f"dataset.columns.{name}: the data are taken for {found.name}, which has no {name}{near} It has "
                f"{', '.join(has)}."
            )


def _check_preferences(columns: Sequence[str], renames: Mapping[str, str]) -> None:
    """Raises ConfigError for pairs of a wanted and a rejected answer, unless the wanted one is named."""
    rejected = [name for name in columns if REJECTED.search(name)]
    chosen = [name for name in columns if CHOSEN.search(name) and name not in rejected]
    named = set(renames.values())
    if not rejected or (named & set(chosen) and not named & set(rejected)):
        return
    wanted = [*chosen, *(name for name in columns if name not in rejected), "..."][0 if chosen else -2]
    taken = [name for name in rejected if name in named]
    what = f"{taken[0]} would be trained on" if taken else "this program trains on one answer"
    raise ConfigError(
        f"the columns {', '.join([*chosen, *rejected])} are preference pairs, and {what}: select the chosen answers "
        f"with dataset.columns.completion={wanted} (texts after a prompt), dataset.columns.messages={wanted} (chats) "
        f"or dataset.columns.text={wanted} (whole texts), or set dataset.format=... to train on the columns you "
        "named."
    )


def _find(
    candidates: Sequence[Format], columns: Sequence[str], renames: Mapping[str, str]
) -> tuple[Format, dict[str, str]]:
    """The first format whose columns are there, under their own names before other ones; and all renames."""
    named = {*columns, *renames}
    for takes_others in (False, True):
        for candidate in candidates:
            others = _other_names(candidate.columns, named) if takes_others else {}
            if named.issuperset({*candidate.columns} - others.keys()):
                optional = _other_names(candidate.optional, named - {*others.values()})
                return candidate, {**optional, **others, **renames}
    if len(candidates) == 1:
        wanted = " + ".join(candidates[0].columns)
        raise ConfigError(
            f"dataset.format={candidates[0].name} needs the columns {wanted}, the data have {', '.join(columns)}: "
            f"name them with dataset.columns."
        )
    known = ", ".join(" + ".join(known.columns) for known in FORMATS)
    raise ConfigError(
        f"the columns {', '.join(columns)} match no known format: name them, for instance {_hint(columns)}. Known "
        f"formats are {known}."
    )


def _hint(columns: Sequence[str]) -> str:
    """Settings that take every column, where that can be said of so many."""
    names = {1: ("text",), 2: ("prompt", "completion"), 3: ("instruction", "input", "output")}.get(len(columns))
    pairs = zip(names, columns) if names else [("prompt", columns[0]), ("completion", columns[-1])]
    hint = " ".join(f"dataset.columns.{name}={column}" for name, column in pairs)
    return hint if names else f"{hint} (which leaves out {', '.join(columns[1:-1])})"


def _other_names(wanted: Sequence[str], named: set[str]) -> dict[str, str]:
    """Other names under which columns are there: Dolly's `context` is Alpaca's `input`."""
    others = {name: [other for other in ALIASES.get(name, ()) if other in named] for name in wanted}
    return {name: there[0] for name, there in others.items() if there and name not in named}


def _detected(
    found: Format, columns: Sequence[str], renames: Mapping[str, str], media: tuple[str, ...] = ()
) -> Detected:
    mapped = ", ".join(f"{canonical} = {column}" for canonical, column in renames.items())
    description = f"columns {','.join(columns)}" + (f" → {found.name}" if list(columns) != [found.name] else "")
    description += f" ({mapped})" if mapped else ""
    used = {*renames.values(), *found.columns, *found.optional}
    ignored = [name for name in columns if name not in used]
    return Detected(found, renames, description + (f", ignored: {', '.join(ignored)}" if ignored else ""), media)


@dataclass(frozen=True)
class NormalizedRows:
    """Raw rows as documents."""

    raw: RawRows
    detected: Detected

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> Document:
        return self.detected.document(self.raw[index], self.where(index))

    def where(self, index: int) -> str:
        return self.raw.where(index)


def _turns(row: RawRow, column: str) -> list[Message]:
    return [read_turn(turn, f"{column}[{place}]") for place, turn in enumerate(_list(row, column))]


def _chat(turns: list[Message], row: RawRow) -> Document:
    system = _system(row)
    if system and turns and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    if not turns:
        raise DataError("an empty list of messages.")
    document: Document = {"messages": turns}
    tools = maybe_json(row.get("tools"), "column tools")
    if tools:
        if not isinstance(tools, list):
            raise DataError(f"column tools must be a list, not {type(tools).__name__}.")
        document["tools"] = tools
    return document


def _history(pairs: Any) -> list[Message]:
    """The turns before the last question: `[["q", "a"], …]`."""
    turns: list[Message] = []
    for place, pair in enumerate(pairs if isinstance(pairs, list) else [pairs]):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise DataError(f"column history[{place}] must be a pair of texts, not {_shown(pair)}.")
        question, answer = (sound_text(part, f"column history[{place}]") for part in pair)
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _prompt_completion(row: RawRow, prompt: str, completion_column: str) -> Document:
    if row.get("tools"):
        raise DataError("column tools would be ignored: only a chat template renders tools, so use messages.")
    document = {"prompt": prompt, "completion": _text(row, completion_column)}
    if system := _system(row):
        document["system"] = system
    return document


def _system(row: RawRow) -> str:
    column = "system" if row.get("system") else "system_prompt"
    return _text(row, column) if row.get(column) else ""


def _list(row: RawRow, column: str) -> list[Any]:
    value = maybe_json(row.get(column), f"column {column}")
    if not isinstance(value, list):
        raise DataError(f"column {column} must be a list of messages, not {_shown(value)}.")
    return value


def _text(row: RawRow, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"column {column} must be a text, not {_shown(value)}.")
    return sound_text(value, f"column {column}")


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
