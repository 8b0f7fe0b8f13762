"""What is typed: the names of the recipes, flags, and overrides as Hydra gets them.

The flags are Hydra's (https://hydra.cc/docs/advanced/hydra-command-line-flags) and the launcher's.
In overrides nobody needs a `+`: a key that is not a group is set or added, and whether it exists is
checked afterwards, for all keys at once. Values with letters that Hydra's grammar does not know are
quoted.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from automodel_lite.config.components import IS_INSTALLED, PACKAGE
from automodel_lite.errors import ConfigError, did_you_mean, nearest
from automodel_lite.results import open_json
from automodel_lite.version import __version__

# of an installed package they are a part
RECIPES_PACKAGE = f"{PACKAGE.name}.recipes" if IS_INSTALLED else "recipes"
COMMANDS = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8"))
RECIPES: dict[str, list[str]] = COMMANDS["recipes"]  # command -> module, purpose
TOOLS: dict[str, str] = COMMANDS["tools"]
JSON_HELP = "write the numbers as one JSON object; - prints it, and the rest goes to stderr"
EXAMPLES: list[str] = COMMANDS["examples"]


def rewrite_program_name(text: str) -> str:
    """Names the command that was typed: `python recipes/generate.py x` in a checkout is
    `automodel-lite generate x` for an installed package, and for who typed automodel-lite.

    >>> torchrun --nproc-per-node 4 recipes/train_ft.py
    torchrun --nproc-per-node 4 -m automodel_lite train
    """
    if not IS_INSTALLED and not sys.argv[0].startswith("automodel-lite"):
        return text
    for verb, (module, _) in RECIPES.items():
        script = rf"recipes/{module}\.py"
        text = re.sub(rf"(torchrun|python) {script}", f"automodel-lite {verb}", text)
        text = re.sub(rf"(torchrun -[^\n]*){script}", rf"\1-m automodel_lite {verb}", text)
        text = re.sub(script, f"automodel-lite {verb}", text)
    return text


def argument_parser(recipe_doc: str | None, has_results: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of a recipe with a command line of its own; its docstring is the head of
    `--help`. has_results: it finds numbers, and takes --json.
    """
    found = _Parser(
        description=rewrite_program_name(recipe_doc or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if has_results:
        found.add_argument("--json", action=_OpenJson, metavar="FILE", help=JSON_HELP)
    return found


_NEEDS_ONE = re.compile(r"argument (\S+): expected one argument")
_MEANT = {"--preset": "--config-name", "--config": "--config-name", "--gpus": "--nproc"}
"""Flags as others call them."""


class _OpenJson(argparse.Action):
    """Its mistakes are sentences of their own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        open_json(values)


class _Parser(argparse.ArgumentParser):
    """A mistake is a sentence, without the usage. Flags may stand between the other arguments:
    `generate runs/x --checkpoint best "Hi"`.
    """

    takes_settings = False  # key=value

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        line = sys.argv[1:] if args is None else args
        if "--" in line:  # behind it everything is an argument, in its order
            return super().parse_args(line, namespace)
        return self.parse_intermixed_args(line, namespace)

    def error(self, message: str) -> NoReturn:
        flag = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        if needs := _NEEDS_ONE.fullmatch(message):
            message = f"argument {needs[1]} needs one value behind it"
        close = _MEANT.get(flag)
        if close not in self._option_string_actions:
            close = nearest(flag, self._option_string_actions) if flag[:2] == "--" else None
        near = f"; did you mean {close}" if close else ""
        # of a mistake alone
        from automodel_lite.config.check import key_of
        from automodel_lite.config.schema import Config

        name = flag.lstrip("-").replace("-", "_")
        setting = self.takes_settings and (key_of(name) or ("." in name and name))
        if setting:
            is_off = OmegaConf.select(OmegaConf.structured(Config), setting) is False
            near = f": a setting has no dashes, {setting}={'true' if is_off else '...'}"
        raise ConfigError(f"{message}{near} (--help lists the arguments).")


_UNQUOTED = re.compile(r"[\w/\\+.$%*@?|: \t-]*", re.ASCII)
"""What Hydra's grammar takes without quotes. `~`, `#`, `(` and letters beyond ASCII are not in it,
and are in paths.
"""
_SYNTAX = re.compile(r"""\s*(["'\[{]|\w+\()|.*\$\{""", re.DOTALL)
"""A text in quotes, a list, a mapping, a call, an interpolation."""
Groups = Mapping[str, Sequence[str]]  # name -> the options to choose from


def split(override: str) -> tuple[str, str | None]:
    """`+a.b=1` -> `a.b`, `1`; without `=` the value is None."""
    key, is_set, value = override.partition("=")
    return key.lstrip("+~").strip(), value if is_set else None


def is_word(text: str) -> bool:
    """Returns whether an argument names a run, a model or data: it sets nothing, and takes nothing
    out as `~key` does.

    >>> is_word("chats.jsonl"), is_word("~/chats.jsonl"), is_word("~optimizer.lr"), is_word("a=1")
    (True, True, False, False)
    """
    is_removal = text.startswith("~") and "/" not in text
    return "=" not in text and not is_removal


def group_of(override: str, known: Groups) -> str | None:
    """Returns the group whose option the override chooses; None when it sets a value."""
    name = split(override)[0].partition("@")[0]
    return name if name in known or "/" in name else None


def is_choice(override: str, known: Groups) -> bool:
    """Returns whether the override names an option of a group, a file; not `model={config: {}}`."""
    is_mapping = (split(override)[1] or "").lstrip().startswith("{")
    return group_of(override, known) is not None and not is_mapping


def allow_new_key(override: str, known: Groups) -> str:
    """`a.b=1` -> `++a.b=1`; group choices, deletions and Hydra's own keys stay as they are."""
    key, value = split(override)
    is_plain = re.match(r"\+?\+?[A-Za-z_]", override) and value is not None
    if not is_plain or group_of(override, known) or "@" in key or key.split(".")[0] == "hydra":
        return override
    return f"++{key}={_quoted(value or '')}"


def option_problem(text: str, known: Groups, is_multirun: bool = False) -> str | None:
    """Returns the sentence for an option that does not exist, or for several values where there is
    one run.
    """
    group = group_of(text, known)
    (key, value) = split(text)
    if value is not None and not key:
        return f"{text}: cannot be read as key=value (there is no key)."
    if not is_multirun and is_sweep(text) and not text.startswith(("~", "hydra.")):
        key = text.partition("=")[0]
        return (
            f"{text}: several values: add --multirun to sweep over them, or write a list as "
            f"{key}=[{value}], or one text as '{key}=\"{value}\"'."
        )
    if (
        group is None
        or group not in known
        or value is None
        or text.startswith("~")
        or "$" in value
        or "(" in value
    ):
        return None
    if not options_in(text) and not value.strip().startswith(("[", "{")):
        return f"{text}: choose an option of the group: {', '.join(known[group])}."
    for option in options_in(text):
        folder, _, name = option.rpartition("/")
        if name not in known.get("/".join(filter(None, [group, folder])), ()):
            near = did_you_mean(option, known[group])
            more = (
                " pip install 'automodel-lite[sweep]' brings others."
                if group.startswith("hydra/")
                else ""
            )
            return f"{text}: no such option{near} The options are {', '.join(known[group])}.{more}"
    return None


def options_in(override: str) -> list[str]:
    """Returns the options that `group=option` or `group=a,b` names."""
    value = split(override)[1] or ""
    options = [
        option.strip(" '\"").removesuffix(".yaml") for option in value.strip("[]").split(",")
    ]
    return [option for option in options if option not in ("", "null")]


def _quoted(value: str) -> str:
    """Puts what Hydra's grammar does not take into quotes, item by item."""
    if _SYNTAX.match(value):
        return value
    items = []
    for item in value.split(","):
        # a backslash quotes the quote that follows it; others stand for themselves
        text = re.sub(
            r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), item.strip()
        )
        items.append(item if _UNQUOTED.fullmatch(item) else f"'{text}'")
    return ",".join(items)


def is_sweep(override: str) -> bool:
    """Does it name several values? `lr=1,2` and `lr=range(0,3)` do, `logger=[a,b]` does not."""
    try:
        return (
            OverridesParser.create()
            .parse_override(f"key={_quoted(split(override)[1] or '')}")
            .is_sweep_override()
        )
    except HydraException:
        return False


_SWITCHES = (("--help", "-h"), ("--version",), ("--resolve",))
_RUNS = (("--run", "-r"), ("--multirun", "-m"), ("--shell-completion", "-sc"))
_TEXTS = (
    ("--config-path", "-cp"),
    ("--config-name", "-cn"),
    ("--config-dir", "-cd"),
    ("--nproc",),
    ("--json",),
)
# flag -> the command that alone takes it, what its recipe gets, and what it is for
OWN_FLAGS: dict[str, tuple[str, Any, str]] = {
    "html": ("inspect", Path, "--html FILE: write it as a page."),
    "card": ("verify", Path, "--card RUN: write a certificate into the run's export."),
    "replay": (
        "verify",
        int,
        "--replay STEP: automodel-lite verify RUN --replay 130 computes a recorded step again; "
        "verify RUN checks the ledger, the checkpoints and the data.",
    ),
    "task": ("prepare", str, "--task I --tasks N: tokenize part I of N, from 1 on."),
    "tasks": ("prepare", str, "--tasks N: join the N parts that --task made."),
    "checkpoint": ("evaluate", str, "--checkpoint NAME: of a run, latest, best or step_00000500."),
}


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of a recipe that is configured by Hydra; with the flags of all commands,
    or of one.
    """
    found = _Parser(add_help=False, allow_abbrev=False)
    found.takes_settings = True
    found.add_argument("overrides", nargs="*")
    one_of = found.add_mutually_exclusive_group()
    for group, switches in ((found, _SWITCHES), (one_of, _RUNS)):
        for names in switches:
            group.add_argument(*names, action="store_true")
    for names in _TEXTS:
        found.add_argument(*names)
    for flag, (owner, kind, _) in OWN_FLAGS.items():
        if command in (None, owner):
            found.add_argument(f"--{flag}", type=kind)
    one_of.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    return found


def read_line(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the flags, `overrides`, `is_question` (nothing is run) and `is_multirun`; raises
    ConfigError.
    """
    line = parser().parse_intermixed_args(list(argv))
    if line.resolve and not line.help and not line.cfg:
        raise ConfigError("--resolve belongs to --cfg job|hydra|all.")
    line.config_name = line.config_name and line.config_name.removesuffix(".yaml")
    line.is_question = any((line.help, line.version, line.shell_completion, line.cfg))
    line.is_multirun = line.multirun or "hydra.mode=MULTIRUN" in line.overrides
    return line


def versions() -> str:
    """`automodel_lite 0.1.0 (hydra 1.3.8, torch 2.13.0, transformers 5.23.0)`."""
    packages = {"hydra": "hydra-core", "torch": "torch", "transformers": "transformers"}
    others = ", ".join(f"{name} {version(package)}" for name, package in packages.items())
    return f"automodel_lite {__version__} ({others})"
