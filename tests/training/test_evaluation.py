"""Scores of answers, and samples of a model in training."""

from pathlib import Path

from automodel_lite.parts.evaluation.exact_match import f1
from tests.runs import Row, train


def test_scores_of_an_answer():
    assert f1("The capital of Peru is Lima.", "the capital of peru is Lima") == 1.0
    assert f1("Lima", "the city of Lima") == 0.5  # 1 word of 1, 1 of 3 (the article does not count)
    assert f1("Quito", "Lima") == 0.0
    assert f1("", "") == 1.0


ASKED = [
    "samples.prompts=[What is the capital of France?]",
    "samples.max_new_tokens=4",
    "training.max_steps=3",
]


def texts(rows: list[Row]) -> list[str]:
    return [
        row["text/What is the capital of France?"]
        for row in rows
        if "text/What is the capital of France?" in row
    ]


def test_samples_are_the_same_sharded_and_whole(tmp_path: Path):
    asked = [*ASKED, "packed_sequence.slot_multiple=4"]  # the same packs
    alone = texts(train("smoke", tmp_path / "one", *asked))
    pair = texts(train("smoke", tmp_path / "two", *asked, "mesh.cp=2", world_size=2))
    assert len(alone) == 1
    assert alone[0]
    assert pair == alone
