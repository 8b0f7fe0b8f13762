"""Blocks of code on the pages can be pasted as they stand, and fit a narrow window."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "skills/automodel-lite/SKILL.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SHELL = ("bash", "sh", "shell", "console")
A_COMMAND = re.compile(
    r"([A-Z_]+=\S+ )*(automodel-lite|torchrun|python3?|pip|uv|conda|make|sbatch|srun|hf|vllm|git|docker|curl) [\w./-]"
)
# a question, a value, a path that the reader should write: `...`, `…`, `<name>`
AN_ELISION = re.compile(r"\.\.\.|…|<[a-z_ ]+>")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    """Fenced blocks, and those that are indented by four spaces behind a blank line."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r"```(\w*)$", lines[number])
        is_indented = lines[number].startswith("    ") and not lines[number - 1].strip()
        start = number
        number += 1
        if not fence and not is_indented:
            continue
        while number < len(lines) and (
            lines[number] != "```" if fence else lines[number].startswith("    ")
        ):
            number += 1
        own = lines[start + 1 : number] if fence else [line[4:] for line in lines[start:number]]
        language = fence[1] if fence else "indented"
        found.append(Block(page, start + 1, language, "\n".join(own)))
        number += 1 if fence else 0
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL]


def test_blocks_are_found() -> None:
    page = Path("page.md")
    text = (
        "text\n```bash\nmake train\n```\n\n    automodel-lite ls\n    more\nafter\n```\nout\n```\n"
    )
    assert [(block.line, block.language, block.text) for block in blocks_of(page, text)] == [
        (2, "bash", "make train"),
        (6, "indented", "automodel-lite ls\nmore"),
        (9, "", "out"),
    ]
    assert len(SHELL_BLOCKS) > 60


def test_commands_stand_in_blocks_of_the_shell() -> None:
    """Others have no colors, and what is indented has no button that copies it."""
    loose = [
        f"{block.place}: {line}"
        for block in BLOCKS
        if block.language in ("", "indented")
        for line in block.text.splitlines()
        if A_COMMAND.match(line)
    ]
    assert loose == []


def test_commands_fit_75_columns() -> None:
    long = [
        f"{block.place}: {line}"
        for block in SHELL_BLOCKS
        for line in block.text.splitlines()
        if len(line) > 75
    ]
    assert long == []


def test_commands_have_no_prompts_and_nothing_to_fill_in() -> None:
    wrong = [
        f"{block.place}: {line}"
        for block in SHELL_BLOCKS
        for line in block.text.splitlines()
        if line.startswith(("$ ", "> ", "% ")) or AN_ELISION.search(line)
    ]
    assert wrong == []


def test_a_shell_reads_them() -> None:
    for block in SHELL_BLOCKS:
        assert not re.search(r"\\ +$", block.text, flags=re.MULTILINE), block.place
        assert not block.text.endswith("\\"), block.place
    script = "\n".join(f"# {block.place}\n{block.text}" for block in SHELL_BLOCKS)
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")


@pytest.mark.parametrize("language", ["python", "yaml", "json"])
def test_code_is_read(language: str) -> None:
    readers = {"python": ast.parse, "yaml": lambda text: list(yaml.safe_load_all(text))}
    own = [block for block in BLOCKS if block.language == language]
    assert own
    for block in own:
        texts = block.text.splitlines() if language == "json" else [block.text]
        for text in texts:
            try:
                readers.get(language, json.loads)(text)
            except (SyntaxError, ValueError, yaml.YAMLError) as error:
                pytest.fail(f"{block.place}: {error}")
