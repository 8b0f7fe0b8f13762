"""The page about images, as printed: what it draws is learned, and told of a picture that was not trained on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_commands import ROOT, commands


@pytest.mark.slow
def test_the_page_ends_with_a_model_that_sees(tmp_path: Path) -> None:
    for name in ("recipes", "conf", "automodel_lite", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(text: str) -> str:
        words = shlex.split(text)
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run("python examples/pictures.py pictures")
    train, generate = (command.text for command in commands([ROOT / "docs/images.md"]))
    run(train)
    rows = [json.loads(x) for x in (tmp_path / "runs/pictures/metrics.jsonl").open()]
    accuracy = [row["val_token_accuracy/val"] for row in rows if "val_token_accuracy/val" in row]
    # of an answer and its end token; one of six colors by chance
    assert accuracy[-1] > 0.95
    first = json.loads((tmp_path / "pictures/val.jsonl").read_text().splitlines()[0])
    assert run(generate).strip() == first["messages"][1]["content"]
