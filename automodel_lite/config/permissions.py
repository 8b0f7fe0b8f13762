"""What a configuration file may not do without a word on the command line: it may be a stranger's.

A file grants no permission, names no place that results are sent to, and takes from the environment
nothing but numbers and paths of this machine. A value counts as typed when the command line sets
it, or a group of keys around it; to choose an option of a group (`model=pretrained`) is to take
another file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from automodel_lite.config.components import flatten, walk
from automodel_lite.config.installed import installed_trackers
from automodel_lite.errors import ConfigError, printable

_GRANT = re.compile(r"security\.allow_\w+|(.+\.)?(trust_remote_code|allow_remote)")
_PLACE = re.compile(r"hub\.push|(logger|callbacks)\..+\.(tracking_uri|entity|space_id)")
_FOLDERS = ("output_dir", "cache_dir")
_PATH_KEY = re.compile(
    r"model\.pretrained|teacher\.pretrained|loss\.teacher|tokenizer\.path"
    r"|peft\.adapter|dataset\.(sources\.[^.]+\.dataset\.)?(path|val_path)(\.[^.]+)?"
)
_LOCAL_PATH = re.compile(r"(/|\./|\.\./|~)(?!.*(://|::))", re.DOTALL)
_MOST_LEVELS = 64
_MOST_VALUES = 100_000

IsTyped = Callable[[str], bool]
_names_read: list[str] = []


def _env(*args: Any) -> Any:
    _names_read.append(str(args[0]))
    return oc.env(*args)


# As OmegaConf's own, and says which variables a value was made of, however it refers to them.
# In 2.4 `register_new_resolver` has the name of one that took no `replace` before
_takes_replace = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
register_resolver: Any = (
    OmegaConf.register_resolver if _takes_replace else OmegaConf.register_new_resolver
)
register_resolver("oc.env", _env, replace=True)


def permission_problems(raw: DictConfig, is_typed: IsTyped) -> Iterator[str]:
    """Yields a sentence for each permission that a file grants, and each place that it sends
    results to: of a tracker of an installed package any setting may name one.
    """
    offered = installed_trackers()
    plain = OmegaConf.to_container(raw)
    for name, part in walk(plain):
        if isinstance(part, dict) and part.get("_target_") in offered.values():
            for key, value in flatten(part, name):
                if not key.endswith("._target_") and not is_typed(key):
                    yield (
                        f"{key}={value} is set in a file, but only the command line may set a "
                        f"tracker of an installed package: {key}=... ."
                    )
    for key, value in flatten(plain):
        if value and needs_the_command_line(key) and not is_typed(key):
            yield f"{key} is set in a file, but only the command line may set it: {key}=... ."


def needs_the_command_line(key: str) -> bool:
    """Returns whether no file may set this key."""
    return bool(_GRANT.fullmatch(key) or _PLACE.fullmatch(key))


def environment_problems(raw: DictConfig, is_typed: IsTyped) -> Iterator[str]:
    """Yields a sentence for each value that a file takes from the environment and that may leave
    this machine: an address, a hub name, a tracker's settings, any text.

    Numbers are let through, and paths of this machine where a path is asked for. What does not
    resolve is left to `check_config`. Raises ConfigError as `check_references` does.
    """
    check_references(OmegaConf.to_container(raw))
    allowed = set(OmegaConf.select(raw, "security.allow_env", default=None) or ())
    found = [*_made_of_variables(raw)]
    # a file may say that the tokenizer is the typed model's
    typed = [value for key, value, _ in found if is_typed(key) and _PATH_KEY.fullmatch(key)]
    for key, value, names in found:
        is_number = value is None or isinstance(value, (bool, int, float))
        is_folder = key in _FOLDERS and "://" not in str(value)
        is_path = isinstance(value, str) and _LOCAL_PATH.match(value) and _PATH_KEY.fullmatch(key)
        if is_number or is_folder or is_path or is_typed(key) or value in typed:
            continue
        if read := sorted(names - allowed):
            yield (
                f"{key} is set in a file to the environment's {', '.join(read)}, which may leave "
                f"this machine: type {key}=... on the command line, or allow it there, "
                f"security.allow_env=[{','.join(read)}]."
            )


def check_yaml(path: Path) -> None:
    """Raises ConfigError for a file whose anchors stand for more than it could hold itself: a
    kilobyte of nine levels is a billion values. What cannot be read is left to its reader.
    """
    is_large = False
    with suppress(OSError, ValueError, yaml.YAMLError):
        text = path.read_bytes()
        try:
            is_large = _is_large(yaml.parse(text, Loader=yaml.CSafeLoader))
        except yaml.YAMLError:
            # Some versions of libyaml refuse many brackets before they hand on the first one; the
            # reader has no such limit.
            is_large = _is_large(yaml.parse(text, Loader=yaml.SafeLoader))
    if is_large:
        raise ConfigError(
            f"{path} stands for over {_MOST_VALUES:,} values, or brackets too deep to read: it is "
            "no file of settings."
        )


def check_references(tree: Any) -> None:
    """Raises ConfigError for references (`${a}`) that stand for more than a configuration could
    hold itself: ten in each of nine values are a billion texts. Nothing is resolved.
    """
    sizes = _References(tree)
    total = 0
    for key, value in walk(sizes.tree):
        if isinstance(value, str) and "${" in value:
            total += sizes.of_node(tuple(key.split(".")), value)
            if total > _MOST_VALUES:
                raise ConfigError(
                    f"{printable(key[:80])} and the references in it stand for over "
                    f"{_MOST_VALUES:,} characters, or for others over {_MOST_LEVELS} deep: write "
                    "its value instead."
                )


class _References:
    """How many characters the values of a configuration have once they are resolved, at least."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.known: dict[tuple[str, ...], int] = {}

    def of_node(self, path: tuple[str, ...], node: Any, level: int = 0) -> int:
        """Returns the size of a value, or of all inside it; that of one around itself is no
        size: it does not resolve.
        """
        if path in self.known:
            return self.known[path]
        if level > _MOST_LEVELS:
            return _MOST_VALUES + 1
        self.known[path] = 0
        size = 1
        if isinstance(node, str):
            size += len(node)
            for target in _targets(node, path):
                found = self._at(target)
                if found is not None:
                    size += self.of_node(target, found, level + 1)
        elif isinstance(node, (dict, list)):
            inner = node.items() if isinstance(node, dict) else enumerate(node)
            for name, value in inner:
                size += self.of_node((*path, str(name)), value, level + 1)
        self.known[path] = min(size, _MOST_VALUES + 1)
        return self.known[path]

    def _at(self, path: tuple[str, ...]) -> Any:
        node = self.tree
        for name in path:
            if isinstance(node, dict):
                node = {str(key): value for key, value in node.items()}.get(name)
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        return node


_NAMED = re.compile(r"[\w.\[\]-]+")


def _targets(text: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields what the references of a text name, also as arguments of a function
    (`${oc.select:a.b}`); raises ConfigError for a name that is made of another reference.

    >>> [*_targets("${a.b}-${.c}", ("x", "y"))]
    [('a', 'b'), ('x', 'c')]
    """
    for outer in re.finditer(r"\$\{([^:{}]*)\$\{|\$\{\s*oc\.(?:select|dict)[^{}]*\$\{", text):
        raise ConfigError(
            f"{printable('.'.join(path)[:80])}: {printable(outer[0][:80])} makes the name of a "
            "reference of another one, whose size nobody can count: write the name."
        )
    for piece in text.split("${")[1:]:
        for name in _NAMED.findall(piece.partition("}")[0]):
            parts = tuple(name.lstrip(".").replace("[", ".").replace("]", "").split("."))
            num_up = len(name) - len(name.lstrip("."))
            yield (*path[: len(path) - num_up], *parts) if num_up else parts


def _is_large(events: Iterable[yaml.Event]) -> bool:
    """Returns whether a file stands for too many values, or has too many levels; reads no further
    than that.
    """
    sizes: dict[str, int] = {}  # of what an anchor stands for
    open_ones: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, values so far)
    for event in events:
        anchor = getattr(event, "anchor", None)
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_ones.pop()
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(anchor or "", _MOST_VALUES)  # of one around it
            anchor = None
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        if anchor is not None and size:
            sizes[anchor] = size
        open_ones[-1] = (open_ones[-1][0], open_ones[-1][1] + size)
        if open_ones[-1][1] > _MOST_VALUES or len(open_ones) > _MOST_LEVELS:
            return True
    return False


def _made_of_variables(
    node: Any, path: str = "", level: int = 0
) -> Iterator[tuple[str, Any, set[str]]]:
    """Yields (key, value, names of variables) of the values that variables were read for."""
    names: Any = node if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        key = f"{path}.{name}" if path else str(name)
        _names_read.clear()
        try:
            value = node[name]
        except OmegaConfBaseException:
            continue
        if _names_read:
            yield key, value, set(_names_read)
        elif isinstance(value, (DictConfig, ListConfig)) and level < _MOST_LEVELS:
            yield from _made_of_variables(value, key, level + 1)
