"""The runs of some folders, and their reports as they grow."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from automodel_lite.errors import ConfigError
from automodel_lite.extras.board.growth import GrowingRows
from automodel_lite.extras.board.jobs import Jobs
from automodel_lite.extras.report import parts_of, read_run
from automodel_lite.run.folder import RunFolder

_DEPTH = 2  # of folders below one that is named: runs/name, and runs/sweep/name


@dataclass
class FoundRuns:
    """Runs by their keys: what a run's folder is called below the one that was named. A browser
    names nothing else.
    """

    roots: Sequence[Path]
    jobs: Jobs
    _rows: dict[Path, GrowingRows] = field(default_factory=dict)
    _one: threading.Lock = field(default_factory=threading.Lock)  # reads at a time

    def by_key(self) -> dict[str, RunFolder]:
        """Returns the runs that are there now, by their keys in their order."""
        found: dict[str, RunFolder] = {}
        for root in self.roots:
            for path in _runs_below(root, _DEPTH):
                name = root.name if path == root else os.path.relpath(path, root)
                key = name if name not in found else str(path)
                found[key] = RunFolder(path)
        return found

    def run(self, key: str) -> RunFolder:
        """Raises ConfigError where there is no such run."""
        run = self.by_key().get(key)
        if run is None:
            raise ConfigError(f"{key}: there is no such run any more: reload the page.")
        return run

    def listed(self) -> list[dict[str, Any]]:
        """Returns a line for each run: the newest first."""
        lines = []
        for key, run in self.by_key().items():
            rows = self._rows_of(run)
            losses = [row["loss"] for row in rows[-50:] if isinstance(row.get("loss"), float)]
            changed_s = 0.0
            with suppress(OSError):
                changed_s = (run.metrics if run.metrics.is_file() else run.config).stat().st_mtime
            line = {
                "key": key,
                "state": self.jobs.state_of(run),
                "step": rows[-1]["step"] if rows else 0,
                "loss": f"{losses[-1]:.4g}" if losses else "",
                "changed_s": changed_s,
            }
            lines.append(line)
        return sorted(lines, key=lambda line: -line["changed_s"])

    def report(self, keys: Sequence[str], seen: str = "") -> dict[str, Any]:
        """Returns the parts of the page of these runs, and their version; the version alone where
        it is the one that was `seen`.

        Runs without a step are named in `waiting`.
        """
        runs = {key: self.run(key) for key in keys}
        version = hashlib.sha256(repr([*map(self._version_of, runs.values())]).encode()).hexdigest()
        if version == seen:
            return {"version": version}
        records = []
        waiting = []
        for key, run in runs.items():
            try:
                record = read_run(run.path, self._rows_of(run))
            except ConfigError as error:
                waiting.append(str(error))
                continue
            # its state as it is known here; of several, names that differ
            status = {**record.status, "state": self.jobs.state_of(run)}
            name = key if len(runs) > 1 else record.name
            records.append(replace(record, status=status, name=name))
        parts = parts_of(records) if records else {"head": "", "sections": "", "data": {"runs": []}}
        return {"version": version, "waiting": waiting, **parts}

    def _rows_of(self, run: RunFolder) -> list[dict[str, Any]]:
        with self._one:
            return self._rows.setdefault(run.path, GrowingRows(run.metrics)).read()

    def _version_of(self, run: RunFolder) -> list[Any]:
        """Returns what changes when anything in the page of a run does."""
        found: list[Any] = [str(run.path), self.jobs.state_of(run)]
        for path in (run.metrics, run.status, run.config, run.facts, run.packing, run.lengths):
            with suppress(OSError):
                status = path.stat()
                found += [path.name, status.st_mtime_ns, status.st_size, status.st_ino]
        return found


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the runs in a folder, or the folder where it is one; no link is followed."""
    if (folder / "config.yaml").is_file():
        yield folder
        return
    if depth:
        with suppress(OSError):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    yield from _runs_below(folder / entry.name, depth - 1)
