"""A dataset, a loss, an optimizer, an attention kernel and a tracker of one's own, named by
`_target_` in conf/.

    cd examples/own_parts
    python ../../recipes/train_ft.py --config-dir conf --config-name mine \\
        security.allow_targets=[my_parts]

The configuration may only call code that the command line allows. Each option file replaces its
whole group, so there is nothing to delete; its other keys are the arguments of the target, checked
before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.reading.documents import DocumentList, Question
from automodel_lite.models.loss import Loss, LossInputs, LossOutput
from automodel_lite.parts.optimizers.adamw import param_groups
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo
from automodel_lite.thd import AttentionOptions, Segments


@dataclass
class Spelling:
    """A dataset: the `Documents` protocol of automodel_lite/data/reading/documents.py.

    `train` and `val` hold documents (here prompt and completion; a chat has `messages`, plain text
    has `text`). `kind` is messages | prompt_completion | text | tokens. `identity` keys the token
    cache: another identity is other data. `questions` may be asked at the end by
    `evaluation=exact_match`.
    """

    words: list[str]
    num_copies: int = 20
    kind: str = field(init=False, default="prompt_completion")

    @property
    def train(self) -> DocumentList:
        return DocumentList(
            [self._document(word) for word in self.words] * self.num_copies, "spelling"
        )

    @property
    def val(self) -> dict[str, DocumentList]:
        return {
            "backwards": DocumentList(
                [self._document(word[::-1]) for word in self.words], "spelling.backwards"
            )
        }

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
class LabelSmoothing(Loss):
    """A loss: the SUM over the labeled rows, in fp32; the recipe divides by the label tokens of the
    whole step.

    `inputs.rows` evaluates a function of logits [r, V] a chunk of rows at a time, whose gradients
    are exact.
    """

    smoothing: float = 0.1

    def __call__(self, inputs: LossInputs) -> LossOutput:
        losses_R = inputs.rows(
            lambda logits, labels: nn.functional.cross_entropy(
                logits, labels, reduction="none", label_smoothing=self.smoothing
            ),
            inputs.labels_R,
        )
        return LossOutput(losses_R.sum(), {})


def nesterov(
    model: nn.Module, lr: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.SGD:
    """An optimizer: a function of the model, whose parameters may be sharded."""
    return torch.optim.SGD(
        param_groups(model, weight_decay), lr=lr, momentum=momentum, nesterov=True
    )


class MaskedAttention(ReferenceAttention):
    """An attention kernel: one call with a [Tq, Tk] mask. Slow on long streams, and short enough to
    read.

    It takes over `check`, which raises ConfigError for what a kernel cannot do, from the kernel
    that can do everything.
    """

    name = "thd_masked"

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        cu_q, cu_k = segments.cu_q, segments.cu_k
        document_q, place_q = _places(cu_q)
        document_k, place_k = _places(cu_k)
        # the last query of a document sees its last key
        shift = (cu_k.diff() - cu_q.diff())[document_q]
        behind = (place_q + shift)[:, None] - place_k[None]
        mask = (document_q[:, None] == document_k[None]) & (behind >= 0)
        if options.window is not None:
            mask &= behind < options.window
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def _places(cu: Tensor) -> tuple[Tensor, Tensor]:
    """Which document each token is in, and its place there; int64 [T] each."""
    lengths = cu.diff().long()
    documents = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), lengths)
    return documents, torch.arange(len(documents), device=cu.device) - cu[documents]


class CsvTracker(Callback):
    """A callback: started on the first rank alone, fed the rows of metrics.jsonl. If it raises, the
    run goes on.
    """

    def __init__(self, run: RunInfo, columns: list[str]) -> None:
        self.columns = columns
        self.file = open(run.folder / "metrics.csv", "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def log(self, row: Row) -> None:
        if "loss" in row:
            self.file.write(",".join(str(row[column]) for column in self.columns) + "\n")

    def close(self) -> None:
        self.file.close()
