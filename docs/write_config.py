"""Writes docs/config.md from the schema (automodel_lite/config/schema.py) and the groups and
presets (conf/).

python docs/write_config.py            (--check: exit with 1 when it is stale)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import MISSING as REQUIRED

from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.config import schema
from automodel_lite.config.check import describe
from automodel_lite.config.components import CONF_DIR
from automodel_lite.config.signatures import arguments_of, options_of
from automodel_lite.errors import format_value
from automodel_lite.extras.cli.schema import comments_of

PAGE = Path(__file__).resolve().parent / "config.md"
INTRODUCTION = """\
# Configuration reference

Written by `python docs/write_config.py` from `automodel_lite/config/schema.py` and `conf/`: do not
edit.

A preset (`--config-name`) chooses one option of each group and sets a few values. Everything can be
overridden on the command line without a `+`: `group=option` chooses, `group.key=value` sets.
`--cfg job` prints the whole configuration. Presets and options of your own are found in any folder
named by `--config-dir`, laid out like `conf/`.

*Resumable* settings do not shape the numbers: a run may continue with other values. Other changes
have to be accepted (`checkpoint.accept_changes=true`). Resumable as well are the groups {groups}.
"""


def page() -> str:
    """The whole of docs/config.md."""
    groups = [name for name, hint in get_type_hints(schema.Config).items() if hint == schema.Part]
    resumable = ", ".join(f"`{name}`" for name in schema.resumable_settings() if name in groups)
    parts = [
        INTRODUCTION.format(groups=resumable),
        "## Presets\n",
        _table(("preset", "what it is"), _presets()),
    ]
    parts += ["\n## Settings of the schema\n", *_sections()]
    parts.append("\n## Groups\n")
    for group, options in groups_of(Sources()).items():
        choices = ", ".join(f"`{option}`" for option in options)
        parts.append(f"\n### `{group}`: {choices}\n")
        parts += [_option(group, option) for option in options]
    return "\n".join(parts).rstrip() + "\n"


def _presets() -> Iterator[tuple[str, str]]:
    for name in presets_of(Sources()):
        yield f"`{name}`", _comment_and_body(CONF_DIR / f"{name}.yaml")[0]


def _sections() -> Iterator[str]:
    """A table for the top level, then one for each group of keys."""
    hints = get_type_hints(schema.Config)
    plain = [name for name, hint in hints.items() if not is_dataclass(hint) and hint != schema.Part]
    yield _schema_table(schema.Config, "", plain)
    for name, hint in hints.items():
        if is_dataclass(hint):
            yield f"\n### `{name}`\n\n{hint.__doc__}\n"
            yield _schema_table(hint, f"{name}.", [item.name for item in fields(hint)])


def _schema_table(kind: type, prefix: str, names: list[str]) -> str:
    comments, hints = comments_of(kind), get_type_hints(kind, include_extras=True)
    by_name, resumable = (
        {item.name: item for item in fields(kind)},
        set(schema.resumable_settings()),
    )
    rows = []
    for name in names:
        item = by_name[name]
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        text = "must be set" if default == REQUIRED else f"`{format_value(default)}`"
        is_resumable = not resumable.isdisjoint({prefix.rstrip("."), f"{prefix}{name}"})
        row = (
            f"`{prefix}{name}`",
            _type(hints[name]),
            text,
            "yes" if is_resumable else "",
            comments.get(name, ""),
        )
        rows.append(row)
    return _table(("key", "type", "default", "resumable", "meaning"), rows)


def _option(group: str, option: str) -> str:
    comment, body = _comment_and_body(CONF_DIR / group / f"{option}.yaml")
    body = "\n".join([body, *_left_out(body)]).strip()
    block = f"\n```yaml\n{body}\n```\n" if body and body != "{}" else "\n"
    block += _ranges(CONF_DIR / group / f"{option}.yaml")
    return f"**`{group}={option}`** — {comment}\n{block}"


def _left_out(body: str) -> Iterator[str]:
    """`name: null   # configuration of a hub dataset`: options that stand in the
    signature alone.
    """
    target = re.search(r"^( *)_target_:\s*(\S+)", body, flags=re.MULTILINE)
    if target is None:
        return
    for name, item in options_of(target[2]).items():
        if not re.search(rf"^ *{name}:", body, flags=re.MULTILINE):
            yield f"{f'{target[1]}{name}: {format_value(item.default)}':<26} # {item.comment}"


def _comment_and_body(path: Path) -> tuple[str, str]:
    """The comment lines at the top as one sentence, and the rest."""
    lines = path.read_text().splitlines()
    top = 0
    while top < len(lines) and lines[top].startswith("#"):
        top += 1
    return " ".join(line.lstrip("# ") for line in lines[:top]), "\n".join(lines[top:]).strip()


def rules_of(hint: Any) -> Iterator[str]:
    """Yields the rules that stand in a type annotation: `Annotated[int, Range(1)] | None` ->
    `at least 1`.
    """
    args = get_args(hint)
    if get_origin(hint) is Annotated:
        yield from (str(rule) for rule in args[1:] if str(rule))
    if get_origin(hint) is not Literal:
        for arg in args:
            yield from rules_of(arg)


def _type(hint: object) -> str:
    """`whole number, at least 1`; a choice needs no other type."""
    rules = list(rules_of(hint))
    null = " or null" if type(None) in get_args(hint) else ""
    if any(rule.startswith("one of ") for rule in rules):
        return f"{rules[0]}{null}"
    return ", ".join([describe(hint).removeprefix("a "), *rules])


def _ranges(option: Path) -> str:
    """`Ranges: warmup_steps at least 0; min_lr_frac at least 0 and at most 1.` of an option's
    target.
    """
    found = re.search(r"^_target_:\s*(\S+)", option.read_text(), flags=re.MULTILINE)
    arguments = arguments_of(found[1]) if found else {}
    rules = [
        f"`{key}` {', '.join(texts)}"
        for key, item in arguments.items()
        if (texts := list(rules_of(item.hint)))
    ]
    return f"\nRanges: {'; '.join(rules)}.\n" if rules else ""


def _table(head: tuple[str, ...], rows: object) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(
        [*lines, *("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows)]
    )  # type: ignore[attr-defined]


def main() -> int:
    if "--check" in sys.argv:
        is_fresh = PAGE.is_file() and PAGE.read_text() == page()
        print(
            "docs/config.md is fresh"
            if is_fresh
            else "docs/config.md is stale: python docs/write_config.py"
        )
        return 0 if is_fresh else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
