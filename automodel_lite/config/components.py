"""Parts of a configuration: which code a `_target_` may name, and the object that a block
describes.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NewType

import yaml

from automodel_lite.config.installed import installed_trackers
from automodel_lite.errors import ConfigError, MissingPackageError, did_you_mean, format_value

EXTRAS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("extras.yaml").read_text(encoding="utf-8")
)


def missing_package(wanted_by: str, package: str) -> MissingPackageError:
    """Returns the error with the pip line that brings an optional package."""
    return MissingPackageError(wanted_by, package, EXTRAS[package])


@contextmanager
def naming_package(wanted_by: str) -> Iterator[None]:
    """Turns the import of an optional package that is missing into a ConfigError with its cure."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise missing_package(wanted_by, package) from None


def build(part: Mapping[str, Any], *args: Any, **runtime: Any) -> Any:
    """Calls the part's `_target_` with its constants, then `args` and `runtime`; nested parts are
    built first.

    Plain Python values reach the target, never OmegaConf containers. The signature is checked
    before any work. Raises ConfigError: unknown target or argument, with the closest name.

    >>> build({"_target_": "torch.optim.AdamW", "lr": 1e-3}, model.parameters())
    """
    target = locate(part["_target_"])
    constants = {key: build_nested(value) for key, value in part.items() if key != "_target_"}
    try:
        inspect.signature(target).bind(*args, **constants, **runtime)
    except TypeError as error:
        raise ConfigError(f"{part['_target_']}: {error}.") from None
    return target(*args, **constants, **runtime)


def build_with(part: Mapping[str, Any], **offered: Any) -> Any:
    """`build`, handing over those of the offered objects that the target asks for."""
    wanted = inspect.signature(locate(part["_target_"])).parameters
    return build(part, **{name: value for name, value in offered.items() if name in wanted})


def text_of(part: Mapping[str, Any]) -> str:
    """Returns what a part calls, with all its options: `cosine (warmup_steps 20,
    min_lr_frac 0.0)`.
    """
    options = ", ".join(
        f"{key} {format_value(value)}" for key, value in part.items() if key != "_target_"
    )
    return f"{part['_target_'].rpartition('.')[2]} ({options})"


def build_nested(value: Any) -> Any:
    """Builds the parts inside a value. A function whose first arguments are not given is handed
    over, not called.
    """
    if isinstance(value, dict):
        if "_target_" not in value:
            return {key: build_nested(item) for key, item in value.items()}
        target = locate(value["_target_"])
        constants = {key: item for key, item in value.items() if key != "_target_"}
        parameters = inspect.signature(target).parameters if inspect.isfunction(target) else {}
        first = next(iter(parameters.values()), None)
        if first is not None and first.default is first.empty and first.name not in constants:
            bound = {key: build_nested(item) for key, item in constants.items()}
            if unknown := [key for key in bound if key not in parameters]:
                raise ConfigError(
                    f"{value['_target_']}: got an unexpected keyword argument '{unknown[0]}'."
                )
            return partial(target, **bound) if bound else target
        return build(value)
    if isinstance(value, list):
        return [build_nested(item) for item in value]
    return value


def locate(path: str) -> Callable[..., Any]:
    """Returns the function or class of a dotted path: `torch.optim.AdamW`; of a module that is not
    installed, from the working folder.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (
                module_name == error.name or module_name.startswith(error.name + ".")
            ):
                continue
            with naming_package(path):
                raise
        for name in parts[cut:]:
            if name not in dir(found):
                raise ConfigError(
                    f"_target_={path}: {found.__name__} has no "
                    f"{name}{did_you_mean(name, dir(found))}"
                )
            found = getattr(found, name)
        return found
    here = str(Path.cwd())
    if not {"", here} & {*sys.path}:  # an installed command has its own folder there
        sys.path.append(here)
        return locate(path)
    raise ConfigError(
        f"_target_={path}: there is no module {parts[0]}: install its package, or start from its "
        "folder."
    )


CodePath = NewType("CodePath", str)
"""The type of a setting that names a function, `package.module:function`: it needs the same
permission as a target.
"""
PACKAGE = Path(__file__).resolve().parents[1]
# a wheel carries conf/, recipes/ and the pages of docs/ inside, a checkout beside the package
IS_INSTALLED = (PACKAGE / "conf").is_dir()
CONF_DIR = (PACKAGE if IS_INSTALLED else PACKAGE.parent) / "conf"
DOCS_DIR = CONF_DIR.with_name("docs")


def option(group: str, name: str) -> dict[str, Any]:
    """Returns an option of a group as conf/ has it: what `group=name` is on a command line.

    >>> option("dataset", "toy_chat")
    {'_target_': 'automodel_lite.parts.datasets.toy_chat.ToyChat'}
    """
    text = (CONF_DIR / group / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


_PATH = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")  # no part begins with an underscore
_CODE = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*:[A-Za-z]\w*")
_IN_FILE = re.compile(r"_target_:\s*([\w.]+)")


@lru_cache(maxsize=1)
def own_targets() -> frozenset[str]:
    """Returns every target that an option file of the project names."""
    return frozenset(
        name for path in CONF_DIR.glob("*/*.yaml") for name in _IN_FILE.findall(path.read_text())
    )


def target_problem(path: object, allowed: Sequence[str]) -> str | None:
    """Returns why this target is refused, before anything of it is imported; None when it is
    allowed.
    """
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        return f"_target_={path}: not the dotted path of a function or class."
    is_offered = path in installed_trackers().values()
    if path in own_targets() or is_offered or _is_below(path, allowed):
        return None
    near = difflib.get_close_matches(path, own_targets(), n=1, cutoff=0.8)
    return (
        f"_target_={path} is not allowed{f'; did you mean {near[0]}?' if near else '.'} A "
        "configuration may only call what conf/ names; allow your own code on the command line, "
        f"security.allow_targets=[{path.split('.')[0]}]."
    )


def check_origin(path: str, found: Callable[..., Any], allowed: Sequence[str]) -> None:
    """Raises ConfigError when an allowed path led to foreign code:
    `my_package.module.os.system`.
    """
    origin = f"{found.__module__}.{found.__qualname__}"
    if path in own_targets() or path in installed_trackers().values():
        return
    if not _is_below(origin, allowed):
        raise ConfigError(
            f"_target_={path} is not allowed: it is {origin}, outside {', '.join(allowed)}."
        )


def code_problem(key: str, path: object, allowed: Sequence[str]) -> str | None:
    """Returns why the code that a setting names is refused; None when it is allowed, and is what it
    says it is.

    >>> code_problem("dataset.generator", "os:abort", [])
    'dataset.generator=os:abort names code: allow it on the command line,
    security.allow_targets=[os].'
    """
    if not isinstance(path, str) or not _CODE.fullmatch(path):
        return f"{key}={path} must be package.module:function."
    dotted = path.replace(":", ".")
    if not _is_below(dotted, allowed):
        package = path.partition(":")[0].partition(".")[0]
        return (
            f"{key}={path} names code: allow it on the command line, "
            f"security.allow_targets=[{package}]."
        )
    try:
        found = locate(dotted)
        if not inspect.isroutine(found) and not inspect.isclass(found):
            return f"{key}={path} is not a function."
        check_origin(dotted, found, allowed)
    except ConfigError as error:
        return f"{key}={path}: {str(error).removeprefix('_target_=')}"
    return None


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every node of a plain configuration, containers before what is
    in them.
    """
    yield path, node
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in items:
        yield from walk(value, f"{path}.{key}" if path else str(key))


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every leaf; an empty group is one, and a list."""
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _is_below(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == prefix or path.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)
