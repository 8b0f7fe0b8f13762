"""Decisions to renderings: the state, the question, its choices, and the token that answers.

    <|user|>The invoice of May is wrong ...      state: the same in all questions of a record

    Which team should handle this?
    choice#A = "sales": New seats
    choice#B = "billing": Charges, invoices      choices, in the order that the seed gives them
    ...<|assistant|>choice#B
    column choice_ids        -1 -1 A  B          on as many tokens as there are choices, up to the
    column choice_weights     0  0 0  1          one at which the answer is predicted
    column question_numbers   0  0 7  7

A row ends with its answer, which is one token and the only one with a label. Rows of a record share
the tokens of their state, and none of the columns: a branch has its own from the first of them on.

Legend: N rows.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer

from automodel_lite.data.document import Message
from automodel_lite.data.formats.decisions import Decision, number_of
from automodel_lite.data.tokens.chat import ChatRenderer
from automodel_lite.data.tokens.rendering import Choices, Rendering
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.seed import derive_seed

LETTERS = string.ascii_uppercase + string.ascii_lowercase
OTHER_PREFIXES = ("choice##", "choice=", "choice: #", "choice_", "[", "(", "choice ")
"""What may stand before a letter, where the one that is set does not: families split words in other
ways.
"""


@dataclass(frozen=True)
class DecisionStyle:
    """How decisions are written.

    prefix    before the letter of a choice
    permutes  the order of choices follows from the seed; levels of a score keep theirs
    asks_all  questions without an answer are rendered, too: they are asked, and not trained on
    """

    prefix: str = "choice#"
    permutes: bool = True
    seed: int = 0
    asks_all: bool = False


def order_of(decision: Decision, style: DecisionStyle) -> list[int]:
    """Returns the places of the choices in the order in which they are written: a function of the
    seed and of the question's own words.
    """
    order = list(range(len(decision.choices)))
    if style.permutes and decision.kind != "score":
        words = json.dumps([decision.state, decision.question, decision.choices])
        random.Random(derive_seed(style.seed, "choices", words)).shuffle(order)
    return order


class DecisionRenderer:
    """Renders decisions, by a chat template or, without one, as plain text.

    Raises ConfigError: a choice's letter is not one token of its own behind the prefix.
    """

    def __init__(self, backend: Tokenizer, style: DecisionStyle) -> None:
        self.style = style
        self._backend = backend
        self._ids = list[int]()  # of the letters that were asked for so far

    def letter_ids(self, num_choices: int) -> list[int]:
        """Returns the tokens of the first letters."""
        if num_choices > len(LETTERS):
            raise DataError(
                f"has {num_choices} choices, and each is a letter, of which there are "
                f"{len(LETTERS)}: split the question, or leave choices out."
            )
        if num_choices > len(self._ids):
            prefix = self.style.prefix
            found = _letter_ids(self._backend, prefix, num_choices)
            if found is None:
                others = (x for x in OTHER_PREFIXES if _letter_ids(self._backend, x, num_choices))
                quoted = "\"tokenize.choice_prefix='{}'\""
                cure = next((f"set {quoted.format(x)}" for x in others), "")
                raise ConfigError(
                    f"tokenize.choice_prefix={prefix}: the tokenizer writes a letter of "
                    f"{LETTERS[:num_choices]} behind it as no token of its own, and a choice is "
                    f"one token: {cure or 'choose another prefix, or fewer choices'}."
                )
            self._ids = found
        return self._ids[:num_choices]

    def messages(self, decision: Decision) -> tuple[list[Message], str]:
        """Returns the chat that asks, and the answer to it; to one without an answer the first
        choice.
        """
        prefix = self.style.prefix
        order = order_of(decision, self.style)
        lines = [decision.state, "", decision.question]
        for letter, place in zip(LETTERS, order):
            name, meaning = decision.choices[place]
            lines.append(f'{prefix}{letter} = "{name}"{f": {meaning}" if meaning else ""}')
        lines.append(f"Answer with one of these choices, written as {prefix}{LETTERS[0]}.")
        turns = [{"role": "user", "content": "\n".join(lines)}]
        if decision.system:
            turns.insert(0, {"role": "system", "content": decision.system})
        at = order.index(decision.answer) if decision.answer >= 0 else 0
        return turns, f"{prefix}{LETTERS[at]}"

    def renderings(
        self, decision: Decision, chat: ChatRenderer | None, bos: str
    ) -> list[Rendering]:
        """Returns one rendering; none of a question that is not to be trained on."""
        is_trained = decision.target is not None and decision.weight > 0
        if not is_trained and not self.style.asks_all:
            return []
        order = order_of(decision, self.style)
        ids = self.letter_ids(len(order))
        target = decision.target or (0.0,) * len(order)
        weights = tuple(target[place] * decision.weight for place in order)
        turns, answer = self.messages(decision)
        if chat is None:
            asked = "\n".join(turn["content"] for turn in turns)
            text = f"{bos}{asked}\n\n{answer}"
        else:
            (whole,) = chat.renderings([*turns, {"role": "assistant", "content": answer}])
            start, stop = whole.spans[-1]
            at = whole.text.rfind(answer, start, stop)
            if at < 0:
                raise DataError(
                    f"the chat template does not write the answer {answer} as it is: use "
                    "another template, tokenizer.chat_template=template.jinja."
                )
            text = whole.text[: at + len(answer)]
        choices = Choices(tuple(ids), weights, decision.place)
        return [Rendering(text, ((len(text) - 1, len(text)),), choices=choices)]


def _letter_ids(backend: Tokenizer, prefix: str, num_choices: int) -> list[int] | None:
    """Returns the tokens of letters behind a prefix; None where one is not a token of its own."""
    before = backend.encode(prefix, add_special_tokens=False).ids
    found = []
    for letter in LETTERS[:num_choices]:
        ids = backend.encode(f"{prefix}{letter}", add_special_tokens=False).ids
        if ids[:-1] != before:
            return None
        found.append(ids[-1])
    return found if len({*found}) == num_choices else None


def numbered(rendering: Rendering, document: int) -> Rendering:
    """Returns a question of this document with its number in the data."""
    if rendering.choices is None:
        return rendering
    number = number_of(document, rendering.choices.place)
    return replace(rendering, choices=replace(rendering.choices, number=number))


def decision_columns(
    choices: Sequence[Choices], input_ids: np.ndarray, lengths: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the columns of rows that lie end to end, each with its choices.

    Raises DataError: a row does not end with the token of one of its choices.
    """
    total = len(input_ids)
    columns: dict[str, np.ndarray] = {
        "choice_ids": np.full(total, -1, np.int32),
        "choice_weights": np.zeros(total, np.float32),
        "question_numbers": np.zeros(total, np.int64),
    }
    for own, length, end in zip(choices, lengths.tolist(), np.cumsum(lengths).tolist()):
        stop = end - 1  # the answer itself
        start = stop - len(own.ids)
        if start <= end - length or input_ids[stop] not in own.ids:
            raise DataError(
                "the tokenizer joins the letter of an answer with what stands before it in the "
                "chat: set tokenize.choice_prefix to one that ends with its own token, or take "
                "another tokenizer.chat_template."
            )
        columns["choice_ids"][start:stop] = own.ids
        columns["choice_weights"][start:stop] = own.weights
        columns["question_numbers"][start:stop] = own.number
    return columns
