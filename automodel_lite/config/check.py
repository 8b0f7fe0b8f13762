"""The check of a configuration before anything is loaded: every problem at once, each with the closest name."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.config.components import (
    CONF_DIR,
    CodePath,
    check_origin,
    code_problem,
    locate,
    own_targets,
    target_problem,
)
from automodel_lite.config.rules import MAX_PART_BYTES
from automodel_lite.config.schema import Config, Part
from automodel_lite.config.signatures import arguments_of, missing_extra, options_of, with_options
from automodel_lite.config.sizes import global_batch_size_of, mesh_shape, slot_multiple_of
from automodel_lite.config.values import value_problems
from automodel_lite.errors import FORMER_KEYS, ConfigError, did_you_mean, shown
from automodel_lite.launched import world_size
from automodel_lite.redact import secret_in

MAX_NAME_BYTES = MAX_PART_BYTES - 55  # files beside the run's folder are named after it
NEEDED = ("dataset", "tokenizer", "packed_sequence", "model", "loss", "optimizer", "lr_scheduler")
SEVERAL = ("logger", "callbacks")  # groups of parts, each under a name
PUBLISHED = ("model.config.", "tokenizer.chat_template")
_FIRST_OPTION = {"model": "pretrained", "dataset": "path", "optimizer": "lr"}


def check_config(raw: DictConfig, extra: type | None = None) -> Config:
    """A composed configuration -> the typed one; raises one ConfigError that lists every problem, a line each.

    extra   the dataclass of a recipe's own keys; None: it has none; dict: they are not looked at

    Finds unknown keys, wrong types, missing values, unset environment variables and broken `${}` before anything is
    loaded.
    """
    raw = OmegaConf.create(with_options(OmegaConf.to_container(raw, resolve=False)))
    if is_dataclass(extra) and isinstance(raw.get("extra", {}), Mapping):
        raw.extra = OmegaConf.merge(OmegaConf.to_container(OmegaConf.structured(extra)), raw.get("extra", {}))
    problems = list(_unresolved(raw))
    if problems:
        former = [key for key in FORMER_KEYS if OmegaConf.select(raw, key, throw_on_missing=False) is not None]
        raise ConfigError("\n".join([*(f"{key}: unknown key{did_you_mean(key, ())}" for key in former), *problems]))
    plain: Any = OmegaConf.to_container(raw, resolve=True)
    of_extra = _extra_problems(plain.get("extra"), extra)
    problems = [*_schema_problems(plain, Config, ""), *of_extra]
    problems.sort(key=lambda line: ": unknown key" not in line)  # typos first
    allowed = OmegaConf.select(raw, "security.allow_targets", throw_on_missing=False) or []
    problems += _target_problems(plain, allowed)
    problems += [*_unsound_values(plain), *_name_problems(plain), *_missing_parts(plain)]
    is_refused = any("_target_" in problem for problem in problems)  # then nothing but our own code is imported
    for key, part in _parts(plain):
        if not is_refused or part["_target_"] in list(own_targets()):
            problems += _part_problems(key, part, allowed)
    if problems:
        raise ConfigError("\n".join([*problems, *_size_problems(plain, problems)]))
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    assert isinstance(config, Config)
    return config


def with_defaults(raw: DictConfig) -> DictConfig:
    """The configuration with the defaults of the schema and of the parts; keys that neither knows stay."""
    plain = with_options(OmegaConf.to_container(raw, resolve=False))
    merged = OmegaConf.merge(OmegaConf.to_container(OmegaConf.structured(Config)), plain)
    assert isinstance(merged, DictConfig)
    return merged


def _unresolved(raw: DictConfig) -> Iterator[str]:
    """Missing values (`???`) and interpolations that do not resolve, each with its key; not those that point to one."""
    missing = [] if "name" in list(raw) else ["name"]
    broken: list[tuple[str, str, str]] = []  # key, value, cause

    def walk(node: Any, literal: Any, prefix: str) -> None:
        for key in node.keys() if isinstance(node, DictConfig) else range(len(node)):
            path = prefix + str(key)
            if literal[key] == "???":
                missing.append(path)
                continue
            try:
                child = node[key]
            except OmegaConfBaseException as error:
                text = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ")
                broken.append((path, str(literal[key]), text.strip('"').rstrip(".")))
                continue
            if OmegaConf.is_config(child) and not isinstance(literal[key], str):
                walk(child, literal[key], f"{path}.")

    walk(raw, OmegaConf.to_container(raw, resolve=False), "")
    yield from (f"{key} has no value: set {key}=..." for key in missing)
    named = [*missing, *(key for key, _, _ in broken)]
    for key, value, cause in broken:
        if not any(f"${{{other}}}" in value for other in named):
            yield f"{key}={value}: {cause}."


def _schema_problems(node: Mapping[str, Any], schema: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(schema, include_extras=True)
    for key, value in node.items():
        path = f"{prefix}{key}"
        if key not in hints:
            leaf, leaf_value = _first_leaf(path, value)
            known = known_keys() if schema is Config or not prefix.startswith("extra.") else known_keys(schema, prefix)
            yield f"{leaf}={shown(leaf_value)}: unknown key{did_you_mean(leaf, known) or '.'}"
        elif is_dataclass(hints[key]):
            if isinstance(value, dict):
                yield from _schema_problems(value, hints[key], f"{path}.")
            else:
                yield f"{path}={shown(value)} is a group of keys: set {path}.{fields(hints[key])[0].name}=..."
        elif hints[key] == Part:
            if not isinstance(value, dict):
                option = _FIRST_OPTION.get(path, "_target_")
                yield f"{path}={shown(value)}: {path} is a part with options, such as {path}.{option}=..."
        else:
            yield from value_problems(path, value, hints[key])


def _extra_problems(values: Any, kind: type | None) -> Iterator[str]:
    """What is wrong with a recipe's own keys."""
    if is_dataclass(kind) and isinstance(values, dict):
        yield from _schema_problems(values, typing.cast(type, kind), "extra.")
    elif kind is None and values:
        leaf, value = _first_leaf("extra", values)
        yield f"{leaf}={shown(value)}: unknown key: this recipe has no keys of its own."


def _size_problems(plain: dict[str, Any], problems: Sequence[str]) -> Iterator[str]:
    """Sizes that do not fit one another or the processes of this job, beside the problems that are known: the keys of
    these count as not set. A dry run answers for other processes.
    """
    wrong = {line.partition("=")[0].partition(":")[0] for line in problems}
    rest = {
        group: {key: value for key, value in plain[group].items() if f"{group}.{key}" not in wrong}
        for group in ("mesh", "training", "packed_sequence")
        if isinstance(plain.get(group), dict)
    }
    try:
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config(name="x")), rest))
    except OmegaConfBaseException:
        return
    size, multiple = (config.packed_sequence.get(key) for key in ("packed_sequence_size", "slot_multiple"))
    checks: list[Callable[[], object]] = []
    if plain.get("dry_run") is not True:
        checks.append(lambda: global_batch_size_of(config.training, mesh_shape(config.mesh, world_size()).dp))
    if isinstance(size, int) and (multiple is None or isinstance(multiple, int)):  # another type is named elsewhere
        checks.append(lambda: slot_multiple_of(size, multiple, config.mesh.cp))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _unsound_values(node: Any, path: str = "") -> Iterator[str]:
    """Values that no key can take: numbers that are not finite or too large for a machine word, zero bytes in a text.

    An infinite number may stand in `model.config`: some families have a limit that is none.
    """
    if isinstance(node, (dict, list)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield from _unsound_values(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, float) and not math.isfinite(node):
        if math.isnan(node) or not path.startswith("model.config."):
            yield f"{path}={node} must be a finite number."
    elif isinstance(node, int) and abs(node) >= 2**63:
        yield f"{path}={node} must be below 2**63."
    elif isinstance(node, str) and "\0" in node:
        yield f"{path}={node!r} contains a zero byte, which is not allowed in texts and paths."
    elif path.startswith(PUBLISHED) and (name := secret_in(str(node))):
        yield f"{path} holds the value of {name}, and this part of the model is exported: remove it."


def _name_problems(plain: dict[str, Any]) -> Iterator[str]:
    if "name" not in plain:
        yield "name has no value: set name=..."
        return
    name = str(plain["name"])
    if not re.fullmatch(r"[\w][\w.,=+@ -]*", name):
        yield f"name={name!r} must be a plain folder name (letters, digits, _-.=+@): set output_dir=... for a path."
    elif len(name.encode()) > MAX_NAME_BYTES:
        yield f"name={name[:20]}... must have at most {MAX_NAME_BYTES} bytes, and has {len(name.encode())}."


def _missing_parts(plain: dict[str, Any]) -> Iterator[str]:
    """Groups that name no code: those that a run cannot be without, `~optimizer`, and options of none, `peft.r=8`."""
    for group in [key for key, hint in typing.get_type_hints(Config).items() if hint == Part and key != "extra"]:
        part = plain.get(group)
        is_part = isinstance(part, dict) and "_target_" in part
        if group in NEEDED and not is_part:
            yield f"{group} has no _target_: choose an option of the group, {group}=... ."
        elif isinstance(part, dict) and (group in SEVERAL or not is_part):
            for name, value in part.items():
                if group not in SEVERAL or not isinstance(value, dict) or "_target_" not in value:
                    yield _stray(group, name, value, [])


def _target_problems(plain: dict[str, Any], allowed: Sequence[str]) -> list[str]:
    """Targets that are not allowed; nothing is imported before this is known."""
    targets = [(key, part["_target_"]) for key, part in _parts(plain)]
    problems = [f"{key}.{text}" for key, path in targets if (text := target_problem(path, allowed))]
    for key, path in targets if not problems else ():
        if path not in own_targets():
            try:
                check_origin(path, locate(path), allowed)
            except ConfigError as error:
                problems.append(f"{key}.{error}")
    return problems


def _part_problems(key: str, part: dict[str, Any], allowed: Sequence[str]) -> Iterator[str]:
    """Arguments that the part's target does not take, or takes as another type. Nothing of ours is imported for it."""
    path = part["_target_"]
    try:
        if missing_extra(path):
            locate(path)  # its error says what to install
        arguments = arguments_of(path)
    except ConfigError as error:
        text = str(error)
        if text.startswith(f"{path} needs the package"):
            text = f"{key}{text.removeprefix(path)}"
        yield text if text.startswith(key) else f"{key}.{text}"
        return
    for name, value in part.items():
        hint = arguments[name].hint if name in arguments else None
        if name == "_target_" or (name not in arguments and "**" in arguments):
            continue
        if name not in arguments:
            yield _stray(key, name, value, [f"{key}.{argument}" for argument in arguments])
        elif CodePath in (hint, *typing.get_args(hint)) and value is not None:
            if problem := code_problem(f"{key}.{name}", value, allowed):
                yield problem
        elif not (isinstance(value, dict) and "_target_" in value):
            yield from value_problems(f"{key}.{name}", value, hint)


def _stray(key: str, name: str, value: Any, options: Sequence[str]) -> str:
    """The sentence for an argument that the chosen option does not take; another one of the group may."""
    path = f"{key}.{name}"
    if near := did_you_mean(path, options):
        return f"{path}={shown(value)}: unknown key{near}"
    texts = {file.stem: file.read_text() for file in sorted((CONF_DIR / key).glob("*.yaml"))}
    takers = [
        f"{key}={option}"
        for option, text in texts.items()
        if re.search(rf"^{re.escape(name)}:", text, re.MULTILINE)
        or any(name in options_of(target) for target in re.findall(r"^\s*_target_:\s*([\w.]+)", text, re.MULTILINE))
    ]
    if takers:
        return f"{path}={shown(value)} is an option of {' or '.join(takers)}: choose that, or remove it, ~{path}."
    return f"{path}={shown(value)}: unknown key; if the preset sets it, ~{path} removes it."


def _parts(node: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every block with a `_target_`, with its key."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield prefix, node
        for key, value in node.items():
            yield from _parts(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _parts(value, f"{prefix}.{index}")


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every key of a schema, dotted: `training.max_steps`."""

    def walk(schema: type, prefix: str) -> Iterator[str]:
        for name, hint in typing.get_type_hints(schema).items():
            yield prefix + name
            if is_dataclass(hint):
                yield from walk(typing.cast(type, hint), f"{prefix}{name}.")

    return list(walk(schema, prefix))


def _first_leaf(path: str, value: Any) -> tuple[str, Any]:
    """`optimizr`, {"lr": 1} -> `optimizr.lr`, 1: the key as it was typed."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path, value
