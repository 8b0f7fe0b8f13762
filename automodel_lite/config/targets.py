"""What a configuration may call: a `_target_` is code, and a preset may come from a stranger.

Allowed is what the project's own option files name (conf/*/*.yaml), and what the command line allows by
`security.allow_targets=[my_package]`. Files cannot allow anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from automodel_lite.errors import ConfigError

PREFIXES = ("torch.optim",)  # beside what conf/ names
_PACKAGE = Path(__file__).resolve().parents[1]
IS_INSTALLED = (_PACKAGE / "conf").is_dir()  # a wheel carries conf/ and recipes/ inside, a checkout beside the package
CONF_DIR = (_PACKAGE if IS_INSTALLED else _PACKAGE.parent) / "conf"
_PATH = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")  # no part begins with an underscore
_IN_FILE = re.compile(r"_target_:\s*([\w.]+)")


@lru_cache(maxsize=1)
def own_targets() -> frozenset[str]:
    """Every target that an option file of the project names."""
    return frozenset(name for path in CONF_DIR.glob("*/*.yaml") for name in _IN_FILE.findall(path.read_text()))


def target_problem(path: object, allowed: Sequence[str]) -> str | None:
    """Why this target is refused, before anything of it is imported; None when it is allowed."""
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        return f"_target_={path}: not the dotted path of a function or class."
    if path in own_targets() or _is_below(path, (*PREFIXES, *allowed)):
        return None
    near = difflib.get_close_matches(path, own_targets(), n=1, cutoff=0.8)
    return (
        f"_target_={path} is not allowed{f'; did you mean {near[0]}?' if near else '.'} A configuration may only call "
        f"what conf/ names; allow your own code on the command line, security.allow_targets=[{path.split('.')[0]}]."
    )


def check_origin(path: str, found: Callable[..., Any], allowed: Sequence[str]) -> None:
    """Raises ConfigError when an allowed path led to foreign code: `my_package.module.os.system`."""
    origin = f"{found.__module__}.{found.__qualname__}"
    if path not in own_targets() and not _is_below(origin, (*PREFIXES, *allowed)):
        raise ConfigError(
            f"_target_={path} is not allowed: it is {origin}, outside of {', '.join((*PREFIXES, *allowed))}."
        )


def _is_below(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == prefix or path.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)
