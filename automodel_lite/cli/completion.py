"""Answers of `--shell-completion query=bash|zsh|fish`: presets, options of flags, groups, options of groups and keys.

Hydra installs the completion (`eval "$(automodel-lite train -sc install=bash)"`) and asks here; its own answer takes
seconds, because it reads all groups again for each of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.commands import RECIPES
from automodel_lite.cli.flags import INFO, parser
from automodel_lite.cli.sources import Sources, composed, groups_of, presets_of
from automodel_lite.config.check import with_defaults
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError

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
