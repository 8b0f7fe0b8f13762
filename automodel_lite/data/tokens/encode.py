"""Documents of any kind to renderings, and those to token ids and the mask of what is trained on.

One call of the fast tokenizer makes token ids of many renderings, and the mask. A token is trained
on when it holds a character of a trained span, by the tokenizer's offsets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from automodel_lite.columns import (
    CHOSEN,
    DESIRABLE,
    IGNORE_INDEX,
    MISMATCHED,
    REJECTED,
    UNDESIRABLE,
)
from automodel_lite.data.document import UNUSED, Document, Message, sound_text
from automodel_lite.data.formats.turns import TURN_TOOLS
from automodel_lite.data.tokens.chat import ASSISTANTS, REASONING, ChatRenderer, is_written
from automodel_lite.data.tokens.decisions import (
    DecisionRenderer,
    DecisionStyle,
    decision_columns,
)
from automodel_lite.data.tokens.rendering import Rendering, Span
from automodel_lite.data.tokens.token_rows import next_token_labels
from automodel_lite.errors import ConfigError, DataError

_TURN_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", "weight", *TURN_TOOLS))


_NO_VALUE = re.compile(
    r"(N/?A|n/a|n\. ?a\.|[kK]\. ?[aA]\.|[kK]eine Angabe|[Nn]a[Nn]|NAN|<NA>|NULL|null|#N/A|#NV|"
    r"-{1,3}|[–—])"
)
"""What spreadsheets, databases and pandas write where a table has no value. `None` is an answer."""


_RULE = re.compile("-{2,3}")  # as a last line: of Markdown, or where YAML ends


def _first_no_value(texts: Sequence[str], asked: Sequence[str] = ()) -> str:
    """Returns the first text that stands for no value, or last line of what is asked, where an
    instruction ends in its input. Other texts may end in a program's `null` or a rule.

    >>> _first_no_value(["Paris", "k. A."])
    'k. A.'
    >>> _first_no_value(["1\\nnull"], ["Add.\\nnan"])
    'nan'
    """
    for text in map(str.strip, texts):
        if _NO_VALUE.fullmatch(text):
            return text
    for text in map(str.strip, asked):
        end = text.rpartition("\n")[2].strip()
        if _NO_VALUE.fullmatch(end) and (end == text or not _RULE.fullmatch(end)):
            return end
    return ""


@dataclass(frozen=True)
class Remarks:
    """What a user should know of one document.

    noted   kind of `findings.NOTES` -> what was found, "" where there is nothing to say
    unused  columns of its row, and keys of its turns, that no rendering holds
    """

    noted: dict[str, str]
    unused: list[str]


def _unwritten_keys(message: Message, renderings: Sequence[Rendering]) -> list[str]:
    """Returns the keys of a turn whose values no rendering holds."""
    found = []
    for key in message.keys() - _TURN_KEYS:
        value = message[key]
        if not any(is_written(value, rendering.text) for rendering in renderings):
            found.append(f"{key} of a turn")
    return found


class Renderer:
    """Renders normalized documents.

    chat_renderer  what makes the renderer of chats
    mismatches     judged answers come with those of other rows
    decisions      how questions with fixed choices are written
    scores         a document has one label, at its last token: texts are written as the tokenizer
                   itself does, chats as their template does, and nothing else is trained on

    Chats go through the chat template. A prompt and its completion do too, as a user's and an
    assistant's turn, when the tokenizer has a template; without one they become
    `prompt completion <eos>`, with a line break between them where neither brings white space. A
    `raw` prompt is written as it is whatever the tokenizer has, and tokenized without the answer.
    Plain text becomes `<bos> text <eos>`, the BOS only for tokenizers that add one.
    """

    chat_renderer: Callable[..., ChatRenderer] = ChatRenderer

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        train_on: str,
        template_kwargs: dict[str, Any],
        mismatches: bool = False,
        decisions: DecisionStyle | None = None,
        scores: bool = False,
    ):
        self._scores = scores
        self._train_on = train_on
        style = decisions or DecisionStyle()
        self._decisions = DecisionRenderer(tokenizer.backend_tokenizer, style)
        self._mismatches = mismatches
        has_template = tokenizer.chat_template is not None
        chat = self.chat_renderer
        self._chat = chat(tokenizer, train_on, template_kwargs) if has_template else None
        self._tokenizer = tokenizer
        # of a tokenizer that has neither, nothing is asked: it may not know the letter
        bos = tokenizer.bos_token_id
        eos = tokenizer.eos_token_id if scores else None
        usual = [] if bos is None and eos is None else tokenizer("a")["input_ids"]
        adds_bos = bos is not None and usual[:1] == [bos]
        adds_eos = eos is not None and usual[-1:] == [eos]
        self._bos = str(tokenizer.bos_token) if adds_bos else ""
        self._eos = str(tokenizer.eos_token or "")
        self._added_eos = self._eos if adds_eos else ""
        specials = sorted(
            (t.content for t in tokenizer.added_tokens_decoder.values() if t.special), reverse=True
        )
        self._special = re.compile("|".join(map(re.escape, specials))) if specials else None
        stop_tokens = [*self._chat.stop_tokens] if self._chat is not None else []
        stop_tokens += [self._eos] if self._eos else []
        # of answers, which nothing is that is scored
        self.stop_ids = (
            None if scores else frozenset(tokenizer.get_vocab()[token] for token in stop_tokens)
        )

    def remarks(self, document: Document, renderings: Sequence[Rendering]) -> Remarks:
        """Returns what a user should know of a document that was rendered."""
        has_asked = self._chat and self._train_on != "all" and not self._scores
        unasked = self._chat.unasked if self._chat and has_asked else ""
        asked: list[str] = []
        answers: list[str] = []
        texts: list[str] = []
        returned: list[str] = []  # by tools, whose null is a value
        unused = list(document.get(UNUSED, ()))
        if "margin" in document and not self._scores:
            unused.append("margin")
        pair = [document[name] for name in ("chosen", "rejected") if name in document]
        for one in document.get("documents", pair or [document]):
            texts += [one.get(key, "") for key in ("system", "text")]
            asked.append(one.get("prompt", ""))
            if "decision" in one:
                asked += [one["decision"].state, one["decision"].question]
            turns = one.get("messages", ())
            if "completion" in one:
                turns = [{"role": "assistant", "content": one["completion"]}]
            for message in turns:
                if message["role"] in ASSISTANTS:
                    answers += self._words_of_answer(message)
                elif message["role"] == "user":
                    asked.append(message["content"])
                elif message["role"] == "system":
                    texts.append(message["content"])
                else:
                    returned.append(message["content"])
                unused += _unwritten_keys(message, renderings)
        noted = {
            "special": self._first_special([*texts, *asked, *returned]),
            "trained_special": self._first_special(answers),
            "no_value": _first_no_value([*answers, *texts], asked),
            "unasked": repr(unasked) if unasked else "",
        }
        return Remarks(noted, list(dict.fromkeys(unused)))

    def _words_of_answer(self, message: Message) -> list[str]:
        """Returns what an assistant says, thinks and calls, without the end token of its own."""
        if self._chat is not None:
            said = self._chat.without_own_end(message)["content"]
        else:
            said = self._ended(message["content"]).removesuffix(self._eos)
        words = [said]
        words += [str(value) for key, value in message.items() if REASONING.fullmatch(key)]
        if message.get("tool_calls"):
            words.append(json.dumps(message["tool_calls"], ensure_ascii=False, default=str))
        return words

    def _first_special(self, texts: Sequence[str]) -> str:
        found = map(self._special.search, texts) if self._special else ()
        return next((match[0] for match in found if match), "")

    def renderings(self, document: Document) -> list[Rendering]:
        """The renderings of one document; more than one for a chat whose template rewrites earlier
        turns, two for a preference pair.

        Raises DataError: the document cannot be rendered (says why, not where).
        """
        if self._scores:
            return self._scored(document)
        if "label" in document:
            raise ConfigError(
                "dataset.format=labeled reads what a document is labeled, which this loss does not "
                "learn",
                key="dataset.format",
                cure="train with --config-name classify, or set dataset.format to what the rows are"
                " without their label",
            )
        if "chosen" in document:
            if self._train_on == "all":
                raise ConfigError(
                    "tokenize.train_on=all would prefer prompts too: set "
                    "tokenize.train_on=assistant."
                )
            chosen, rejected = (self.renderings(document[name]) for name in ("chosen", "rejected"))
            if len(chosen) > 1 or len(rejected) > 1:
                raise DataError(
                    "answers of several turns are rewritten by the chat template: end a pair with "
                    "one answer."
                )
            return [replace(chosen[0], answer=CHOSEN), replace(rejected[0], answer=REJECTED)]
        if "verdict" in document:
            return self._judged(document)
        if "decision" in document:
            if self._train_on == "all":
                raise ConfigError(
                    "tokenize.train_on=all would train on questions too, and decisions on their "
                    "answers: set tokenize.train_on=assistant."
                )
            return self._decisions.renderings(document["decision"], self._chat, self._bos)
        if "documents" in document:  # several answers to one prompt, or questions about a state
            found = []
            for one in document["documents"]:
                found += self.renderings(one)
            if not found:
                raise DataError(
                    "has no question with an answer, so nothing is trained on",
                    cure="add one to its column answers or soft_labels",
                    can_skip=True,
                )
            return found
        if "messages" in document:
            if self._chat is None:
                raise ConfigError(self._no_template())
            renderings = self._chat.renderings(document["messages"], document.get("tools"))
        elif "completion" in document:
            renderings = [self._prompt_completion(document)]
        elif not (text := document["text"]):
            renderings = [Rendering("", ())]
        else:
            text = self._ended(text)
            whole = text.join(self._framed(text, text))
            renderings = [Rendering(whole, ((0, len(whole)),))]
        # roles, names and tools are in it too; the tokenizer's own error is a TypeError
        for rendering in renderings:
            sound_text(rendering.text, "the text to tokenize")
        return renderings

    def _judged(self, document: Document) -> list[Rendering]:
        """Returns a judged answer, and another row's to the same prompt."""
        if self._train_on == "all":
            raise ConfigError(
                "tokenize.train_on=all would judge prompts too: set tokenize.train_on=assistant."
            )
        rows = [(DESIRABLE if document["verdict"] else UNDESIRABLE, document)]
        if self._mismatches:
            if "mismatched" not in document:
                raise ConfigError(
                    "dataset.format=verdict reads each answer beside that of another row, which "
                    "these data do not offer: use dataset=files."
                )
            rows.append((MISMATCHED, document["mismatched"]))
        found = []
        for kind, row in rows:
            plain = {name: value for name, value in row.items() if name != "verdict"}
            renderings = self.renderings(plain)
            if len(renderings) > 1:
                raise DataError(
                    "answers of several turns are rewritten by the chat template: end a row with "
                    "one answer."
                )
            found.append(replace(renderings[0], verdict=kind))
        return found

    def _scored(self, document: Document) -> list[Rendering]:
        """Returns a document with its label, or both answers of a pair."""
        if "chosen" in document:
            margin = document.get("margin")
            pair = [(CHOSEN, document["chosen"]), (REJECTED, document["rejected"])]
            return [
                replace(self._whole(one), answer=which, label=0, margin=margin)
                for which, one in pair
            ]
        if "label" not in document:
            raise ConfigError(
                "the rows have no label, and a score head learns one for each document",
                key="dataset.format",
                cure="set dataset.format=labeled (columns text, label), dataset.format=preference "
                "with loss=reward (columns prompt, chosen, rejected), or model.head=lm",
            )
        label = document["label"]
        is_number = isinstance(label, float)
        return [
            replace(
                self._whole(document),
                label=0 if is_number else label,
                target=label if is_number else None,
                weight=document.get("weight"),
            )
        ]

    def _whole(self, document: Document) -> Rendering:
        """Returns all of a document, as its reader will write it: `apply_chat_template` of a chat,
        `tokenizer(text)` of a text.
        """
        turns = document.get("messages")
        if "completion" in document:
            turns = [
                {"role": "user", "content": document["prompt"]},
                {"role": "assistant", "content": document["completion"]},
            ]
            if document.get("system"):
                turns.insert(0, {"role": "system", "content": document["system"]})
        if turns is not None and self._chat is not None:
            rendering = self._chat.whole(turns, document.get("tools"))
        elif "messages" in document:
            raise ConfigError(self._no_template())
        else:
            text = document.get("text")
            if text is None:
                prompt = "\n".join(filter(None, [document.get("system"), document["prompt"]]))
                answer = document["completion"]
                has_space = not prompt or prompt[-1].isspace() or answer[:1].isspace()
                text = f"{prompt}{'' if has_space else chr(10)}{answer}"
            begin = "" if text.startswith(self._bos) else self._bos
            end = "" if self._added_eos and text.endswith(self._added_eos) else self._added_eos
            rendering = Rendering(f"{begin}{text}{end}" if text else "", ())
        sound_text(rendering.text, "the text to tokenize")
        return rendering

    def _no_template(self) -> str:
        return (
            f"the data are chats, and the tokenizer {self._tokenizer.name_or_path} has no "
            "chat template: set tokenizer.chat_template=template.jinja, or tokenizer.path "
            "to a chat model's tokenizer."
        )

    def _prompt_completion(self, document: Document) -> Rendering:
        prompt = document["prompt"]
        completion = document["completion"]
        is_raw = bool(document.get("raw"))
        if self._chat is not None and not is_raw:
            system = (
                [{"role": "system", "content": document["system"]}]
                if document.get("system")
                else []
            )
            user = {"role": "user", "content": prompt}
            assistant = {"role": "assistant", "content": completion}
            return self._chat.renderings([*system, user, assistant])[0]
        if document.get("system"):
            prompt = f"{document['system']}\n{prompt}"
        has_space = not prompt or prompt[-1].isspace() or completion[:1].isspace()
        glue = "" if has_space or is_raw else "\n"
        completion = self._ended(completion)
        bos, eos = self._framed(prompt, completion)
        before = f"{bos}{prompt}{glue}"
        text = f"{before}{completion}{eos}"
        first = 0 if self._train_on == "all" else len(before)
        return Rendering(text, ((first, len(text)),), cut=len(before) if is_raw else 0)

    def _ended(self, text: str) -> str:
        """Returns the text without white space behind an end token of its own."""
        trimmed = text.rstrip()
        return trimmed if self._eos and trimmed.endswith(self._eos) else text

    def _framed(self, first: str, last: str) -> tuple[str, str]:
        """Returns what stands before a text that begins with `first`, and behind one that ends with
        `last`.
        """
        if not self._eos:
            raise ConfigError(
                "the tokenizer has no eos_token, so a model would never learn to stop: set one."
            )
        has_bos = bool(self._bos) and first.startswith(self._bos)
        has_eos = last.endswith(self._eos)
        return "" if has_bos else self._bos, "" if has_eos else self._eos


class Encoder:
    """Tokenizes renderings as they are; no special tokens are added: a template has brought its
    own.

    Works on a copy of the tokenizer's Rust part, without the truncation and padding that some hub
    tokenizers save.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(self, renderings: Sequence[Rendering]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the columns of the renderings end to end, [total] each, and the length of each,
        int64 [N].
        """
        pieces = [piece for rendering in renderings for piece in rendering.pieces()]
        encodings = self.backend.encode_batch(
            [text for text, _ in pieces], add_special_tokens=False
        )
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        input_ids = np.empty(lengths.sum(), np.int32)
        trained = np.zeros(len(input_ids), bool)
        for (text, spans), encoding, stop in zip(pieces, encodings, np.cumsum(lengths).tolist()):
            start = stop - len(encoding)
            input_ids[start:stop] = encoding.ids
            for span in spans:
                first, last = token_span(encoding, span, len(text))
                trained[start + first : start + last] = True
        if len(pieces) > len(renderings):  # a rendering is as long as its pieces
            counts = [2 if rendering.cut else 1 for rendering in renderings]
            lengths = np.add.reduceat(lengths, np.cumsum([0, *counts[:-1]]))
        labels = next_token_labels(input_ids, trained, lengths)
        if renderings and renderings[0].label is not None:
            return _labeled(renderings, input_ids, lengths), lengths
        columns = {"input_ids": input_ids, "labels": labels}
        answers = np.array([rendering.answer for rendering in renderings], np.int8)
        if answers.any():
            columns["answers"] = np.where(labels == IGNORE_INDEX, 0, answers.repeat(lengths))
        verdicts = np.array([rendering.verdict for rendering in renderings], np.int8)
        if verdicts.any():
            columns["verdicts"] = np.where(labels == IGNORE_INDEX, 0, verdicts.repeat(lengths))
        choices = [rendering.choices for rendering in renderings if rendering.choices]
        if choices:  # all of a set are decisions
            columns |= decision_columns(choices, input_ids, lengths)
        return columns, lengths


def _labeled(
    renderings: Sequence[Rendering], input_ids: np.ndarray, lengths: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the columns of documents that are scored: what they have stands at their last
    token.
    """
    is_there = lengths > 0
    ends = np.cumsum(lengths)[is_there] - 1

    def at_ends(values: Sequence[float], padding: float, dtype: Any) -> np.ndarray:
        column = np.full(len(input_ids), padding, dtype)
        column[ends] = np.array(values, dtype)[is_there]
        return column

    columns = {"input_ids": input_ids}
    columns["labels"] = at_ends([one.label or 0 for one in renderings], IGNORE_INDEX, np.int32)
    if any(one.answer for one in renderings):
        columns["answers"] = at_ends([one.answer for one in renderings], 0, np.int8)
    if any(one.target is not None for one in renderings):
        columns["targets"] = at_ends([one.target or 0.0 for one in renderings], 0.0, np.float32)
    if any(one.margin is not None for one in renderings):
        columns["margins"] = at_ends([one.margin or 0.0 for one in renderings], 0.0, np.float32)
    if any(one.weight is not None for one in renderings):
        weights = [1.0 if one.weight is None else one.weight for one in renderings]
        columns["loss_weights"] = at_ends(weights, 1.0, np.float32)
    return columns


def token_span(encoding: Encoding, span: Span, num_chars: int) -> tuple[int, int]:
    """Returns the tokens [first, last) that hold at least one character of `span`.

    `char_to_token` answers in Rust; it does not know characters that no token holds (a leading
    space that the tokenizer trims off the offsets, text that a normalizer drops), for which all
    offsets are looked at.
    """
    start, stop = span
    if start >= stop:
        return 0, 0
    first = encoding.char_to_token(start)
    last = len(encoding) if stop >= num_chars else encoding.char_to_token(stop)
    if first is None or last is None:
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        holding = np.flatnonzero(
            (offsets[:, 1] > start) & (offsets[:, 0] < stop) & (offsets[:, 1] > offsets[:, 0])
        )
        return (int(holding[0]), int(holding[-1]) + 1) if len(holding) else (0, 0)
    if stop < num_chars:
        chars = encoding.token_to_chars(last)
        last += chars is not None and chars[0] < stop  # a token across the end of the span
    return first, last
