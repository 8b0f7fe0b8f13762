"""A dataset, a loss and an optimizer of one's own, named by `_target_` in conf/ beside this file.

    cd examples/own_parts
    PYTHONPATH=. python ../../recipes/train_ft.py --config-dir conf --config-name mine security.allow_targets=[my_parts]

The configuration may only call code that the command line allows. Each option file replaces its whole group, so there
is nothing to delete; its other keys are the arguments of the target, checked before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from automodel_lite.data.documents import DocumentList, Question
from automodel_lite.training.optimizers import param_groups


@dataclass
class Spelling:
    """A dataset: the `Documents` protocol of automodel_lite/data/documents.py.

    `train` and `val` hold documents (here prompt and completion; a chat has `messages`, plain text has `text`).
    `kind` is messages | prompt_completion | text | tokens. `identity` keys the token cache: another identity is other
    data. `questions` may be asked at the end by `evaluation=exact_match`.
    """

    words: list[str]
    num_copies: int = 20
    kind: str = field(init=False, default="prompt_completion")

    @property
    def train(self) -> DocumentList:
        return DocumentList([self._document(word) for word in self.words] * self.num_copies, "spelling")

    @property
    def val(self) -> dict[str, DocumentList]:
        return {"backwards": DocumentList([self._document(word[::-1]) for word in self.words], "spelling.backwards")}

    @property
    def questions(self) -> list[Question]:
        return []

    @property
    def description(self) -> str:
        return f"spelling: {len(self.words)} words, {self.num_copies} times"

    @property
    def identity(self) -> str:
        return f"spelling(words={self.words}, num_copies={self.num_copies})"

    def _document(self, word: str) -> dict[str, str]:
        return {"prompt": f"Spell {word}: ", "completion": " ".join(word)}


@dataclass(frozen=True)
class LabelSmoothing:
    """A loss: the SUM over the labelled rows, in fp32; the recipe divides by the label tokens of the whole step.

    includes_head=False: the model's own head gives the logits [R, V] of the R labelled rows.
    """

    includes_head: ClassVar[Literal[False]] = False
    smoothing: float = 0.1

    def __call__(self, logits_RV: Tensor, labels_R: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_RV.float(), labels_R, reduction="sum", label_smoothing=self.smoothing)


def nesterov(model: nn.Module, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> torch.optim.SGD:
    """An optimizer: a function of the model, whose parameters may be sharded."""
    return torch.optim.SGD(param_groups(model, weight_decay), lr=lr, momentum=momentum, nesterov=True)
