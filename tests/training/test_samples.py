from pathlib import Path

from tests.runs import Row, train

ASKED = ["samples.prompts=[What is the capital of France?]", "samples.max_new_tokens=4", "training.max_steps=3"]


def texts(rows: list[Row]) -> list[str]:
    return [row["text/What is the capital of France?"] for row in rows if "text/What is the capital of France?" in row]


def test_samples_are_the_same_sharded_and_whole(tmp_path: Path):
    alone = texts(train("smoke", tmp_path / "one", *ASKED))
    pair = texts(train("smoke", tmp_path / "two", *ASKED, "mesh.cp=2", "packed_sequence.slot_multiple=4", world_size=2))
    assert len(alone) == 1
    assert alone[0]
    assert pair == alone
