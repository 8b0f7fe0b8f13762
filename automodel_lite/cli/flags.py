"""The flags of a recipe: Hydra's, as its documentation describes them, and those of the launcher.

https://hydra.cc/docs/advanced/hydra-command-line-flags
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from automodel_lite.errors import ConfigError, did_you_mean

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(frozen=True)
class Line:
    """What was typed."""

    preset: str | None
    config_dir: str | None
    config_path: str | None
    overrides: tuple[str, ...]
    question: tuple[str, ...]  # Hydra's flags for something to show: ("--cfg", "job")
    is_help: bool
    is_multirun: bool
    rerun: str | None
    launch: dict[str, Any]  # nproc, nnodes, rdzv, rdzv_id, max_restarts, as far as they were given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the settings, --hydra-help the flags).")


def parser() -> argparse.ArgumentParser:
    """Of a recipe that is configured by Hydra."""
    found = _Parser(add_help=False, allow_abbrev=False)
    found.add_argument("overrides", nargs="*")
    found.add_argument("--help", "-h", action="store_true")
    found.add_argument("--hydra-help", action="store_true")
    found.add_argument("--version", action="store_true")
    found.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    found.add_argument("--resolve", action="store_true")
    found.add_argument("--package", "-p")
    found.add_argument("--run", "-r", action="store_true")
    found.add_argument("--multirun", "-m", action="store_true")
    found.add_argument("--shell-completion", "-sc", action="store_true")
    found.add_argument("--config-path", "-cp")
    found.add_argument("--config-name", "-cn")
    found.add_argument("--config-dir", "-cd")
    found.add_argument("--experimental-rerun")
    found.add_argument("--info", "-i", const="all", nargs="?", choices=INFO)
    found.add_argument("--nproc")
    found.add_argument("--nnodes", type=int)
    found.add_argument("--rdzv")
    found.add_argument("--rdzv-id")
    found.add_argument("--max-restarts", type=int)
    return found


def parsed(argv: Sequence[str]) -> Line:
    """Raises ConfigError for a flag that does not exist, or two that exclude each other."""
    given, unknown = parser().parse_known_intermixed_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        known = [option.lstrip("-") for action in parser()._actions for option in action.option_strings]
        near = did_you_mean(flag.lstrip("-"), known).replace("did you mean ", "did you mean --") or "."
        raise ConfigError(f"{flag}: unknown flag{near}")
    if given.version:
        raise SystemExit(print(versions()))
    commands = {
        "--run": given.run,
        "--multirun": given.multirun,
        "--cfg": given.cfg,
        "--info": given.info,
        "--shell-completion": given.shell_completion,
    }
    typed = [flag for flag, value in commands.items() if value]
    if len(typed) > 1:
        raise ConfigError(f"{' and '.join(typed)} exclude each other: give one of them.")
    for flag, value in (("--package", given.package), ("--resolve", given.resolve)):
        if value and not given.cfg and not (flag == "--resolve" and given.help):
            raise ConfigError(f"{flag} belongs to --cfg job|hydra|all.")
    question = []
    for flag in ("help", "hydra_help", "shell_completion", "resolve"):
        question += [f"--{flag.replace('_', '-')}"] if vars(given)[flag] else []
    for flag in ("cfg", "package", "info"):
        question += [f"--{flag}", vars(given)[flag]] if vars(given)[flag] else []
    launch = {key: vars(given)[key] for key in ("nproc", "nnodes", "rdzv", "rdzv_id", "max_restarts")}
    return Line(
        preset=given.config_name.removesuffix(".yaml") if given.config_name else None,
        config_dir=given.config_dir,
        config_path=given.config_path,
        overrides=tuple(given.overrides),
        question=tuple(question),
        is_help=given.help,
        is_multirun=given.multirun or "hydra.mode=MULTIRUN" in given.overrides,
        rerun=given.experimental_rerun,
        launch={key: value for key, value in launch.items() if value is not None},
    )


def versions() -> str:
    """`automodel_lite 0.1.0 (hydra 1.3.8, torch 2.13.0, transformers 5.23.0)`."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    import automodel_lite

    others = ", ".join(f"{name.removesuffix('-core')} {of(name)}" for name in ("hydra-core", "torch", "transformers"))
    return f"automodel_lite {automodel_lite.__version__} ({others})"
