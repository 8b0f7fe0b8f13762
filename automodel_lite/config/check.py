"""The check of a configuration before anything is loaded: every problem at once, each with the
closest name.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.config.components import (
    CONF_DIR,
    CodePath,
    check_origin,
    code_problem,
    flatten,
    locate,
    missing_package,
    own_targets,
    target_problem,
    walk,
)
from automodel_lite.config.foreign import elsewhere
from automodel_lite.config.rules import RULES, OneOf, Only
from automodel_lite.config.schema import Config, Part
from automodel_lite.config.signatures import arguments_of, missing_extra, options_of, with_options
from automodel_lite.errors import (
    ConfigError,
    IdleSettingError,
    MissingPackageError,
    UnknownKeyError,
    format_value,
    meant,
    nearest,
)
from automodel_lite.redact import secret_in

NEEDED = ("dataset", "tokenizer", "packed_sequence", "model", "loss", "optimizer", "lr_scheduler")
SEVERAL = ("logger", "callbacks")  # groups of parts, each under a name
PUBLISHED = ("model.config.", "tokenizer.chat_template")
_LISTS = (list, tuple, Sequence)
_GROUPS = (dict, Mapping)
_UNIONS = (typing.Union, types.UnionType)
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
_FIRST_OPTION = {"model": "pretrained", "dataset": "path", "optimizer": "lr"}


def check_config(raw: DictConfig, extra: type | None = None) -> Config:
    """Turns a composed configuration into the typed one; raises one ConfigError with every problem,
    a line each.

    extra   the dataclass of a recipe's own keys; None: it has none; dict: they are not looked at

    Finds unknown keys, wrong types, missing values, unset environment variables and broken `${}`
    before anything is loaded.
    """
    raw = OmegaConf.create(with_options(OmegaConf.to_container(raw)))
    if is_dataclass(extra) and isinstance(raw.get("extra", {}), Mapping):
        raw.extra = OmegaConf.merge(
            OmegaConf.to_container(OmegaConf.structured(extra)), raw.get("extra", {})
        )
    plain, unresolved = known_values(raw)
    problems = list(_schema_problems(plain, Config, ""))
    if is_dataclass(extra) and isinstance(plain.get("extra"), dict):
        problems += _schema_problems(plain["extra"], extra, "extra.")
    elif extra is None and plain.get("extra"):
        leaf, value = _first_leaf("extra", plain["extra"])
        text = f"{leaf}={format_value(value)}: unknown key: this recipe has no keys of its own."
        problems.append(UnknownKeyError(text, key=leaf))
    # typos first: what is missing may be there under a misspelled name
    problems.sort(key=lambda problem: not isinstance(problem, UnknownKeyError))
    num_typos = sum(isinstance(problem, UnknownKeyError) for problem in problems)
    problems[num_typos:num_typos] = unresolved
    allowed = OmegaConf.select(raw, "security.allow_targets") or []
    parts = [
        (key, node) for key, node in walk(plain) if isinstance(node, dict) and "_target_" in node
    ]
    refused = _target_problems(parts, allowed)
    problems += refused
    exchange = OmegaConf.select(raw, "mesh.cp_exchange")
    if ":" in str(exchange) and (code := code_problem("mesh.cp_exchange", exchange, allowed)):
        problems.append(ConfigError(code, key="mesh.cp_exchange"))
    problems += [*_unsound_values(plain), *_missing_parts(plain)]
    # then nothing but our own code is imported
    for key, part in parts:
        if not refused or part["_target_"] in list(own_targets()):
            problems += _part_problems(key, part, allowed)
    if problems:
        raise ConfigError.of(problems)
    config = Config()
    _set_values(config, plain)
    return config


def _set_values(group: Any, values: Mapping[str, Any]) -> None:
    """Sets values, which were checked, in a group: an int may stand for a float.

    OmegaConf, which checks each once more, takes half of a whole check.
    """
    for key, value in values.items():
        default = getattr(group, key)
        if is_dataclass(default):
            _set_values(default, value)
        else:
            setattr(group, key, float(value) if isinstance(default, float) else value)


def known_values(raw: DictConfig) -> tuple[dict[str, Any], list[ConfigError]]:
    """Returns the values that resolve, and a problem for each of the others: what is missing hides
    nothing of the rest.
    """
    unresolved = _unresolved(raw)
    if not unresolved:
        plain: Any = OmegaConf.to_container(raw, resolve=True)
        return plain, []
    known = OmegaConf.create(_without(OmegaConf.to_container(raw), unresolved))
    plain = OmegaConf.to_container(known, resolve=True)
    return plain, [problem for problem in unresolved.values() if problem is not None]


def _without(node: Any, keys: Container[str], path: str = "") -> Any:
    """Returns a plain configuration without the nodes at these paths, which are those of `walk`."""
    if isinstance(node, list):
        items = {place: (f"{path}.{place}", value) for place, value in enumerate(node)}
    elif isinstance(node, dict):
        items = {key: (f"{path}.{key}".lstrip("."), value) for key, value in node.items()}
    else:
        return node
    kept = {
        key: _without(value, keys, place)
        for key, (place, value) in items.items()
        if place not in keys
    }
    return kept if isinstance(node, dict) else [*kept.values()]


def _unresolved(raw: DictConfig) -> dict[str, ConfigError | None]:
    """Returns the keys of missing values (`???`) and of interpolations that do not resolve, each
    with its problem; None for one that points to another of them.
    """
    literal: Any = OmegaConf.to_container(raw)
    missing = [key for key, value in walk(literal) if value == "???"]
    missing += [] if "name" in literal else ["name"]
    broken: dict[str, str] = {}  # key -> `value: cause`
    for key, value in walk(literal):
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.select(raw, key)
            except OmegaConfBaseException as error:
                cause = (
                    str(error)
                    .splitlines()[0]
                    .removeprefix("KeyError raised while resolving interpolation: ")
                )
                broken[key] = f"{value}: {cause.strip(chr(34)).rstrip('.')}."
    found: dict[str, ConfigError | None] = dict.fromkeys(broken)
    for key in missing:
        found[key] = ConfigError(f"{key} has no value: set {key}=...", key=key)
    named = [*missing, *broken]
    roots = [
        key
        for key, text in broken.items()
        if not any(f"${{{name}}}" in text for name in named if name != key)
    ]
    # in a circle each points to another
    for key in roots or ([] if missing else broken):
        found[key] = ConfigError(f"{key}={broken[key]}", key=key)
    return found


def _schema_problems(node: Mapping[str, Any], schema: type, prefix: str) -> Iterator[ConfigError]:
    """Yields what is wrong with the keys of a group and of the groups inside it: unknown ones, and
    values of another kind.

    prefix  of their paths, `mesh.`
    """
    hints = typing.get_type_hints(schema, include_extras=True)
    for key, value in node.items():
        path = f"{prefix}{key}"
        if key not in hints:
            leaf, leaf_value = _first_leaf(path, value)
            # `extra` is a recipe's own group: the keys of Config are none of it
            if prefix.startswith("extra."):
                near = nearest(leaf, known_keys(schema, prefix))
            else:
                near = _nearest_key(leaf, [*known_keys(), *_options(node)])
            text = f"{leaf}={format_value(leaf_value)}: unknown key{meant(near)}"
            yield UnknownKeyError(text, key=leaf)
            continue
        is_group = is_dataclass(hints[key])
        if not is_group and hints[key] != Part:
            yield from value_problems(path, value, hints[key])
        elif not isinstance(value, dict):
            given = f"{path}={format_value(value)}"
            if is_group:
                example = fields(hints[key])[0].name
                yield ConfigError(f"{given} is a group of keys: set {path}.{example}=...", key=path)
            else:
                option = _FIRST_OPTION.get(path, "_target_")
                text = f"{given}: {path} is a part with options, such as {path}.{option}=..."
                yield ConfigError(text, key=path)
        elif is_group:
            yield from _schema_problems(value, hints[key], f"{path}.")
    declared = {setting.name: (hints[setting.name], setting.default) for setting in fields(schema)}
    yield from _idle_problems(node, prefix, declared)


def _options(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options of the chosen parts: `peft.r`."""
    for key, part in walk(config):
        if key and isinstance(part, dict) and "_target_" in part:
            yield from (f"{key}.{name}" for name in {**part, **options_of(str(part["_target_"]))})


def key_of(path: str, known: Sequence[str] = ()) -> str | None:
    """Returns the key that is called so elsewhere (foreign.yaml), or that ends so, underscores
    aside: `maxsteps` -> training.max_steps.

    known   options of parts, which are looked at too
    """
    last = f".{path}".replace("_", "")
    ours = (key for key in [*known_keys(), *known] if f".{key}".replace("_", "").endswith(last))
    name = path.rpartition(".")[2]
    return elsewhere().get(path) or elsewhere().get(name) or next(ours, None)


def _nearest_key(path: str, known: Sequence[str]) -> str | None:
    """Returns the key that is called so elsewhere, or the one with the closest name."""
    found = key_of(path, known)
    return found if found not in (None, path) else nearest(path, known)


def _unsound_values(plain: dict[str, Any]) -> Iterator[ConfigError]:
    """Values that no key can take; an infinite one may stand in `model.config`, as a limit that is
    none.
    """
    for path, value in walk(plain):
        if isinstance(value, float) and not math.isfinite(value):
            if math.isnan(value) or not path.startswith("model.config."):
                yield ConfigError(f"{path}={value} must be a finite number.", key=path)
        elif isinstance(value, int) and abs(value) >= 2**63:
            yield ConfigError(f"{path}={value} must be below 2**63.", key=path)
        elif isinstance(value, str) and "\0" in value:
            text = f"{path}={value!r} contains a zero byte"
            yield ConfigError(f"{text}, which is not allowed in texts and paths.", key=path)
        elif (
            path.startswith(PUBLISHED)
            and not isinstance(value, (dict, list))
            and (name := secret_in(str(value)))
        ):
            text = f"{path} holds the value of {name}, and this part of the model is exported"
            yield ConfigError(text, key=path, cure="remove it")


def _missing_parts(plain: dict[str, Any]) -> Iterator[ConfigError]:
    """Groups that name no code: those that a run cannot be without, `~optimizer`, and options of
    none, `peft.r=8`.
    """
    for group, hint in typing.get_type_hints(Config).items():
        if hint != Part or group == "extra":
            continue
        part = plain.get(group)
        is_part = isinstance(part, dict) and "_target_" in part
        if group in NEEDED and not is_part:
            text = f"{group} has no _target_: choose an option of the group, {group}=... ."
            yield ConfigError(text, key=group)
        elif isinstance(part, dict) and (group in SEVERAL or not is_part):
            for name, value in part.items():
                if group not in SEVERAL or not isinstance(value, dict) or "_target_" not in value:
                    chosen = [*_options({group: part})] if group in SEVERAL else []
                    yield _unknown_argument(group, name, value, chosen)


def _target_problems(
    parts: list[tuple[str, dict[str, Any]]], allowed: Sequence[str]
) -> list[ConfigError]:
    """Targets that are not allowed; nothing is imported before this is known."""
    targets = [(key, part["_target_"]) for key, part in parts]
    problems = []
    for key, path in targets:
        refusal = target_problem(path, allowed)
        if refusal:
            problems.append(ConfigError(f"{key}.{refusal}", key=f"{key}._target_"))
    if problems:
        return problems
    for key, path in targets:
        if path not in own_targets():
            try:
                check_origin(path, locate(path), allowed)
            except ConfigError as error:
                problems.append(ConfigError(f"{key}.{error}", key=f"{key}._target_"))
    return problems


def _part_problems(key: str, part: dict[str, Any], allowed: Sequence[str]) -> Iterator[ConfigError]:
    """Arguments that the part's target does not take, or takes as another type. Nothing of ours is
    imported for it.
    """
    path = part["_target_"]
    try:
        if missing_extra(path):
            locate(path)  # its error says what to install
        arguments = arguments_of(path)
    except MissingPackageError as error:
        yield missing_package(key, error.package)
        return
    except ConfigError as error:
        # a part's own sentence names the key
        yield error if error.key else ConfigError(f"{key}.{error}", key=key)
        return
    for name, value in part.items():
        hint = arguments[name].hint if name in arguments else None
        if name == "_target_" or (name not in arguments and "**" in arguments):
            continue
        if name not in arguments:
            yield _unknown_argument(
                key, name, value, [f"{key}.{argument}" for argument in arguments]
            )
        elif CodePath in (hint, *typing.get_args(hint)) and value is not None:
            if problem := code_problem(f"{key}.{name}", value, allowed):
                yield ConfigError(problem, key=f"{key}.{name}")
        elif not (isinstance(value, dict) and "_target_" in value):
            yield from value_problems(f"{key}.{name}", value, hint)
    declared = {name: (argument.hint, argument.default) for name, argument in arguments.items()}
    yield from _idle_problems(part, f"{key}.", declared)


def _idle_problems(
    group: Mapping[str, Any], prefix: str, declared: Mapping[str, tuple[Any, Any]]
) -> Iterator[IdleSettingError]:
    """Yields the settings of a group that differ from their defaults, and that do nothing beside
    the others.

    declared  (hint, default) by name
    """
    for name, value in group.items():
        hint, default = declared.get(name, (None, value))
        if value == default:
            continue
        for rule in getattr(hint, "__metadata__", ()):
            problem = rule.problem_beside(group, prefix) if isinstance(rule, Only) else None
            if problem:
                text = f"{prefix}{name}={format_value(value)} {problem}"
                yield IdleSettingError(text, key=f"{prefix}{name}")


def _unknown_argument(key: str, name: str, value: Any, options: Sequence[str]) -> ConfigError:
    """Returns the sentence for an argument that the chosen option does not take; another one of the
    group may.
    """
    path = f"{key}.{name}"
    value = format_value(value)
    if near := _nearest_key(path, options):
        return UnknownKeyError(f"{path}={value}: unknown key{meant(near)}", key=path)
    takers = []
    for file in sorted((CONF_DIR / key).glob("*.yaml")):
        of_file = _options({key: yaml.safe_load(file.read_text())})
        if any(name in option.split(".") for option in of_file):
            takers.append(f"{key}={file.stem}")
    if takers:
        text = (
            f"{path}={value} is an option of {' or '.join(takers)}: choose that, or remove it, "
            f"~{path}."
        )
        return ConfigError(text, key=path)
    text = f"{path}={value}: unknown key; if the preset sets it, ~{path} removes it."
    return UnknownKeyError(text, key=path)


def known_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Yields every key of a schema, dotted: `training.max_steps`."""
    for name, hint in typing.get_type_hints(schema).items():
        yield prefix + name
        if is_dataclass(hint):
            yield from known_keys(typing.cast(type, hint), f"{prefix}{name}.")


def _first_leaf(path: str, value: Any) -> tuple[str, Any]:
    """`optimizr`, {"lr": 1} -> `optimizr.lr`, 1: the key as it was typed."""
    return next(flatten(value, path))


def value_problems(path: str, value: Any, hint: Any) -> Iterator[ConfigError]:
    """Yields what is wrong with a value: its type, or a rule that stands in the type; of a number
    in quotes, that it is a text.
    """
    problems = list(_own_problems(path, value, hint))
    plain = _unquoted(value)
    if problems and plain != value and matches(plain, hint):
        # what is wrong with the number itself comes first: quotes or not, it is refused
        problems = list(_own_problems(path, plain, hint)) or [_quoted_problem(path, value, plain)]
    yield from problems


def _own_problems(path: str, value: Any, hint: Any) -> Iterator[ConfigError]:
    """Yields what is wrong with a value as it stands."""
    if not matches(value, hint):
        choices = [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, OneOf)]
        wanted = choices[0] if choices else describe(hint)
        shown = format_value(value)
        if not choices and isinstance(value, int | float) and matches("", hint):
            # of a float it is not known how it was typed: 1e5 is 100000.0 here
            typed = "..." if isinstance(value, float) else shown
            what = "what was typed" if isinstance(value, float) else "it"
            wanted = f"{wanted}: quote {what}, \"{path}='{typed}'\""
        # one of several, typed as it is
        if isinstance(value, str) and matches([value], hint):
            wanted = f'{wanted}: put it into brackets, "{path}=[{shown}]"'
        yield ConfigError(f"{path}={shown} must be {wanted}.", key=path)
        return
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Annotated:
        # other libraries annotate, too
        texts = [rule.problem(value) for rule in args[1:] if isinstance(rule, RULES)]
        for text in filter(None, texts):
            yield ConfigError(f"{path}={format_value(value)} must be {text}", key=path)
        yield from _own_problems(path, value, args[0])
    elif origin in _UNIONS:
        yield from _own_problems(path, value, next(arg for arg in args if matches(value, arg)))
    elif origin in _LISTS:
        for index, item in enumerate(value):
            yield from _own_problems(f"{path}.{index}", item, args[0])
    elif origin in _GROUPS:
        for key, item in value.items():
            yield from value_problems(f"{path}.{key}", item, args[1])


def _quoted_problem(path: str, value: Any, plain: Any) -> ConfigError:
    """Returns the sentence for `plain`, a number, a truth value or null, or a list of them, that
    came in quotes as `value`.
    """
    items = value if isinstance(value, list) else [value]
    plain_items = plain if isinstance(plain, list) else [plain]
    text, kind = next(pair for pair in zip(items, plain_items, strict=True) if pair[0] != pair[1])
    is_word = kind is None or isinstance(kind, bool)
    is_what = f"not {format_value(kind)}" if is_word else "not a number"
    has = "is" if text is value else "holds"
    typed = ",".join(str(item).strip() for item in items)
    typed = f"[{typed}]" if isinstance(value, list) else typed
    told = (
        f"{path} {has} the text '{text}', {is_what}: unquote it, {path}={typed}; "
        f"from the environment, '{path}=\"${{oc.decode:${{oc.env:NAME}}}}\"'."
    )
    return ConfigError(told, key=path)


_WORDS = {"true": True, "false": False, "null": None}


def _unquoted(value: Any) -> Any:
    """Returns what a text is without its quotes, a number, a truth value or null, or a list of
    such; any other value as it is.
    """
    if isinstance(value, list):
        return [_unquoted(item) for item in value]
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return value


def matches(value: Any, hint: Any) -> bool:
    """Returns whether a YAML value fits a type annotation: an int serves as a float, a block as an
    object.
    """
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in _UNIONS:
        return any(matches(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin is Annotated:
        return matches(value, args[0])
    if hint in _NAMES:
        kind = (int, float) if hint is float else hint
        return isinstance(value, kind) and (hint is bool or not isinstance(value, bool))
    if (origin or hint) in _LISTS:
        kind = args[0] if args else Any
        return isinstance(value, (list, tuple)) and all(matches(item, kind) for item in value)
    if (origin or hint) in _GROUPS:
        kind = args[1] if args else Any
        return isinstance(value, dict) and all(matches(x, kind) for x in value.values())
    is_object = inspect.isclass(hint) and hint not in (object, Any)
    return not (is_object and isinstance(value, dict)) or "_target_" in value


def describe(hint: Any) -> str:
    """Returns a type annotation in words, without its rules: `int | None` ->
    `a whole number or null`.
    """
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Annotated:
        return describe(args[0])
    if origin in _UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if (origin or hint) in _LISTS:
        item = args[0] if args else None
        item = typing.get_args(item)[0] if typing.get_origin(item) is Annotated else item
        of: dict[Any, str] = {int: " of whole numbers", float: " of numbers", str: " of texts"}
        return f"a list{of.get(item, '')}"
    if (origin or hint) in _GROUPS:
        return "a group of keys"
    return _NAMES.get(hint, "a block with a _target_")
