"""The survey of families on packs with images: what the page says of each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models_page import of_images, of_models
from benchmarks.survey import block, with_blocks
from benchmarks.survey_images import Finding

ROOT = Path(__file__).resolve().parents[2]
NEED_MORE = {"cohere2_vision", "gemma4_unified", "kimi_k25", "lfm2_vl", "llama4", "minicpm_ocr"}
NEED_MORE |= {"muse_glimmer", "muse_spark", "nemotron_h_omni", "step3p7", "video_llava"}
NEED_MORE |= {"fast_vlm", "gemma3n", "perception_lm"}
"""Families whose image processors need torchvision, or whose towers need timm."""


def exact_of_page() -> list[str]:
    table = block((ROOT / "docs" / "models.md").read_text(), "images")
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [line.split("|")[1].strip() for line in lines[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("family", [x for x in exact_of_page() if x not in NEED_MORE])
def test_a_family_of_the_page_is_exact(family: str, tmp_path: Path) -> None:
    found = tmp_path / "found.jsonl"
    command = [sys.executable, "benchmarks/survey_images.py", "--json", str(found)]
    subprocess.run([*command, "--families", family], cwd=ROOT, check=True)
    assert Finding(**json.loads(found.read_text())).verdict == "exact"


def test_blocks_of_the_page_are_replaced_and_the_rest_is_kept() -> None:
    page = "# Models\n\n<!-- a -->\n\n<!-- end -->\n\nBy hand.\n<!-- b -->\n\nold\n\n<!-- end -->\n"
    written = with_blocks(page, {"a": ["| 1 |", "| 2 |"], "b": []})
    assert block(written, "a").split() == ["|", "1", "|", "|", "2", "|"]
    assert block(written, "b") == ""
    assert "\n\nBy hand.\n" in written
    assert with_blocks(written, {"a": [], "b": ["old"]}) == page


def test_the_page_has_the_blocks_of_both_surveys() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    blocks = of_models([]) | of_images([])
    assert with_blocks(page, {name: block(page, name).split("\n")[1:-1] for name in blocks}) == page
    assert len(exact_of_page()) >= 55
