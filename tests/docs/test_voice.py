"""Pages, comments and messages name one command, `automodel-lite`; only README's quick start begins with torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_lite.cli.line import rewrite_program_name
from docs.site_links import repository

ROOT = Path(__file__).resolve().parent.parent.parent
# `python recipes/x.py`, and torchrun on one machine; several machines are joined by torchrun
OTHER_VOICE = re.compile(r"(torchrun|python3?) (?!--nnodes)[^\n`]*recipes/\w+\.py")
# who reads the code, or asks what the launchers are, needs the file
ABOUT_FILES = {"architecture.md", "extending.md", "reading.md", "settings.md", "slurm.md"}
PAGES = [
    path
    for path in [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "conf").rglob("*.yaml"),
        ROOT / "AGENTS.md",
        ROOT / "llms.txt",
    ]
    if path.name not in ABOUT_FILES
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_speaks_with_one_voice(page: Path):
    assert not OTHER_VOICE.search(page.read_text())


def test_readme_begins_with_torchrun_and_goes_on_with_the_command():
    text = (ROOT / "README.md").read_text()
    assert len(OTHER_VOICE.findall(text)) <= 1


def test_messages_of_the_package_name_the_command():
    for path in (ROOT / "automodel_lite").rglob("*.py"):
        if path.name not in ("line.py", "recipes.py"):
            assert not re.search(r'["(]python recipes/\w+\.py', path.read_text()), path


@pytest.mark.parametrize(
    ("typed", "written", "shown"),
    [
        ("automodel-lite train", "torchrun recipes/train_ft.py --x", "automodel-lite train --x"),
        ("automodel-lite plan", "usage: python recipes/plan.py", "usage: automodel-lite plan"),
        (
            "automodel-lite train",
            "torchrun --nnodes 2 recipes/train_ft.py",
            "torchrun --nnodes 2 -m automodel_lite train",
        ),
        ("recipes/plan.py", "usage: python recipes/plan.py", "usage: python recipes/plan.py"),
    ],
)
def test_help_names_the_command_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, typed: str, written: str, shown: str
):
    monkeypatch.setattr(sys, "argv", [typed])
    assert rewrite_program_name(written) == shown


def test_the_help_of_the_command_has_no_other_voice():
    done = subprocess.run(
        [sys.executable, "-m", "automodel_lite", "train", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "usage: automodel-lite train --config-name" in done.stdout
    assert not OTHER_VOICE.search(done.stdout)


def test_the_first_page_is_short_and_the_site_begins_with_it():
    """README: at most 120 lines; the site's index has its picture, its three bullets and two commands."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    index = (ROOT / "docs/README.md").read_text().split("## Pages")[0]
    bullets = [line for line in readme.split("## Two commands")[0].splitlines() if line[:2] == "- "]
    assert len(bullets) == 3
    assert all(bullet in index for bullet in bullets)
    assert re.findall(r"!\[.*\]\((.*)\)", index) == ["report.png"]
    assert (ROOT / "docs/report.png").stat().st_size < 100_000
    assert "pip install" in index


def test_files_for_agents_have_absolute_links():
    """They are read without the tree around them."""
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    address = f"{repository()}/blob/main/"
    assert links
    for link in links:
        assert link.startswith(address)
        assert (ROOT / link.removeprefix(address)).is_file(), link
