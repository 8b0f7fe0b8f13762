"""Which file a value comes from, where a preset and the option file of a group set the same key.

Hydra lets the preset win. That is right for an option that a preset chose, and wrong for a file of the user's own that
was chosen on the command line: there the option file wins. Either way a line tells what beat what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.overrides import chosen, group_of, split
from automodel_lite.cli.sources import Sources, check_granted, check_preset, composed, groups_of, read
from automodel_lite.config.components import CONF_DIR

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


def compose_config(config_name: str | None, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """The merged configuration of a preset and overrides such as `training.max_steps=10 attention=varlen`.

    `config_dir` is a folder of the user's own presets and group options, searched before the project's.
    Raises ConfigError: unknown preset or option, unreadable override, a permission that a file grants.
    """
    sources = Sources.of(config_dir).with_searchpath(config_name, overrides)
    preset = check_preset(sources, config_name)
    raw = composed(sources, preset, overrides)
    check_granted(raw, overrides)
    return settled(raw, sources, preset, overrides)[0]


@dataclass(frozen=True)
class Layer:
    """One file's own values, by dotted key."""

    name: str  # optimizer/sgd.yaml
    path: Path
    values: dict[str, Any]


def settled(
    raw: DictConfig, sources: Sources, preset: str, overrides: Sequence[str]
) -> tuple[DictConfig, dict[str, Any], list[str]]:
    """The configuration with the values of the user's chosen option files; those values by key; and a line for each
    key of a chosen option that two files set, `optimizer.lr=0.1 (optimizer/sgd.yaml over finetune.yaml)`.
    """
    known = groups_of(sources)
    typed = [split(text)[0] for text in overrides if not group_of(text, known)]
    composed = dict(_flat(OmegaConf.to_container(raw, resolve=False), ""))
    changed: dict[str, Any] = {}
    lines = []
    presets = layers(sources, preset)
    for group, option in _choices(presets, overrides, known):
        path = sources.file(f"{group}/{option}")
        is_typed, is_own = (
            any(group_of(text, known) == group for text in overrides),
            path and CONF_DIR not in path.parents,
        )
        if path is None or not (is_typed or is_own):
            continue
        for key, (value, name) in _values(layers(sources, f"{group}/{option}")).items():
            rival = next((layer for layer in reversed(presets) if key in layer.values), None)
            if rival is None or composed.get(key) != rival.values[key] or rival.values[key] == value:
                continue
            if _is_typed(key, typed):
                continue
            if is_typed and is_own:
                changed[key] = value
                lines.append(f"{key}={_show(value)} ({name} over {rival.name})")
            else:
                lines.append(f"{key}={_show(rival.values[key])} ({rival.name} over {name})")
    if changed:
        raw = raw.copy()
        for key, value in changed.items():
            OmegaConf.update(raw, key, value, force_add=True)
    return raw, changed, lines


def layers(sources: Sources, name: str, seen: tuple[str, ...] = ()) -> list[Layer]:
    """The files of a preset or an option in the order in which Hydra merges them, the last one wins; the options of
    groups are left out.
    """
    path = sources.file(name)
    if path is None or name in seen:
        return []
    content = read(path)
    folder, _, _ = name.rpartition("/")
    plain: Any = OmegaConf.to_container(content, resolve=False)
    defaults = plain.pop("defaults", None) or []
    header = next((match[1] for line in path.read_text().splitlines() if (match := _PACKAGE.match(line))), None)
    prefix = "" if header == "_global_" else header or folder.replace("/", ".")
    own = Layer(f"{name}.yaml", path, dict(_flat(plain, f"{prefix}." if prefix else "")))
    found: list[Layer] = []
    for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if entry == "_self_":
            found.append(own)
        elif isinstance(entry, str):
            other = entry.removesuffix(".yaml")
            parent = other[1:] if other.startswith("/") else f"{folder}/{other}" if folder else other
            found += layers(sources, parent, (*seen, name))
    return found


def _choices(presets: list[Layer], overrides: Sequence[str], known: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """(group, option) of every group, from the defaults lists and the command line."""
    found: dict[str, str] = {}
    for layer in presets:
        for entry in read(layer.path).get("defaults") or []:
            if isinstance(entry, DictConfig):
                for key, option in entry.items():
                    group = str(key).removeprefix("override ").lstrip("/").partition("@")[0]
                    if isinstance(option, str):
                        found[group] = option.removesuffix(".yaml")
    for text in overrides:
        typed, options = group_of(text, known), chosen(text)
        if typed and len(options) == 1:
            found[typed] = options[0]
    yield from found.items()


def _values(found: list[Layer]) -> dict[str, tuple[Any, str]]:
    return {key: (value, layer.name) for layer in found for key, value in layer.values.items()}


def _is_typed(key: str, typed: list[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in typed)


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
