"""The JSON schema of presets, for editors: keys, types, allowed values, defaults and comments."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from automodel_lite.cli.line import argument_parser
from automodel_lite.cli.sources import Sources, groups_of, read
from automodel_lite.config import schema as schema_module
from automodel_lite.config.components import own_targets
from automodel_lite.config.rules import OneOf, Range
from automodel_lite.config.signatures import REQUIRED, arguments_of, source_of


def schema(argv: list[str]) -> int:
    """Print the JSON schema of presets, for editors.

    automodel-lite schema > automodel_lite.schema.json
    # yaml-language-server: $schema=automodel_lite.schema.json     (the first line of a preset)
    """
    parser = argument_parser(schema.__doc__)
    parser.add_argument("--config-dir", "-cd", help="a folder of your own presets and options")
    print(json.dumps(json_schema(Sources.of(parser.parse_args(argv).config_dir)), indent=1))
    return 0


_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_TYPES: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
}


def json_schema(sources: Sources) -> dict[str, Any]:
    """Returns the schema of presets. A key that is not in it is a mistake, but for the arguments of
    parts.
    """
    known = groups_of(sources)
    found = _object(schema_module.Config, known, sources)
    enums = {
        group: {"enum": [*options, None]} for group, options in known.items() if "/" not in group
    }
    choices = enums | {f"override {group}": value for group, value in enums.items()}
    found["properties"]["defaults"] = {
        "description": "the preset this one starts from, `override group: option`, and _self_ last",
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"type": "object", "properties": choices}]},
    }
    found["properties"]["hydra"] = {
        "description": "settings of Hydra: --cfg hydra prints them",
        "type": "object",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "automodel_lite",
        **found,
    }


def comments_of(kind: type) -> dict[str, str]:
    """Returns field -> the comment beside it in the source, or inside its brackets."""
    source = source_of(schema_module.__name__)
    assert source
    (node,) = [n for n in source.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__]
    statements = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    return {ast.unparse(statement.target): source.comment_of(statement) for statement in statements}


def _object(kind: type, known: dict[str, list[str]], sources: Sources) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    comments = comments_of(kind)
    properties: dict[str, Any] = {}
    for item in fields(kind):
        hint = hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            properties[item.name] = _object(hint, known, sources)
        elif hint == schema_module.Part:
            properties[item.name] = _part(item.name, known, sources)
        else:
            properties[item.name] = _value(hint)
            if item.default not in (NO_DEFAULT, None, MISSING):
                properties[item.name]["default"] = item.default
        if text := comments.get(item.name):
            properties[item.name]["description"] = text
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "description": kind.__doc__,
    }


def _part(group: str, known: dict[str, list[str]], sources: Sources) -> dict[str, Any]:
    """A part takes the arguments of its `_target_`; those of the options in the group
    are proposed.
    """
    properties: dict[str, Any] = {"_target_": {"type": "string"}}
    for option in known.get(group, []):
        path = sources.file(f"{group}/{option}")
        content = read(path) if path else {}
        for key in content:
            if key not in ("defaults", "_target_"):
                properties.setdefault(str(key), {})
        target = str(content.get("_target_"))
        arguments = arguments_of(target) if target in own_targets() else {}
        for key, argument in arguments.items():
            if key not in properties and not argument.comment:
                continue
            # options of one name may be of several types
            types = properties.get(key, {}).get("anyOf", [])
            types += [kind for kind in _alternatives(_value(argument.hint)) if kind not in types]
            properties[key] = {}
            if argument.comment:
                properties[key]["description"] = argument.comment
                if argument.default is not REQUIRED:
                    properties[key]["default"] = argument.default
            properties[key]["anyOf"] = types
    return {"type": ["object", "null"], "properties": properties}


def _value(hint: Any) -> dict[str, Any]:
    """Returns what a value of this type may be; any text of an interpolation stands for it."""
    if get_origin(hint) is Annotated:
        plain, *rules = get_args(hint)
        value = _value(plain)
        for rule in rules:
            if isinstance(rule, OneOf):
                choices: list[Any] = [*rule.choices]
                choices += [True] if "true" in choices else []  # as YAML reads them
                choices += [False] if "false" in choices else []
                value = {"anyOf": [{"enum": choices}, _INTERPOLATION]}
            elif isinstance(rule, Range):
                bounds = {"minimum": rule.least, "maximum": rule.most}
                bounds |= {"exclusiveMinimum": rule.above, "exclusiveMaximum": rule.below}
                number = next(iter(_alternatives(value)))
                number |= {name: at for name, at in bounds.items() if not math.isnan(at)}
        return value
    if get_origin(hint) in (Union, UnionType):
        return {
            "anyOf": [option for part in get_args(hint) for option in _alternatives(_value(part))]
        }
    if hint in _TYPES:
        own = {"type": _TYPES[hint]}
        return own if hint in (str, type(None)) else {"anyOf": [own, _INTERPOLATION]}
    if (get_origin(hint) or hint) in (list, tuple):
        arguments = get_args(hint)
        return {"type": "array", "items": _value(arguments[0])} if arguments else {"type": "array"}
    return {"type": "object"} if (get_origin(hint) or hint) is dict else {}


def _alternatives(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from value.get("anyOf", [value])
