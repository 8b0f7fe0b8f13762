"""Asks held-out questions of a model that is exported, and scores its answers."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean as mean
from typing import Any

from automodel_lite.config.rules import Count, Size
from automodel_lite.data.reading.documents import Question
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.evaluation.form import num_in_form
from automodel_lite.evaluation.generator import Generator, has_images
from automodel_lite.progress import Progress


def f1(given: str, expected: str) -> float:
    """Scores the words that the answer shares with the expected one, as in SQuAD: case, punctuation
    and articles do not count.
    """
    spaces = str.maketrans(string.punctuation, " " * len(string.punctuation))
    words = [text.lower().translate(spaces).split() for text in (given, expected)]
    found, wanted = (
        Counter(word for word in each if word not in ("a", "an", "the")) for each in words
    )
    num_shared = (found & wanted).total()
    return 2 * num_shared / max(found.total() + wanted.total(), 1) if wanted else float(not found)


@dataclass(frozen=True)
class ExactMatch:
    """The config node `evaluation`: asks held-out questions at the end of the run, and scores the
    answers.

    metrics   name -> a further score of each answer, such as `f1`: (given, expected) -> float;
              logged as score/<name>
    """

    num_questions: Count = 24  # asked, the first ones
    max_new_tokens: Size = 64  # of an answer
    num_shown: Count = 3  # answers printed
    batch_size: Size = 8  # questions answered at a time
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, generator: Generator, held_out: Iterable[Question]) -> tuple[str, dict[str, Any]]:
        """Answers the first of the questions greedily; returns lines to print, and scores and
        answers for metrics.jsonl.
        """
        questions = list(islice(held_out, self.num_questions))
        if not questions:
            return "held-out questions: the data has none", {"answers_right": 0, "answers": 0}
        # One that the model cannot be asked ends no run, and is not counted as wrong.
        reasons: dict[int, str] = {}
        options = (self.batch_size, self.max_new_tokens)
        texts = answers_to(questions, generator, *options, refused=reasons)
        refused = []
        for place, reason in sorted(reasons.items()):
            asked = one_line(asked_by(questions[place]), 60)
            refused.append(f"  not asked: question {place + 1}, {asked} ({reason})")
        answered = [place for place in range(len(questions)) if place not in reasons]
        if not answered:
            head = f"held-out questions: none of {len(refused)} can be asked"
            return "\n".join([head, *refused]), {"answers_right": 0, "answers": 0}
        questions = [questions[place] for place in answered]
        given = [texts[place].strip() for place in answered]
        expected = [str(question.answer) for question in questions]
        is_right = [one == other.strip() for one, other in zip(given, expected)]
        scores = {name: mean(map(metric, given, expected)) for name, metric in self.metrics.items()}
        shown = "".join(f", {name} {score:.3f}" for name, score in scores.items())
        lines = [f"held-out questions: {sum(is_right)} of {len(questions)} exactly right{shown}"]
        lines += refused
        for number, question in enumerate(questions[: self.num_shown]):
            mark = "right" if is_right[number] else f"wrong, expected {expected[number]!r}"
            lines.append(f"  Q: {asked_by(question)}\n  A: {given[number]}   ({mark})")
        row: dict[str, Any] = {"answers_right": sum(is_right), "answers": len(questions)}
        row |= {"answers_refused": len(refused)} if refused else {}
        if (in_form := num_in_form(given, expected)) is not None:
            row["answers_in_form"] = in_form
        row |= {f"score/{name}": score for name, score in scores.items()}
        # for the report
        for question, answer, wanted, right in zip(questions, given, expected, is_right):
            row[f"text/{asked_by(question)}"] = (
                answer if right else f"{answer}  (expected: {wanted})"
            )
        return "\n".join(lines), row


def asked_by(question: Question) -> str:
    """Returns the last turn of a question, in which an image is `![](a.png)`."""
    content = question.messages[-1]["content"]
    if isinstance(content, list):
        return "".join(part.get("text") or f"![]({part['image']})" for part in content)
    return str(content)


def answers_to(
    questions: Sequence[Question],
    generator: Generator,
    batch_size: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    progress: Progress | None = None,  # of all questions, when these are a part of them
    refused: dict[int, str] | None = None,
) -> list[str]:
    """Returns the model's answers, in the order of the questions; those of like length share a
    batch.

    refused  gets the places of those that the model cannot be asked, and why; None: such a question
             raises ConfigError
    """

    def length(place: int) -> int:
        return sum(len(str(turn["content"])) for turn in questions[place].messages)

    groups = []
    of_text: dict[bool, list[int]] = {True: [], False: []}  # by whether they are chats
    for place in sorted(range(len(questions)), key=length):
        if has_images(questions[place].messages):
            groups.append([place])  # read one at a time, and once
        else:
            of_text[questions[place].is_chat].append(place)
    for alike in of_text.values():
        for start in range(0, len(alike), batch_size):
            groups.append(alike[start : start + batch_size])
    answers = [""] * len(questions)
    with (
        nullcontext(progress)
        if progress
        else Progress("answering", len(questions), "questions") as shown
    ):
        while groups:
            places = groups.pop()
            asked = [questions[place] for place in places]
            try:
                texts = generator.answers(
                    [question.messages for question in asked],
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    is_chat=asked[0].is_chat,
                    tools=[question.tools for question in asked],
                )
            except ConfigError as error:
                if refused is None:
                    raise
                if len(places) > 1:  # each alone
                    groups += [[place] for place in places]
                    continue
                refused[places[0]] = str(error)
                texts = [""]
            for place, text in zip(places, texts):
                answers[place] = text
            shown.add(len(places))
    return answers
