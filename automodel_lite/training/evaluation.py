"""Questions held out of the training set, asked by generation and compared word for word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from automodel_lite.models.generate import load_model


class Question(Protocol):
    """A chat that ends with the user's turn, and the answer that counts as right."""

    messages: list[dict[str, Any]]
    answer: str


@dataclass(frozen=True)
class Answer:
    question: str
    expected: str
    given: str

    @property
    def is_right(self) -> bool:
        return self.given.strip() == self.expected.strip()


@dataclass(frozen=True)
class ExactMatch:
    """The config node `evaluation`: asks the dataset's held-out questions at the end of the run."""

    num_questions: int = 24
    max_new_tokens: int = 64
    num_shown: int = 3  # sample answers on the screen

    def ask(self, model_folder: Path, questions: Sequence[Question], trust_remote_code: bool = False) -> Answers:
        """Greedy answers of the exported model or adapter, loaded as a user would load it."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
        model = load_model(str(model_folder), torch.float32, trust_remote_code)
        answers = [self._ask_one(model, tokenizer, question) for question in questions[: self.num_questions]]
        return Answers(answers, self.num_shown)

    @torch.no_grad()
    def _ask_one(self, model: Any, tokenizer: Any, question: Question) -> Answer:
        prompt = tokenizer.apply_chat_template(
            question.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=self.max_new_tokens, do_sample=False)
        given = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        return Answer(question.messages[-1]["content"], question.answer, given.strip())


@dataclass(frozen=True)
class Answers:
    """The answers to all questions asked."""

    answers: list[Answer]
    num_shown: int

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    def text(self) -> str:
        """`held-out questions: 24 of 24 exactly right`, and the first answers."""
        if not self.answers:
            return "held-out questions: the data has none"
        lines = [f"held-out questions: {self.num_right} of {len(self)} exactly right"]
        for answer in self.answers[: self.num_shown]:
            mark = "right" if answer.is_right else f"wrong, expected {answer.expected!r}"
            lines.append(f"  Q: {answer.question}\n  A: {answer.given}   ({mark})")
        return "\n".join(lines)
