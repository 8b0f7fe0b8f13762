"""Distil a frozen teacher: a recipe of one's own, from any folder and on any number of ranks.

    automodel-lite run my_kd.recipe:main --nproc 2 --config-name kd name=mine \\
        dataset.path=dialogs.jsonl model.pretrained=student extra.teacher=teacher
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite import TrainFinetuneRecipe
from automodel_lite.config.rules import PathStr, Range
from automodel_lite.config.schema import Config
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.peers import Peers
from automodel_lite.training.build import build_model
from automodel_lite.training.decide import check_same_vocabulary, decide
from automodel_lite.training.settings import as_teacher


@dataclass
class KdConfig:
    """The keys below `extra`."""

    teacher: PathStr = "teacher"  # a folder or hub name
    temperature: Annotated[float, Range(above=0)] = 1.0  # of both models


@dataclass(frozen=True)
class Kd(Loss):
    """Forward KL of the student from the teacher, and plain cross-entropy as a part for the log."""

    temperature: float = 1.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        def both(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
            q, p = (F.log_softmax(logits / self.temperature, -1) for logits in (student, teacher))
            return torch.stack(
                [(p.exp() * (p - q)).sum(-1), F.cross_entropy(student, labels, reduction="none")], 1
            )

        kl, ce = inputs.rows_with_teacher(both, inputs.labels_R).sum(0).unbind()
        return LossOutput(kl, {"ce": ce})


class KdRecipe(TrainFinetuneRecipe):
    """Fine-tuning with another loss, and a second model on the same mesh."""

    def __init__(self, config: Config, peers: Peers, extra: KdConfig) -> None:
        super().__init__(config, peers)
        self.extra = extra

    def setup(self) -> None:
        super().setup()
        parts = as_teacher(self.built.decided, CausalLM(self.extra.teacher))
        tokenizer = self.data.tokenizer
        check_same_vocabulary(parts, tokenizer)
        mesh = self.mesh
        decided = decide(parts, tokenizer, mesh.shape, mesh.device, trains=False)
        teacher = build_model(decided, tokenizer, mesh, trains=False)
        self.model.loss_model.set_teacher(teacher.model.loss_model)
        self.model.loss_model.loss = Kd(self.extra.temperature)
        self.console.say("teacher", f"{self.extra.teacher}, attention {teacher.attention}")


def main(config: Config, extra: KdConfig) -> int:
    """Trains; returns the exit code."""
    return KdRecipe.launch(config, extra)
