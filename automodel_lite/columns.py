"""Columns: the values per token that go with a document from its token row to the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that carries no loss."""


@dataclass(frozen=True)
class Column:
    """A value per token that goes with a document from its token row to the batch.

    stored   dtype on disk
    batched  dtype of its tensor in a batch
    padding  what stands where no document is, and in rows without the column; `input_ids` take the
             tokenizer's padding token
    is_optional  stored and batched only where the data bring it; may hold several values per token,
                 [T, K]
    in_runs      stored as runs of equal values
    is_for_loss  read by the loss, which otherwise would ignore it; others are the model's
    of_row       of each label the same, of a row of a file: one `value` that it brings, its
                 `number` in the data, or that of its `group`
    """

    stored: str
    batched: str
    padding: float
    is_optional: bool = True
    in_runs: bool = False
    is_for_loss: bool = True
    of_row: str = ""


COLUMNS = {
    "input_ids": Column("int32", "int64", 0, is_optional=False),
    "labels": Column("int32", "int64", IGNORE_INDEX, is_optional=False),
    "loss_weights": Column("float32", "float32", 1.0, in_runs=True),
    "branches": Column("int32", "int64", 0, in_runs=True),
    "row_labels": Column("int32", "int64", 0, in_runs=True, is_for_loss=False),
    "answers": Column("int8", "int64", 0),
    "verdicts": Column("int8", "int64", 0),
    "choice_ids": Column("int32", "int64", -1, in_runs=True),
    "choice_weights": Column("float32", "float32", 0.0, in_runs=True),
    "question_numbers": Column("int64", "int64", 0, in_runs=True),
    "choices": Column("int64", "int64", -1, is_for_loss=False),
    "choice_targets": Column("float32", "float32", 0.0, is_for_loss=False),
    "targets": Column("float32", "float32", 0.0, in_runs=True),
    "margins": Column("float32", "float32", 0.0, in_runs=True),
    "reference_log_probs": Column("float32", "float32", 0.0),
    "teacher_ids": Column("int32", "int64", 0),
    "teacher_log_probs": Column("float32", "float32", 0.0),
    "teacher_rest": Column("float32", "float32", -math.inf),
    "row_place": Column("int64", "int64", -1),
    "average_weights": Column("float32", "float32", 0.0, is_for_loss=False),
    "mismatch_shares": Column("float32", "float32", 0.0, is_for_loss=False),
    "reference_point": Column("float32", "float32", 0.0, is_for_loss=False),
    "noise_key": Column("int32", "int32", 0, is_for_loss=False),
    "image": Column("int64", "int64", 0, in_runs=True, is_for_loss=False),
    "image_stamp": Column("int64", "int64", 0, in_runs=True, is_for_loss=False),
    "rope_shift": Column("int64", "int64", 0, in_runs=True, is_for_loss=False),
}
"""Every per-token column. Rows, packs, batches and shards carry what is listed here: the columns
below, and those that a loss declares (`declare_column`). `input_ids` and `labels` are fields of
`ThdBatch`, optional ones are in its `columns`, which the loss reads.

loss_weights  what the loss of a label counts, aligned with `labels`: 2.0 is like meeting the token
              twice
answers       which answer of a preference pair a label belongs to: CHOSEN, REJECTED, 0 = none
verdicts      what a label belongs to, of data whose answers are judged one by one: a DESIRABLE or
              an UNDESIRABLE answer, or the MISMATCHED one of another row; 0 = none
choice_ids, choice_weights  of the choices of a decision, in the order of its text: the token of
              each, and its probability times the weight of the question. They lie on as many tokens
              as there are choices, the last of which is where the answer is predicted
question_numbers  on the same tokens, a number that no other question of the data has; 0 elsewhere
choices, choice_targets  [T, K] the same, at the label alone; made of a whole stream
targets       the number that a score should be, at the label of a document
margins       by how much the score of the better answer should be higher, at both labels of a pair
reference_log_probs  of the labels, by the frozen model that preference losses compare with
teacher_ids, teacher_log_probs  [T, K] what a teacher finds likeliest at a label, and how likely
teacher_rest  the probability that it leaves to all other tokens
row_place     where in its flat token rows a token stands
branches      1 + the position at which a branch of a tree begins, 0 elsewhere; in a batch the
              positions show it
average_weights  what a label counts in a mean over documents or turns: made of a whole stream,
              before ranks share it
mismatch_shares  1 / the labels of a mismatched answer at each of them, 0 elsewhere; made as
              `average_weights` are
reference_point  KTO's of the step, at every token: made of all of its micro-batches before their
              gradients
noise_key     what the noise of a token's embedding follows from (models/neftune.py)
image         the number of the image, in the data, whose place a token is; 0 of text
image_stamp   what tells this image from others, by its bytes; 0 of text
rope_shift    positions of several axes less `position_ids` (parts/images/axes.py)
row_labels    summed along a row of a tree, how many labels it has beyond those in the stream, times
              their weights: negative where other rows train what they share
"""
_OF_THE_PACKAGE = frozenset(COLUMNS)


def declared_columns() -> list[str]:
    """Returns the columns that losses have declared."""
    return [name for name in COLUMNS if name not in _OF_THE_PACKAGE]


def declare_column(name: str, column: Column) -> None:
    """Adds a per-token column, from then on carried wherever those of the package are.

    Raises ValueError for a name that is known with other dtypes or another padding.
    """
    if (known := COLUMNS.setdefault(name, column)) != column:
        raise ValueError(
            f"the per-token column {name} is declared as {column}, and there is one of that name "
            f"already, {known}: give yours another name, or declare it alike."
        )


CHOSEN = 1
REJECTED = 2
DESIRABLE = 1
UNDESIRABLE = 2
MISMATCHED = 3


def labeled_rows(labels: Tensor) -> Tensor:
    """Returns positions that carry a label, int64 [R]; for tensors on the host."""
    return (labels != IGNORE_INDEX).nonzero().squeeze(1)
