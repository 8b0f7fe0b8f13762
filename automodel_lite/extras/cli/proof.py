"""`automodel-lite proof`: what this project claims, computed again on this machine."""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from automodel_lite.cli.line import argument_parser
from automodel_lite.config.rules import argument
from automodel_lite.errors import ConfigError, did_you_mean, one_line
from automodel_lite.extras.proof.rows import ROWS, Row
from automodel_lite.extras.proof.work import MissingError, Work
from automodel_lite.redact import scrub
from automodel_lite.results import RESULTS
from automodel_lite.run.durable import write_atomically
from automodel_lite.run.folder import json_object
from automodel_lite.telemetry.console import quiet_libraries
from automodel_lite.version import __version__

_VERDICTS = {True: "as expected", False: "**DIFFERENT**", None: "missing"}


@dataclass(frozen=True)
class Shown:
    """A row as it was seen; kept in proof.json, so that `--only` completes the table."""

    seen: str
    passed: bool | None
    commands: list[str]
    seconds: float
    cpu_seconds: float = 0.0  # of its processes: other work on the machine does not count


def proof(argv: list[str]) -> int:
    """Compute what this project claims again, on this machine: one table, and a page of it.

    automodel-lite proof                       every row, small ones first; proof/proof.md grows
    automodel-lite proof --only text-cp2       one row (--list names them)
    automodel-lite proof --steps 20 --real-steps 20          shorter curves, for a slow machine

    Without a GPU or a hub; data and a pretrained model come from the package index, into the folder
    of the proof. Exit code 1 where something is different from what was expected.
    """
    parser = argument_parser(proof.__doc__, has_results=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows alone")
    parser.add_argument("--list", action="store_true", help="name the rows, and stop")
    parser.add_argument(
        "--to", type=argument(Path), default=Path("proof"), help="the folder (default: proof)"
    )
    parser.add_argument("--steps", type=int, default=50, help="of tiny models (default: 50)")
    parser.add_argument("--real-steps", type=int, default=50, help="of SmolLM2-135M (default: 50)")
    parser.add_argument(
        "--peers", type=argument(Path), help="a Python whose environment has peers, such as TRL"
    )
    args = parser.parse_args(argv)
    rows = {row.name: row for row in ROWS}
    for name in args.only:
        if name not in rows:
            raise ConfigError(f"--only {name}: no such row{did_you_mean(name, rows)}")
    for name in ("steps", "real_steps"):
        if getattr(args, name) < 2:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 2.")
    if args.list:
        print("\n".join(f"{row.name:22} {row.what}" for row in ROWS))
        return 0
    quiet_libraries()
    work = Work(args.to.resolve(), args.steps, args.real_steps, args.peers)
    work.folder.mkdir(parents=True, exist_ok=True)
    shown = read_shown(work.folder / "proof.json")
    chosen = [rows[name] for name in args.only] or ROWS
    for row in chosen:
        shown[row.name] = look(row, work)
        write_atomically(
            work.folder / "proof.json",
            json.dumps({name: asdict(each) for name, each in shown.items()}, indent=1) + "\n",
        )
        write_atomically(work.folder / "proof.md", page(ROWS, shown))
        each = shown[row.name]
        print(f"{row.name:22} {_VERDICTS[each.passed].strip('*'):12} {each.seen}", flush=True)
    failed = [row.name for row in chosen if shown[row.name].passed is False]
    print(f"\nthe page       {work.folder / 'proof.md'}")
    RESULTS.update(failed=failed, rows={name: asdict(each) for name, each in shown.items()})
    return int(bool(failed))


def look(row: Row, work: Work) -> Shown:
    """Computes a row; what stops it is what it saw."""
    began = time.monotonic()
    cpu_began = cpu_seconds()
    work.commands.clear()
    try:
        seen = row.look(work)
        text, passed = seen.text, seen.passed
    except MissingError as error:
        text, passed = str(error), None
    except Exception as error:
        text, passed = scrub(one_line(error, 300)), False
    took = round(time.monotonic() - began, 1)
    return Shown(text, passed, list(work.commands), took, round(cpu_seconds() - cpu_began, 1))


def cpu_seconds() -> float:
    """Returns what this process and the children that it has waited for have used."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def read_shown(path: Path) -> dict[str, Shown]:
    """Returns the rows of an earlier proof in this folder."""
    known = {row.name for row in ROWS}
    found: dict[str, Any] = json_object(path)
    return {name: Shown(**values) for name, values in found.items() if name in known}


def page(rows: Sequence[Row], shown: Mapping[str, Shown]) -> str:
    """Returns the table as Markdown that can be published as it is."""
    cores = os.cpu_count()
    counted = list(shown.values())
    passed = sum(each.passed is True for each in counted)
    lines = [
        "# Proof",
        "",
        f"`automodel-lite proof` of automodel_lite {__version__} (torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}), "
        f"{datetime.now(UTC):%Y-%m-%d}, on {platform.machine()} with {cores} cores, no GPU: "
        f"{passed} of {len(counted)} rows as expected, "
        f"{sum(each.seconds for each in counted) / 60:.0f} minutes, "
        f"{sum(each.cpu_seconds for each in counted) / 60:.0f} CPU-minutes.",
        "",
        "| row | what | expected | seen | rule | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = shown.get(row.name)
        seen = each.seen.replace("|", "\\|") if each else "not computed yet"
        verdict = _VERDICTS[each.passed] if each else ""
        lines.append(
            f"| {row.name} | {row.what} | {row.expected} | {seen} | {row.rule} | {verdict} |"
        )
    lines += ["", "## Commands", "", "Each row again: `automodel-lite proof --only ROW`.", ""]
    for row in rows:
        if row.name in shown and shown[row.name].commands:
            lines += [f"### {row.name}", "", "```", *shown[row.name].commands, "```", ""]
    return "\n".join(lines).rstrip() + "\n"
