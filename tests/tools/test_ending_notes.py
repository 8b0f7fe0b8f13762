"""What a run is told of how it ended."""

from __future__ import annotations

import pytest

from automodel_lite.config.schema import TrainingConfig
from automodel_lite.evaluation.form import marks_of, num_in_form
from automodel_lite.tools.ending_notes import ending_notes, loss_fall

EXPECTED = [f"ITEM: {n} x mugs\nDUE: {n} May" for n in range(2, 12)]
WORDS = ["the house is red", "a dog ran away home", "we saw it there", "it is late now, friend"]


@pytest.mark.parametrize(
    ("losses", "fall"),
    [
        ([3.0, 2.5, 2.0, 1.9, 1.6, 1.5], (1.95, 1.55)),
        ([3.0, 1.0, 0.50, 0.49, 0.50, 0.48], None),  # has settled
        ([3.0, 0.5, 0.12, 0.10, 0.01, 0.005], None),  # is learned
        ([3.0, 2.5, 2.0, 1.5], None),  # too few to tell
    ],
)
def test_a_loss_that_still_falls(losses: list[float], fall: tuple[float, float] | None) -> None:
    assert loss_fall(losses) == (fall and pytest.approx(fall))


def test_marks_are_what_the_answers_share_beside_plain_words() -> None:
    assert marks_of(EXPECTED) == ["DUE:", "ITEM:", "May"]
    assert marks_of(WORDS) == []


@pytest.mark.parametrize(
    ("answer", "expected", "has_it"),
    [
        ("ITEM: 4 x lamps\nDUE: 1 May", EXPECTED, True),
        ("ITEM: 4 x lamps", EXPECTED, True),  # cut
        ("Sure! We will send you four lamps in May.", EXPECTED, False),
        ("", EXPECTED, False),
        ("they went to the sea", WORDS, True),
        ("no " * 60, WORDS, False),
        ("", WORDS, False),
    ],
)
def test_an_answer_has_the_form_of_the_data(answer: str, expected: list[str], has_it: bool) -> None:
    given = [answer] * len(expected)
    assert num_in_form(given, expected) == (len(expected) if has_it else 0)


def test_of_few_answers_no_form_is_known() -> None:
    assert num_in_form(["a"], ["b"]) is None


def test_a_run_is_told_what_to_set() -> None:
    rows = [{"step": step * 10, "loss": 3.0 - step / 4} for step in range(6)]
    rows.append({"step": 50, "answers": 8, "answers_in_form": 3})
    fell, formless = ending_notes(rows, TrainingConfig(), 3.0)
    assert fell == (
        "the loss still fell at the end, from 2.375 to 1.875: train longer under another name, "
        "training.num_epochs=6 name=..."
    )
    assert formless.startswith("only 3 of 8 held-out answers have the form of the data's: train")
    assert "training.max_steps=100" in next(ending_notes(rows, TrainingConfig(max_steps=50), 1.2))
    # pairs and policies have losses that need not settle; a long run is somebody's plan
    assert list(ending_notes(rows[:-1], TrainingConfig(), 3.0, should_settle=False)) == []
    long = [{**row, "step": row["step"] * 100} for row in rows[:-1]]
    assert list(ending_notes(long, TrainingConfig(), 3.0)) == []


@pytest.mark.parametrize(
    ("held_out", "epochs", "cure"),
    [
        ("nan", 3.0, "training.num_epochs=6"),  # as rows have it
        (1.9, 3.0, "training.num_epochs=6"),  # all rows have the loss of those that were trained on
        (3.1, 3.0, "more rows teach more than more epochs"),  # they are learned by heart
        (3.1, 1.0, "training.num_epochs=2"),  # each row is new: the validation set is a harder one
    ],
)
def test_rows_learned_by_heart_are_no_reason_to_go_on(
    held_out: float | str, epochs: float, cure: str
) -> None:
    rows = [{"step": step * 10, "loss": 3.0 - step / 4} for step in range(6)]
    rows += [{"step": 30, "val_loss/a": 9.0}, {"step": 50, "val_loss/a": held_out}]
    (note,) = ending_notes(rows, TrainingConfig(), epochs)
    assert cure in note
