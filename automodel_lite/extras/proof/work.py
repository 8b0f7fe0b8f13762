"""The folder of a proof: its commands, the runs in it, and their curves.

A curve is read from ledger.jsonl, which has every step with every digit.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.telemetry.ledger import NAME, read_ledger

Curve = dict[int, tuple[float, float]]  # step -> loss, gradient norm
ROOT = Path(__file__).resolve().parents[3]


class MissingError(Exception):
    """What a row needs and this machine lacks: the row names it, and is not counted."""


def environment() -> dict[str, str]:
    """Returns that of a process which runs this checkout, or installation, on one thread and no
    GPU: few machines have one for each of eight ranks.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    path = os.pathsep.join(filter(None, paths))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own}


@dataclass(frozen=True)
class Seen:
    """What a row saw, and whether it is what was expected; None where nothing is."""

    text: str
    passed: bool | None


@dataclass
class Work:
    """What the rows of one proof share.

    steps         of the runs of tiny models
    real_steps    of the pretrained model
    peers         a Python that has peers installed; None: this one
    """

    folder: Path
    steps: int = 50
    real_steps: int = 50
    peers: Path | None = None
    commands: list[str] = field(default_factory=list)  # of the row under way
    timeout_s: int = 3600

    def run(
        self, *arguments: str, is_expected: Iterable[int] = (0,), wants_errors: bool = False
    ) -> str:
        """Runs `automodel-lite ARGUMENTS`; returns what it printed, or its errors. Raises
        RunStoppedError with its last line for another exit code.
        """
        shown = [text.replace(str(self.folder), "proof") for text in arguments]
        self.commands.append(shlex.join(["automodel-lite", *shown]))
        line = ["-m", "automodel_lite", *arguments]
        return self.python(line, is_expected, wants_errors=wants_errors)

    def python(
        self,
        arguments: list[str],
        is_expected: Iterable[int] = (0,),
        interpreter: Path | None = None,
        wants_errors: bool = False,
    ) -> str:
        """Runs Python with these arguments, in this project's environment by default."""
        done = subprocess.run(
            [str(interpreter or sys.executable), *arguments],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=self.timeout_s,
        )
        if done.returncode not in is_expected:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing"]
            raise RunStoppedError(f"exit code {done.returncode}: {lines[-1][:300]}")
        return done.stderr if wants_errors else done.stdout

    def fresh(self, name: str) -> Path:
        """Returns the folder of a run, emptied."""
        folder = self.folder / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def train(self, name: str, preset: str, *overrides: str, nproc: int = 1) -> Curve:
        """Trains a run of its own and returns its curve."""
        folder = self.fresh(name)
        ranks = ["--nproc", str(nproc)] if nproc > 1 else []
        self.run("train", *ranks, *self.settings(name, preset, *overrides))
        return curve_of(folder)

    def train_once(self, name: str, preset: str, *overrides: str) -> Path:
        """Trains a run that several rows compare with, unless it is there; returns its folder."""
        folder = self.folder / "runs" / name
        note = folder / "proof-arguments.txt"
        arguments = "\n".join(self.settings(name, preset, *overrides))
        if not note.is_file() or note.read_text() != arguments:
            self.train(name, preset, *overrides)
            note.write_text(arguments)
        return folder

    def settings(self, name: str, preset: str, *overrides: str) -> list[str]:
        """Returns the arguments of `train` for a run in this folder."""
        return [
            *("--config-name", preset, f"name={name}"),
            f"output_dir={self.folder / 'runs' / name}",
            f"cache_dir={self.folder / 'cache'}",
            *overrides,
        ]


def curve_of(run: Path) -> Curve:
    """Returns loss and gradient norm of every recorded step."""
    lines = read_ledger(run / NAME)
    return {line.step: (line.row["loss"], line.row["norm"]) for line in lines if line.step}


def farthest(curve: Curve, other: Curve) -> tuple[float, int]:
    """Returns the largest relative difference of two curves' losses, and its step; a loss that is
    no number is the farthest. Raises ConfigError for curves of other steps.

    >>> farthest({1: (2.0, 1.0)}, {1: (2.002, 1.0)})
    (0.001, 1)
    """
    if curve.keys() != other.keys() or not curve:
        raise ConfigError(f"the curves have {len(curve)} and {len(other)} steps.")
    distances = {step: abs(other[step][0] - loss) / abs(loss) for step, (loss, _) in curve.items()}
    # no comparison with NaN is true, and `max` would pass it by
    worst = max(distances, key=lambda step: (math.isnan(distances[step]), distances[step]))
    return distances[worst], worst
