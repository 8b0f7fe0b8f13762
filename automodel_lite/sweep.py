"""`--multirun`: the same recipe over a grid of settings, one job after the other, one folder each.

    torchrun recipes/train_ft.py --config-name llama_packed --multirun optimizer.lr=1e-3,3e-3 seed=0,1

    runs/llama_packed/0_lr-0.001_seed-0/ ...      sweep.json, sweep.md: the results of all jobs

A job is a process of its own on every rank, so that one that fails, even by a crash, leaves nothing behind for the next
one; each has a rendezvous of its own. The same command again goes on with what is not finished.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.run.stopping import PREEMPTED_EXIT

_CHILD = "import sys; from automodel_lite.cli import run_recipe; run_recipe(sys.argv.pop(1))"
_GRACE_S = 30.0  # that the other ranks get to notice by themselves that a job has failed


@dataclass(frozen=True)
class Job:
    """One point of the grid."""

    number: int
    overrides: list[str]  # of the whole command line, one value each
    varied: list[str]  # those that differ between jobs

    @property
    def folder_name(self) -> str:
        short = "_".join(text.split("=", 1)[0].split(".")[-1] + "-" + text.split("=", 1)[-1] for text in self.varied)
        return "_".join([str(self.number), re.sub(r"[^A-Za-z0-9_.-]+", "-", short)])[:120].rstrip("_")

    @property
    def label(self) -> str:
        return ", ".join(self.varied) or "as given"


class Ranks(Protocol):
    """How the ranks of a sweep speak to each other between jobs."""

    def port_of(self, job: int) -> int | None:
        """The rendezvous port of a job; None with one process."""

    def report_failure(self, job: int) -> None: ...

    def has_failed(self, job: int) -> bool: ...

    def wait_for_all(self, job: int) -> None: ...


def run_sweep(main: str, preset: list[str], overrides: list[str], base: Path) -> int:
    """Runs every job and prints the table; the exit code.

    main        the recipe, "recipes.train_ft:main"
    preset      the arguments that name it: ["--config-name", "llama_packed"]
    base        the folder that holds the folders of the jobs
    Raises ConfigError when that is a run's folder, or for an override that cannot be read; RunStoppedError at the end,
    on the first rank, when jobs have failed.
    """
    if (base / "config.yaml").is_file():
        raise ConfigError(f"{base} is the folder of a run: give the sweep another name=... .")
    jobs = expand(overrides)
    is_first = os.environ.get("RANK", "0") == "0"
    ranks: Ranks = _Store() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else _Alone()
    codes: dict[int, int] = {}
    with _Forwarding() as child:
        for job in jobs:
            if is_first:
                print(f"\njob {job.number + 1} of {len(jobs)}: {job.label}", flush=True)
            where = [f"output_dir={base / job.folder_name}", f"name={base.name}+{job.folder_name}"]
            codes[job.number] = _run_job(job, [main, *preset, *job.overrides, *where], ranks, child)
            ranks.wait_for_all(job.number)
            if child.stopped or codes[job.number] == PREEMPTED_EXIT:
                return PREEMPTED_EXIT
    if is_first:
        results = [result_of(job, base / job.folder_name, codes[job.number]) for job in jobs]
        base.mkdir(parents=True, exist_ok=True)
        (base / "sweep.json").write_text(json.dumps(results, indent=1) + "\n")
        (base / "sweep.md").write_text(table(results))
        print(f"\n{table(results)}\n{base / 'sweep.md'}", flush=True)
        if failed := [job.folder_name for job in jobs if codes[job.number]]:
            raise RunStoppedError(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)} in {base}")
    return 0


def expand(overrides: list[str]) -> list[Job]:
    """Every combination, the last override changing fastest."""
    choices = [list(_values(text)) for text in overrides]
    varied = [len(values) > 1 for values in choices]
    jobs = []
    for number, point in enumerate(itertools.product(*choices)):
        jobs.append(Job(number, list(point), [text for text, is_varied in zip(point, varied) if is_varied]))
    return jobs


def _values(text: str) -> Iterator[str]:
    """`lr=1,2` -> `lr=1`, `lr=2`."""
    try:
        override: Override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(f"{text}: cannot be read as key=value ({reason}).") from None
    if not override.is_sweep_override():
        yield text
        return
    key = override.get_key_element()
    for value in override.sweep_string_iterator():
        yield f"{key}={value}"


def _run_job(job: Job, arguments: list[str], ranks: Ranks, child: _Forwarding) -> int:
    """The exit code of this rank's process; a job that has failed on another rank is ended here too."""
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_ERROR_FILE"}
    port = ranks.port_of(job.number)
    if port is not None:
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    process = subprocess.Popen([sys.executable, "-c", _CHILD, *arguments], env=environment)
    child.process = process
    give_up: float | None = None
    while True:
        try:
            code = process.wait(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            if give_up is None and ranks.has_failed(job.number):
                give_up = time.monotonic() + _GRACE_S
            if give_up is not None and time.monotonic() > give_up:
                process.kill()
    if code not in (0, PREEMPTED_EXIT):
        ranks.report_failure(job.number)
    return code


def result_of(job: Job, folder: Path, code: int) -> dict[str, Any]:
    """What the table says of a job."""
    result: dict[str, Any] = {"job": job.number, "settings": job.label, "state": "failed" if code else "finished"}
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    for row in rows:
        for key, value in row.items():
            if key in ("step", "loss", "tokens_per_s", "answers_right") or key.startswith("val_loss/"):
                result[key] = value
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; the job with the lowest (first) validation loss is marked."""
    scores = [key for result in results for key in result if key.startswith("val_loss/")]
    columns = [key for key in dict.fromkeys(key for result in results for key in result) if key != "job"]
    finished = [result for result in results if scores and isinstance(result.get(scores[0]), float)]
    best = min(finished, key=lambda result: float(result[scores[0]]), default=None)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for result in results:
        mark = f"{result['job']}{' *' if result is best else ''}"
        lines.append(f"| {mark} | {' | '.join(_show(result.get(key, '')) for key in columns)} |")
    note = f"\n\\* lowest {scores[0]}\n" if best else ""
    return "\n".join(lines) + "\n" + note


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


class _Forwarding:
    """Signals go on to the job's process, which saves and leaves; the sweep ends with it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> _Forwarding:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self.before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _: object) -> None:
        self.stopped = True
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)


class _Alone:
    """One process: nobody to speak to."""

    def port_of(self, job: int) -> int | None:
        return None

    def report_failure(self, job: int) -> None: ...

    def has_failed(self, job: int) -> bool:
        return False

    def wait_for_all(self, job: int) -> None: ...


class _Store:
    """Through the launcher's store."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # the jobs import torch themselves; a sweep of one process needs none

        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=self.rank == 0 and not has_agent,
            wait_for_workers=False,
            timeout=timedelta(days=30),
        )

    def port_of(self, job: int) -> int | None:
        key = f"sweep/{job}/port"
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                self.store.set(key, str(free.getsockname()[1]))
        return int(self.store.get(key))

    def report_failure(self, job: int) -> None:
        self.store.set(f"sweep/{job}/failed", "1")

    def has_failed(self, job: int) -> bool:
        return bool(self.store.check([f"sweep/{job}/failed"]))

    def wait_for_all(self, job: int) -> None:
        key = f"sweep/{job}/done"
        if self.store.add(f"{key}/count", 1) == self.world_size:
            self.store.set(key, "1")
        self.store.get(key)
