"""Completion in the shell: presets, options of flags, groups and keys of the line that is being
typed.

Hydra installs it (`eval "$(automodel-lite -sc install=bash)"`) and asks here: its own answer takes
seconds, because it reads all groups again for each of them.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.compose import Loader, check_overrides, compose, without_hydra
from automodel_lite.cli.line import RECIPES, parser
from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.compat import Hydra
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, format_value

_PROGRAM = re.compile(r"^\s*(?:[\w./-]*python[\d.]*\s+\S+|\S+)\s*")


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
    flags = {option: action for action in parser()._actions for option in action.option_strings}
    awaits = (
        flags[words[-1]] if words and words[-1] in flags and flags[words[-1]].nargs != 0 else None
    )
    try:
        given, _ = parser().parse_known_intermixed_args(words[:-1] if awaits else words)
        sources = Sources.of(given.config_dir, given.config_path)
    except ConfigError:
        given = parser().parse_args([])
        sources = Sources()
    found: Iterator[str] | list[str]
    if awaits and awaits.choices:
        found = list(awaits.choices)
    elif awaits and awaits.dest == "config_name":
        found = presets_of(sources)
    elif awaits and awaits.dest in ("config_dir", "config_path"):
        found = [
            f"{entry.path}/" for entry in os.scandir(os.path.dirname(word) or ".") if entry.is_dir()
        ]
        found = [name.removeprefix("./") for name in found]
    elif word.startswith("-"):
        found = [option for option in flags if option[:2] == "--"]
    else:
        overrides = [text for text in given.overrides if "=" in text]
        found = _settings(sources, given.config_name, overrides, word)
    yield from sorted(name for name in set(found) if name.startswith(word))


def _settings(
    sources: Sources, preset: str | None, overrides: list[str], word: str
) -> Iterator[str]:
    """`group=`, `group=option`, `group.`, `group.key=` and `group.key=value`."""
    known = groups_of(sources)
    key, is_set, _ = word.partition("=")
    if is_set and key in known:
        yield from (f"{key}={option}" for option in known[key])
        return
    yield from (f"{group}=" for group in known)
    raw: Any
    try:
        raw = without_hydra(compose(Loader(sources, overrides), preset or "base", overrides))
    except ConfigError:
        raw = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    folder, _, _ = key.rpartition(".")
    node = OmegaConf.select(raw, folder, throw_on_missing=False) if folder else raw
    if not isinstance(node, DictConfig):
        return
    prefix = f"{folder}." if folder else ""
    plain: Any = OmegaConf.to_container(node, resolve=False)
    for name, value in plain.items():
        after = (
            "."
            if isinstance(value, dict)
            else f"={format_value(value).replace(' ', '') if is_set else ''}"
        )
        yield f"{prefix}{name}{after}"


def show(hydra: Hydra, line: Namespace) -> int:
    """Answers Hydra's own questions: --shell-completion and --cfg."""
    typed = list(line.overrides)
    if line.shell_completion:
        sys.argv[0] = sys.argv[0].split()[0]  # not `automodel-lite train`
        if "install=zsh" in typed:  # Hydra's script is bash's
            print("(( $+functions[compdef] )) || { autoload -Uz compinit; compinit }")
            print("autoload -Uz bashcompinit; bashcompinit")
        hydra.shell_completion(line.config_name or "base", typed)
        return 0
    assert isinstance(hydra.config_loader, Loader)
    check_overrides(hydra.config_loader, typed, line.is_multirun)
    hydra.show_cfg(line.config_name, typed, line.cfg, None, line.resolve)
    return 0
