"""`automodel-lite COMMAND ...`: which code a command starts, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from automodel_lite.__main__ import main
from automodel_lite.cli.line import COMMANDS, RECIPES, TOOLS
from tests.ranks import in_a_process


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a question that starts nothing."""
    monkeypatch.setattr(sys, "argv", ["/venv/bin/automodel-lite", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["-h"], 0), ([], 0), (["--hepl"], 2)], ids=str
)
def test_commands_are_listed(
    arguments: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(monkeypatch, *arguments) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: automodel-lite COMMAND ... (--help after a command says more)"
    assert [line.split()[1] for line in lines if line.startswith("  automodel-lite")] == [
        *RECIPES,
        *TOOLS,
    ]


def test_what_others_call_a_command_leads_to_one() -> None:
    commands = {*RECIPES, *TOOLS}
    assert commands >= {name.split()[0] for name in COMMANDS["meant"].values()}
    assert commands.isdisjoint(COMMANDS["meant"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "trian",
            "automodel-lite 'trian': no such command; did you mean train? automodel-lite --help lists them.",
        ),
        (
            "chat",
            "automodel-lite 'chat': no such command; did you mean generate? automodel-lite --help lists them.",
        ),
        (
            "serve",
            "automodel-lite 'serve': no such command; did you mean docs serving? automodel-lite --help lists them.",
        ),
        ("x\x1b", "automodel-lite 'x\\x1b': no such command. automodel-lite --help lists them."),
    ],
)
def test_a_command_that_is_not_there(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, name, "--config-name", "smoke") == 2
    screen = capsys.readouterr()
    assert (screen.out, screen.err) == ("", f"{sentence}\n")


def _typed(*arguments: str) -> None:
    sys.argv = ["/venv/bin/automodel-lite", *arguments]
    main()


USAGE = "usage: automodel-lite run PACKAGE.MODULE:FUNCTION --config-name PRESET [key=value ...]"
STARTED = {
    "run --help": (0, USAGE),
    "run": (2, USAGE),
    "run nowhere:main": (2, "nowhere:main: there is no module nowhere"),
    "validate --config-name smok": (2, "--config-name smok: no such preset; did you mean smoke?"),
    "validate --config-name smoke --cfg job": (0, "\ndry_run: true\n"),
    "ls lr_scheduler": (0, "cosine"),
    "convert": (2, "the following arguments are required: "),
    "slurm --nodes none": (2, "argument --nodes: "),
    "average": (2, "the following arguments are required: run"),
}


@pytest.mark.parametrize("line", STARTED)
def test_a_command_starts_its_code(line: str, tmp_path: Path) -> None:
    code, screen = in_a_process(_typed, tmp_path, *line.split())
    assert code == STARTED[line][0], screen
    assert STARTED[line][1] in screen
    assert "Traceback" not in screen
