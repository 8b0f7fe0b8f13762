"""The page about images, as printed: what it draws is learned, and told of pictures that were not trained on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_commands import IMAGES, ROOT


@pytest.mark.slow
def test_the_page_ends_with_a_model_that_sees(tmp_path: Path) -> None:
    for name in ("recipes", "conf", "automodel_lite", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    text = IMAGES.read_text()
    (shell,) = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    screen = run("bash", "-ec", shell)
    *_, said = screen.split()
    first = json.loads((tmp_path / "pictures/val.jsonl").read_text().splitlines()[0])
    assert said == first["messages"][1]["content"]
    (right,) = re.findall(r"held-out questions: (\d+) of 60 exactly right", screen)
    assert int(right) >= 57  # of 60, where one of six colors is right by chance
    (row,) = re.findall(r'{"messages".*', text)
    rows = (tmp_path / "pictures/train.jsonl").read_text().splitlines()
    assert json.loads(row)["messages"][0] == json.loads(rows[0])["messages"][0]
    report = (tmp_path / "runs/pictures/report.html").read_text()
    (asked,) = re.findall(
        r'<tr><td><img src="data:image/jpeg;base64,[^>]*><br> What[^<]*</td>', report
    )
    assert "pictures/val_0.png" in asked
