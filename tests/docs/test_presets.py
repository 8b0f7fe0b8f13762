"""The page "Which preset for me?" leaves no preset out, and names none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_preset_is_on_the_page():
    page = (ROOT / "docs" / "steps_and_rates.md").read_text()
    section = page.split("## Which preset for me?")[1]
    named = set(re.findall(r"`([a-z0-9_]+)`", section))
    presets = {path.stem for path in (ROOT / "conf").glob("*.yaml")} - {"base"}
    of_models = {name for name in presets if name.startswith(("llama3_", "qwen3_"))}
    assert named == presets - of_models
