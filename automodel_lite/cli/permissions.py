"""What a file may not set, because it would run code or write files before any configuration is checked.

A preset may come from a stranger: with a data set, a run's folder, a bug report. Hydra configures Python's logging,
builds callbacks, launchers and sweepers, and makes folders before the recipe sees a single key. So whatever of that
stands in a file has to be on a list of whole names or known contents; the command line may set the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.line import split
from automodel_lite.errors import ConfigError

COMMAND_LINE_ONLY = ("security.allow_targets", "model.trust_remote_code")
# Whole names: a prefix such as `logging.` would admit `logging.FileHandler`, which writes wherever a file says.
_TRUSTED = frozenset(
    [
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
        *(f"optuna.samplers.{name}Sampler" for name in ("Grid", "TPE", "Random", "CmaEs", "NSGAII", "MOTPE")),
    ]
)
_CODE_KEYS = ("_target_", "()", "class")
# Folders that Hydra makes and files that it writes there; the values are those of conf/base.yaml, of Hydra itself (for
# a preset that does not start from base) and of the plugins.
_FIXED = {
    "hydra.run.dir": (".", "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"),
    "hydra.output_subdir": (None, ".hydra"),
    "hydra.sweep.dir": ("${output_dir}", "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"),
    "hydra.sweep.subdir": ("${sweep_folder:}", "${hydra.job.num}"),
    "hydra.job.chdir": (None, False),
    "hydra.launcher.submitit_folder": ("${hydra.sweep.dir}/.submitit/%j",),
    "hydra.launcher.name": ("${hydra.job.name}",),
    "hydra.launcher.temp_folder": (None,),
    "hydra.sweeper.storage": (None,),  # a data base: sqlite writes any path
    "hydra.sweeper.custom_search_space": (None,),  # the dotted path of a function
}
_COMMANDS = (  # what a shell or an interpreter will run
    "hydra.launcher.setup",
    "hydra.launcher.python",
    "hydra.launcher.additional_parameters",
    "hydra.launcher.srun_args",
    "hydra.job.env_set",
)
_PLAIN_WORD = re.compile(r"[\w.,:+*%/ -]*")  # the text of a launcher becomes a line of a shell script


def check_granted(raw: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ConfigError for a permission that a file grants: those are the command line's to give."""
    typed = [split(text)[0] for text in overrides]
    for key in COMMAND_LINE_ONLY:
        value = OmegaConf.select(raw, key, throw_on_missing=False)
        if value and not _is_typed(key, typed):
            raise ConfigError(f"{key} is set in a file, but only the command line may set it: {key}=... .")


def check_hydra_settings(settings: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ConfigError for code that a file makes Hydra run, and for files that it makes Hydra write."""
    typed = [split(text)[0] for text in overrides]
    plain: Any = OmegaConf.to_container(settings, resolve=False)
    for group in ("hydra_logging", "job_logging"):
        # A dictConfig block is a small program: handlers open files, filters and formatters are any callable. Only
        # Hydra's own blocks without a file handler are let through, compared as a whole.
        if plain.get(group) not in _known_logging() and not _is_typed(f"hydra.{group}", typed, is_inside=True):
            key, value = next(_unknown_leaves(plain.get(group), f"hydra.{group}"))
            raise ConfigError(_refusal(key, value, "configure logs"))
    others = {key: value for key, value in plain.items() if not key.endswith("_logging")}
    for key, value in _leaves(others, "hydra"):
        if _is_typed(key, typed):
            continue
        is_code = key.rpartition(".")[2] in _CODE_KEYS and value not in _TRUSTED
        is_command = value not in (None, [], {}) and any(_is_below(key, command) for command in _COMMANDS)
        is_text = isinstance(value, str) and key.startswith("hydra.launcher.") and key not in _FIXED
        is_line = is_text and not _PLAIN_WORD.fullmatch(str(value))
        if is_code or is_command or is_line:
            raise ConfigError(_refusal(key, value, "name code"))
        is_path = key == "hydra.job.name" and not re.fullmatch(r"[\w-]+", str(value))  # of Hydra's log file
        if is_path or (key in _FIXED and value not in _FIXED[key]):
            raise ConfigError(_refusal(key, value, "place files"))


def _refusal(key: str, value: object, what: str) -> str:
    return f"{key}={value} is set in a file, but only the command line may {what}: {key}=... ."


@cache
def _known_logging() -> list[Any]:
    """The blocks that Hydra ships."""
    files = (Path(hydra.__file__).parent / "conf/hydra").glob("*_logging/*.yaml")
    return [None, *(OmegaConf.to_container(OmegaConf.load(path), resolve=False) for path in sorted(files))]


def _unknown_leaves(block: Any, prefix: str) -> Iterator[tuple[str, object]]:
    """Yields the leaves of a logging block that no shipped block has; first those that name code or a file."""
    known = {leaf for shipped in _known_logging() for leaf in map(str, _leaves(shipped, prefix))}
    found = [leaf for leaf in _leaves(block, prefix) if str(leaf) not in known] or [(prefix, block)]
    yield from sorted(found, key=lambda leaf: leaf[0].rpartition(".")[2] not in (*_CODE_KEYS, "filename"))


def _leaves(node: object, prefix: str) -> Iterator[tuple[str, object]]:
    items: list[tuple[object, object]] = []
    if isinstance(node, Mapping):
        items = list(node.items())
    elif isinstance(node, list):
        items = list(enumerate(node))
    if not items:
        yield prefix, node
    for key, value in items:
        yield from _leaves(value, f"{prefix}.{key}")


def _is_typed(key: str, typed: Sequence[str], is_inside: bool = False) -> bool:
    """Was the key, or a group around it, set on the command line? With `is_inside` also a key inside it."""
    return any(_is_below(key, name) or (is_inside and _is_below(name, key)) for name in typed)


def _is_below(key: str, name: str) -> bool:
    """Is it this key, or inside it?"""
    return key == name or key.startswith(f"{name}.")
