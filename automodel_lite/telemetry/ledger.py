"""ledger.jsonl: what a run has computed, one line per optimizer step, each with a hash over the
line before it.

    {"start": 0, "data": {...}, "files": {...}, "dtype": "float32", ..., "chain": "5e…"}
    {"step": 1, "packs": [3, 7], "labels": 812, "loss": 6.01, "norm": 2.1, "rate": 1e-3, "chain": …}
    {"checkpoint": 100, "sha256": "c4…", "chain": "9b…"}

A chain is the SHA-256 of the chain before and the line itself, so that its last one, the head,
stands for all lines: who knows the head finds a changed, a missing and an added line. Floats are
Python's shortest text that reads back to the same bits. A checkpoint's line holds the SHA-256 of
its manifest, which holds that of each file. A continued run drops the lines of the steps that come
again and writes on behind the step of its checkpoint, whose state.json holds the chain of that
step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_lite.errors import ConfigError
from automodel_lite.run.checkpoint_folder import MANIFEST, step_of
from automodel_lite.run.durable import json_line, sha256, sync, write_atomically
from automodel_lite.telemetry.callbacks import JsonlLogger
from automodel_lite.telemetry.metrics import StepResult

NAME = "ledger.jsonl"
_CHAIN = ', "chain": "'
_DIGITS = 64


@dataclass(frozen=True)
class Line:
    """One line that was read back: its number in the file, its content, and its chain."""

    number: int
    row: dict[str, Any]
    chain: str

    @property
    def step(self) -> int | None:
        """Returns the step that it records; None for a start or a checkpoint."""
        step = self.row.get("step")
        return step if isinstance(step, int) else None


def chained(row: Mapping[str, Any], before: str) -> tuple[str, str]:
    """Returns a row's line with its chain, and the chain."""
    body = json_line(row).removesuffix("}\n")
    chain = _hash(before, body)
    return f'{body}{_CHAIN}{chain}"}}\n', chain


def _hash(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()


def read_ledger(path: Path) -> list[Line]:
    """Returns the lines; raises ConfigError for the first one that does not follow from the line
    before. A torn last line, which a kill leaves, is not one.
    """
    text = path.read_bytes() if path.is_file() else b""
    lines: list[Line] = []
    before = ""
    for number, content in enumerate(text.splitlines(keepends=True), start=1):
        if not content.endswith(b"\n"):
            break
        line = content[:-1].decode(errors="replace")
        body, _, rest = line.rpartition(_CHAIN)
        chain = rest.removesuffix('"}')
        if not body or len(chain) != _DIGITS or chain != _hash(before, body):
            after = _name_of(lines[-1]) if lines else "its beginning"
            raise ConfigError(
                f"{path}:{number}: the line does not follow from the one before it (behind "
                f"{after}): it, or that one, is not what the run wrote: restore the file."
            )
        lines.append(Line(number, json.loads(body + "}"), chain))
        before = chain
    return lines


def _name_of(line: Line) -> str:
    kind = next(name for name in ("step", "checkpoint", "start") if name in line.row)
    return f"{kind} {line.row[kind]}"


def last_line(path: Path) -> tuple[int, str]:
    """Returns the newest step of a ledger and its head; (0, "") for a file that is none."""
    try:
        lines = read_ledger(path)
    except ConfigError:
        return 0, ""
    steps = [line.step for line in lines if line.step is not None]
    return max(steps, default=0), lines[-1].chain if lines else ""


def manifest_digest(checkpoint: Path) -> str:
    """Returns the SHA-256 of a checkpoint's manifest, which names the SHA-256 of each file."""
    return sha256(checkpoint / MANIFEST)


class Ledger:
    """The file of a run, written by its first rank; on the others every method does nothing."""

    def __init__(self, path: Path, is_silent: bool, say: Callable[[str], None]) -> None:
        self.path = path
        self.head = ""
        self._is_silent = is_silent
        self._say = say
        self._file: JsonlLogger | None = None

    def open(self, step: int, head: str, checkpoint: Path | None, facts: Mapping[str, Any]) -> None:
        """Begins the chain, or goes on behind the line of `step`, whose chain a checkpoint holds.

        head        of that line; empty in a fresh run, and where the checkpoint has none
        checkpoint  that was loaded
        facts       of this start: data, files, dtype, ranks
        """
        if self._is_silent:
            return
        kept = self._lines_until(step, head)
        self.head = kept[-1].chain if kept else ""
        texts = self.path.read_bytes().splitlines(keepends=True)[: len(kept)] if kept else []
        write_atomically(self.path, b"".join(texts).decode())
        self._file = JsonlLogger(self.path, say=self._say)
        if step and not kept:
            self._say(
                f"WARNING: {self.path.name} does not hold the steps until {step} as the checkpoint "
                f"knows them: the ledger begins anew at step {step}"
            )
        if checkpoint and (not kept or kept[-1].row.get("checkpoint") != step):
            self.add_checkpoint(checkpoint)
        self._add({"start": step, **facts})

    def _lines_until(self, step: int, head: str) -> list[Line]:
        """Returns the lines to keep: until the one with this chain, and what was written about
        checkpoints right behind it.
        """
        if not step:
            return []
        try:
            lines = read_ledger(self.path)
        except ConfigError as error:
            self._say(f"WARNING: {error}")
            return []
        place = next((n for n, line in enumerate(lines) if line.chain == head), None)
        if place is None or lines[place].step != step:
            return []
        until = place + 1
        while until < len(lines) and lines[until].row.get("checkpoint", step + 1) <= step:
            until += 1
        return lines[:until]

    def add_step(self, row: Mapping[str, Any]) -> None:
        """Writes the line of a step (see `step_row`)."""
        if self._file is not None:
            self._add(row)

    def add_checkpoint(self, path: Path) -> None:
        """Writes the line of a checkpoint that is complete."""
        if self._file is None:
            return
        try:
            digest = manifest_digest(path)
        except OSError as error:  # somebody has moved it meanwhile: the run goes on
            self._say(f"WARNING: {path.name} is not in {self.path.name}: {error.strerror}")
        else:
            self._add({"checkpoint": step_of(path), "sha256": digest})

    def secure(self) -> None:
        """Brings the lines to the disk, before a checkpoint holds the head of them."""
        if self._file is not None:
            with suppress(OSError):  # of a folder that is gone, the save that follows tells
                sync(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _add(self, row: Mapping[str, Any]) -> None:
        assert self._file is not None
        line, self.head = chained(row, self.head)
        self._file.write_line(line)


def step_row(
    step: int, pack_ids: Sequence[int], result: StepResult, numbers: tuple[float, float]
) -> dict[str, Any]:
    """Returns what a line records of a step. Packs are sorted: their order within a step belongs to
    the layout of ranks.

    numbers  (loss sum, gradient norm), as they were read
    """
    loss_sum, norm = numbers
    return {
        "step": step,
        "packs": sorted(pack_ids),
        "labels": result.counts.num_label_tokens,
        "loss": loss_sum / result.counts.divisor,
        "norm": norm,
        "rate": result.lr,
    }
