"""What is typed: flags and overrides."""

from __future__ import annotations

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.cli.line import argument_parser, is_sweep, parser
from automodel_lite.errors import ConfigError

PATHS = [
    "~/a.jsonl",
    "/x/a (1).jsonl",
    "/x/a#b;c&d!.jsonl",
    "/x/it's.jsonl",
    "C:\\x#\\",
    "/x/[1].jsonl",
    "ü ö\\'",
    "a=b",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_needs_no_quotes(path: str) -> None:
    assert compose_config("finetune", [f"dataset.path={path}"]).dataset.path == path


@pytest.mark.parametrize(
    ("override", "is_one"),
    [
        ("optimizer.lr=1e-3,3e-3", True),
        ("seed=range(0,2)", True),
        ("optimizer.lr=tag(log, interval(1e-5,1e-3))", True),
        ("logger=[tensorboard,wandb]", False),
        ("name='a,b'", False),
        ("seed=[0,1],[2,3]", True),
        ("training.max_steps=4", False),
    ],
)
def test_which_overrides_vary(override: str, is_one: bool):
    assert is_sweep(override) == is_one


def test_flags_stand_anywhere_between_the_arguments() -> None:
    found = argument_parser("Asks.")
    found.add_argument("model")
    found.add_argument("prompt", nargs="?")
    found.add_argument("--checkpoint")
    for line in (["m", "--checkpoint", "best", "Hi"], ["m", "Hi", "--checkpoint", "best"]):
        args = found.parse_args(line)
        assert (args.model, args.prompt, args.checkpoint) == ("m", "Hi", "best")
    assert found.parse_args(["m", "--", "--Hi"]).prompt == "--Hi"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--preset lora", "unrecognized arguments: --preset; did you mean --config-name"),
        ("--config lora", "unrecognized arguments: --config; did you mean --config-name"),
        ("--gpus 8", "unrecognized arguments: --gpus; did you mean --nproc"),
        ("--config-name", "argument --config-name/-cn needs one value behind it"),
    ],
)
def test_flags_of_others_are_known(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(line.split())
    assert str(caught.value) == f"{said} (--help lists the arguments)."


def test_a_command_without_settings_offers_none() -> None:
    with pytest.raises(ConfigError) as caught:
        argument_parser("Draws.").parse_args(["--name", "x"])
    assert str(caught.value) == "unrecognized arguments: --name x (--help lists the arguments)."
