"""Writes the pictures of easy-vqa with their questions: a record for each picture, for decisions.

    pip download --no-deps easy-vqa
    python examples/picture_records.py easy_vqa-*.whl shapes

writes shapes/{model,train.jsonl,val.jsonl,*.png}. A picture has about ten questions, of its color,
its shape, and what is in it; the model is the one of examples/pictures.py, which knows nothing.
"""

from __future__ import annotations

import json
import random
import re
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from pictures import write_model

COLORS = ["black", "blue", "brown", "gray", "green", "red", "teal", "yellow"]
SHAPES = ["circle", "rectangle", "triangle"]
NUM_TRAIN, NUM_HELD_OUT = 2000, 100  # of 4,000 and 1,000 pictures
SIDE, PATCH = 64, 4  # 64 tokens of a picture: shorter beginnings are not shared
STATE = "a picture"
AROUND = '? choice # = " false true Answer with one of these choices , written as .'  # a question
Question = tuple[str, str, int]  # what is asked, the answer, and the number of the picture


def record(picture: str, asked: list[Question]) -> dict[str, Any]:
    """Returns a picture with its questions, each named by its kind and its number among them."""
    questions: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for text, answer, _ in asked:
        one: dict[str, Any] = {"type": "choice", "instructions": text}
        if answer in COLORS:
            kind, one["criteria"] = "color", COLORS
        elif answer in SHAPES:
            kind, one["criteria"] = "shape", SHAPES
        else:
            kind, one["type"] = "is_there", "noul"
        name = f"{kind}_{sum(known.startswith(kind) for known in questions) + 1}"
        questions[name] = one
        answers[name] = answer == "yes" if kind == "is_there" else answer
    return {"images": [picture], "state": STATE, "questions": questions, "answers": answers}


def write_records(wheel: zipfile.ZipFile, part: str, name: str, count: int, to: Path) -> set[str]:
    """Writes pictures of a part of the package, and a record of each; returns the words in them."""
    questions: list[Question] = json.loads(wheel.read(f"easy_vqa/data/{part}/questions.json"))
    of_picture = defaultdict[int, list[Question]](list)
    for question in questions:
        of_picture[question[2]].append(question)
    lines = []
    for number in sorted(random.Random(0).sample(sorted(of_picture), count)):
        picture = f"{name}_{number}.png"
        (to / picture).write_bytes(wheel.read(f"easy_vqa/data/{part}/images/{number}.png"))
        lines.append(json.dumps(record(picture, of_picture[number])))
    (to / f"{name}.jsonl").write_text("\n".join(lines))
    return {word for text, _, _ in questions for word in re.findall(r"\w+", text)}


if __name__ == "__main__":
    path, to = map(Path, sys.argv[1:])
    to.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path) as wheel:
        words = write_records(wheel, "train", "train", NUM_TRAIN, to)
        write_records(wheel, "test", "val", NUM_HELD_OUT, to)
    words |= {*STATE.split(), *COLORS, *SHAPES, *AROUND.split(), *"ABCDEFGH"}
    write_model(to / "model", words, SIDE, PATCH)
    print(f"{to}: {NUM_TRAIN} and {NUM_HELD_OUT} pictures, and a model that knows nothing yet")
