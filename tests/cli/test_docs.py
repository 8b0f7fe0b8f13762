"""`automodel-lite docs`: what is printed for the words that were typed."""

from __future__ import annotations

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli.docs import answer, docs, read_pages, sections_of

PAGE = """\
# Title
first
## Bad rows
```
# a comment of the shell
```
### Deep
deep
## Other
other
"""


def test_a_section_ends_at_the_next_heading_of_its_level() -> None:
    title, bad, deep, other = sections_of("page", PAGE)
    assert (title.level, bad.level, deep.level, other.level) == (1, 2, 3, 2)
    assert title.text == PAGE.rstrip()
    assert bad.text == "## Bad rows\n```\n# a comment of the shell\n```\n### Deep\ndeep"
    assert deep.text == "### Deep\ndeep"
    assert bad.command == "automodel-lite docs page 'Bad rows'"
    assert title.command == "automodel-lite docs page"


def test_pages_come_in_reading_order_and_each_is_listed() -> None:
    pages = list(read_pages())
    assert pages[:3] == ["README", "install", "first_run"]
    assert "cookbook" in pages
    assert "cookbook/lora" in pages
    listed = {line.split()[0] for line in answer([]).splitlines()[2:] if line[0] != " "}
    assert listed == set(pages)


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("packing", "# Packing"),
        ("docs/packing.md", "# Packing"),
        ("Packing", "# Packing"),
        ("pakcing", "# Packing"),
        ("first-run", "# First run on your own data"),
        ("parallel", "# Parallelism"),
        ("cookbook", "# Cookbook"),
        ("cookbook/lora", "# LoRA, from training to serving"),
        ("distillation", "# Distillation"),
        ("data bad rows", "## Bad rows"),
        ("data bad rwos", "## Bad rows"),
        ("data.md#bad-rows", "## Bad rows"),
        ("bad rows", "## Bad rows"),
        ("training.max_steps", "training.max_steps"),
        ("optimizer=muon", "optimizer=muon — Muon for the matrices of the layers"),
        ("optimizer.momentum", "optimizer=muon"),
        ("data - bad rows", "## Bad rows"),
        ("# ???", "automodel-lite docs PAGE prints one"),  # as without words
        ("ghostscript", ""),
    ],
)
def test_what_is_meant(typed: str, first: str) -> None:
    if not first:
        with pytest.raises(ConfigError, match="automodel-lite docs lists the pages"):
            answer(typed.split())
        return
    assert answer(typed.split()).strip().startswith(first)


def test_a_setting_is_told_in_full() -> None:
    assert answer(["tokenize.max_bad_frac"]) == (
        "tokenize.max_bad_frac\n"
        "  type       number, at least 0 and at most 1\n"
        "  default    `0.05`\n"
        "  meaning    largest allowed fraction of bad, empty or fully masked documents"
    )


def test_a_page_names_its_twin_in_the_cookbook() -> None:
    assert answer(["lora"]).endswith("\n\nSee also: automodel-lite docs cookbook/lora")


def test_words_that_are_no_heading_are_found_in_the_text() -> None:
    first, line, *_ = answer(["excel"]).splitlines()
    assert first == "automodel-lite docs data 'Columns with another meaning'"
    assert "Excel" in line or "excel" in line


def test_words_that_no_heading_of_the_page_has_are_found_on_it() -> None:
    lines = answer(["serving", "vllm"]).splitlines()
    assert {line.split()[2] for line in lines if line.startswith("automodel-lite docs")} == {
        "serving"
    }


@pytest.mark.parametrize(
    ("typed", "cure"),
    [
        ("training.max_stepz", "did you mean training.max_steps?"),
        ("data nonsense", "its headings are 'Your files', "),
    ],
)
def test_what_is_not_there(typed: str, cure: str) -> None:
    with pytest.raises(ConfigError, match="docs") as raised:
        answer(typed.split())
    assert cure in str(raised.value)


def test_every_command_that_is_printed_prints_a_section() -> None:
    """What `answer` names can be typed: each heading of each page leads to itself, or to the first of its name."""
    for page, text in read_pages().items():
        for section in sections_of(page, text)[1:]:
            heading = section.heading.replace("`", "")
            shown = answer([page, heading]).splitlines()[0].lstrip("# ").replace("`", "")
            assert shown == heading, (page, heading)


def test_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs(["data", "bad", "rows"]) == 0
    assert capsys.readouterr().out.startswith("## Bad rows\n")
