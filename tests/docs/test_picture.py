"""The picture of the first screen is drawn from a run's own page."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.runs import QUICK, train

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "draw_report.py"


@pytest.mark.slow
def test_the_page_of_a_run_becomes_a_small_picture(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw_report", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if not any(map(shutil.which, script.BROWSERS)):
        pytest.skip("no browser is installed")
    train("smoke", tmp_path / "run", *QUICK, "report=true")
    script.main(["--run", str(tmp_path / "run"), "--to", str(tmp_path / "page.png")])
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (script.WIDTH, script.HEIGHT)
        assert len(picture.getcolors() or []) > 8
    assert (tmp_path / "page.png").stat().st_size < 100_000
