"""The flags of a recipe (Hydra's, as its documentation describes them, and the launcher's), its help and completion.

https://hydra.cc/docs/advanced/hydra-command-line-flags

`--help` prints the template of Hydra's own help, which a `hydra/help` of the user's can replace. Hydra installs the
completion (`eval "$(automodel-lite -sc install=bash)"`) and asks here for presets, options of flags, groups and
keys; its own answer takes seconds, because it reads all groups again for each of them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.commands import RECIPES, as_typed
from automodel_lite.cli.sources import Sources, composed, groups_of, presets_of
from automodel_lite.config.check import with_defaults
from automodel_lite.config.schema import Config
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
        if os.environ.get("RANK", "0") == "0":
            print(versions())
        raise SystemExit
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


EXAMPLES = (
    "torchrun recipes/train_ft.py --config-name llama_packed",
    "torchrun recipes/train_ft.py --config-name llama_packed packed_sequence.packed_sequence_size=512 name=b",
    "torchrun recipes/train_ft.py --config-name finetune name=c model.pretrained=/models/x dataset.path=a.jsonl",
    "torchrun --nproc-per-node 4 recipes/train_ft.py --config-name llama_packed mesh.cp=2",
    "automodel-lite train --nproc 4 --config-name llama_packed mesh.cp=2",
    "torchrun recipes/train_ft.py --config-name llama_packed name=sweep --multirun optimizer.lr=1e-3,3e-3",
)
ConfigStore.instance().store(group="hydra/help", name="recipe", node={"template": "${recipe_help:}"})


def fill_in_help(recipe: str, sources: Sources) -> None:
    """Fills in Hydra's template for this process."""
    text = help_of(recipe, sources).replace("$", "$$")
    OmegaConf.register_new_resolver("recipe_help", lambda: text, replace=True)


def help_text(recipe: str = "train_ft", config_dir: str | None = None) -> str:
    """Presets, groups with their options, and examples."""
    return help_of(recipe, Sources.of(config_dir))


def help_of(recipe: str, sources: Sources) -> str:
    start = "torchrun" if recipe == "train_ft" else "python"
    purpose = next(text for module, text in RECIPES.values() if module == recipe)
    lines = [
        f"{purpose[0].upper()}{purpose[1:]}.",
        "",
        f"usage: {start} recipes/{recipe}.py --config-name PRESET [--config-dir FOLDER] [key=value ...]",
    ]
    lines += ["", "presets:", *(f"  {name:16s} {first_comment(name, sources)}" for name in presets_of(sources))]
    lines += ["", "groups (group=option):"]
    lines += [f"  {group:16s} {', '.join(options)}" for group, options in groups_of(sources).items()]
    if recipe == "train_ft":
        lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", "--cfg job prints the whole configuration and stops; --hydra-help lists Hydra's flags."]
    lines += [
        "--nproc 8 (or gpu) starts so many processes on this machine; --nnodes 2 --rdzv HOST:PORT joins machines."
    ]
    lines += ["dry_run=true checks everything, estimates memory and stops."] if recipe == "train_ft" else []
    return as_typed("\n".join(lines))


def first_comment(preset: str, sources: Sources) -> str:
    """The first sentence of the comment of a preset or an option, if it begins with one."""
    path = sources.file(preset)
    assert path is not None
    line = next(iter(path.read_text().splitlines()), "")
    return re.split(r"[:;] ", line.lstrip("# "))[0].rstrip(".") if line.startswith("#") else ""


_PROGRAM = re.compile(r"^\s*(?:[\w./-]*python[\d.]*\s+\S+|\S+)\s*")
_VALUES = {"--info": INFO, "-i": INFO, "--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all")}
_NAMES = ("--config-name", "-cn")
_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp")


def answer_query() -> list[str]:
    """Completions of the line that the shell gives in COMP_LINE, up to the cursor."""
    line = os.environ.get("COMP_LINE", "")
    typed = _PROGRAM.sub("", line, count=1)
    words = typed.split()
    word = "" if not typed or typed[-1].isspace() else words.pop()
    if not _PROGRAM.match(line) or "python" in line.split()[0]:
        return list(complete(words, word))
    if not words:
        return [verb for verb in RECIPES if verb.startswith(word)]
    return list(complete(words[1:] if words[0] in RECIPES else words, word))


def complete(words: list[str], word: str) -> Iterator[str]:
    """Completions of `word` behind the other words of a recipe's command line."""
    given = {flag: words[place + 1] for place, flag in enumerate(words[:-1]) if flag.startswith("-")}
    folder = next((given[flag] for flag in _FOLDERS[:2] if flag in given), None)
    path = next((given[flag] for flag in _FOLDERS[2:] if flag in given), None)
    try:
        sources = Sources.of(folder, path)
    except ConfigError:
        sources = Sources()
    before = words[-1] if words else ""
    found: Iterator[str] | list[str]
    if before in _NAMES:
        found = presets_of(sources)
    elif before in _VALUES:
        found = list(_VALUES[before])
    elif before in _FOLDERS:
        found = [f"{entry.path}/" for entry in os.scandir(os.path.dirname(word) or ".") if entry.is_dir()]
        found = [name.removeprefix("./") for name in found]
    elif word.startswith("-"):
        found = [option for action in parser()._actions for option in action.option_strings if option[:2] == "--"]
    else:
        preset = next((given[flag] for flag in _NAMES if flag in given), None)
        overrides = [text for text in words if "=" in text and not text.startswith("-")]
        found = _settings(sources, preset, overrides, word)
    yield from sorted(name for name in set(found) if name.startswith(word))


def _settings(sources: Sources, preset: str | None, overrides: list[str], word: str) -> Iterator[str]:
    """`group=`, `group=option`, `group.`, `group.key=` and `group.key=value`."""
    known = groups_of(sources)
    key, is_set, _ = word.partition("=")
    if is_set and key in known:
        yield from (f"{key}={option}" for option in known[key])
        return
    yield from (f"{group}=" for group in known)
    raw: Any
    try:
        raw = with_defaults(composed(sources, preset or "base", overrides))
    except ConfigError:
        raw = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    folder, _, _ = key.rpartition(".")
    node = OmegaConf.select(raw, folder, throw_on_missing=False) if folder else raw
    if isinstance(node, DictConfig):
        yield from _keys(node, f"{folder}." if folder else "", is_set != "")


def _keys(node: DictConfig, prefix: str, with_values: bool) -> Iterator[str]:
    plain: Any = OmegaConf.to_container(node, resolve=False)
    for name, value in plain.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}."
        elif with_values:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            yield f"{prefix}{name}={shown.replace(' ', '')}"
        else:
            yield f"{prefix}{name}="
