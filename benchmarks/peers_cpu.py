"""Real tokens per CPU-second of our recipe beside a bare loop of its parts, sorted padding, and the trainers of transformers
and TRL: same model, data, tokens a step, one thread, in one run.

    python -m benchmarks.peers_cpu --data gsm8k_train.jsonl --peers /path/to/environments
    python -m benchmarks.peers_cpu --data gsm8k_train.jsonl --shape 32m --only recipe bare sorted
    python -m benchmarks.peers_cpu --data gsm8k_train.jsonl --pretrained .cache/real/smollm2 --precision bf16 --peers P

Each contestant is a process of its own. They share a core and take turns, one step each, so that a slow minute of the
machine is slow for all of them. A step is timed by the CPU time of its process, from the end of the one before it: data
loading and logging included. Each turn is printed as it ends. `--peers` holds the virtual environment of TRL, in which
transformers' Trainer runs, too (torch first and alone, so that no package chooses its build):

    python -m venv P/trl; P/trl/bin/pip install torch==2.13.0; P/trl/bin/pip install trl accelerate
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.peers.job import RESULT, SHAPES, STEP_DONE, Job

ROOT = Path(__file__).resolve().parent.parent


Result = dict[str, Any]  # tokens_per_cpu_s: one value a timed step; peak_gib: of its process


@dataclass(frozen=True)
class Contestant:
    """A module of benchmarks.peers; trainers run in the environment `trl`, below --peers."""

    module: str
    variant: str | None = None

    @property
    def is_trainer(self) -> bool:
        return self.module in ("trl", "hf")


CONTESTANTS = {
    "recipe": Contestant("recipe"),
    "compiled": Contestant("recipe", "training.compile=true"),
    "bare": Contestant("bare"),
    "sorted": Contestant("loops", "sorted"),
    "random": Contestant("loops", "random"),
    "hf_padded": Contestant("hf"),
    "trl_packed": Contestant("trl", "packed"),
    "trl_padded": Contestant("trl", "padded"),
}


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Prints the table; returns the rates of each contestant, a value a step."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(args.data).resolve())  # contestants run in folders of their own
        pretrained = str(Path(args.pretrained).resolve()) if args.pretrained else None
        # links to environments stay links
        peers = str(Path(args.peers).absolute()) if args.peers else None
        steps = (args.steps, args.warmup_steps)
        job = Job(folder, args.shape, args.precision, *steps, data, folder, pretrained)
        prepare = [sys.executable, "-m", "benchmarks.peers.recipe", job.to_argv(), "prepare"]
        subprocess.run(prepare, env=environment(), check=True)
        names = [n for n in args.only or CONTESTANTS if not CONTESTANTS[n].is_trainer or peers]
        results = contest({name: CONTESTANTS[name] for name in names}, job, peers)
    print_table(results)
    return {name: result.get("tokens_per_cpu_s", []) for name, result in results.items()}


def contest(contestants: dict[str, Contestant], job: Job, peers: str | None) -> dict[str, Result]:
    """Starts all contestants, and gives each its turn until all steps are done."""
    running = {
        name: start(name, contestant, job, peers) for name, contestant in contestants.items()
    }
    names = list(running)
    for turn in range(1, job.all_steps):  # the first is part of the start
        names = names[1:] + names[:1]
        seconds = {name: running[name].take_turn() for name in names}
        # what has been measured is there when the machine has no time for the rest
        warms_up = " (warm-up)" if turn < job.warmup_steps else ""
        texts = [f"{name} {'failed' if s is None else f'{s:.2f}'}" for name, s in seconds.items()]
        print(f"turn {turn}{warms_up}, CPU-s: {', '.join(texts)}", flush=True)
    return {name: contestant.result() for name, contestant in running.items()}


@dataclass(frozen=True)
class Running:
    """A contestant's process, which waits for its turn."""

    name: str
    process: subprocess.Popen[str]
    errors: IO[str]

    def take_turn(self) -> float | None:
        """Returns the CPU seconds of one step; None where the process has failed."""
        self._say("go")
        done = self.read_until(STEP_DONE)
        return None if done is None else float(done.removeprefix(STEP_DONE))

    def result(self) -> Result:
        """What it measured, after the last turn; nothing when it failed, which is said."""
        self._say("go")
        result = self.read_until(RESULT)
        if self.process.wait() or result is None:
            self.errors.seek(0)
            print(f"{self.name} failed:\n{self.errors.read()[-2000:]}", file=sys.stderr)
            return {}
        values: Result = json.loads(result.removeprefix(RESULT))
        return values

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it has failed; rates() says so
            print(line, file=self.process.stdin, flush=True)

    def read_until(self, start: str) -> str | None:
        assert self.process.stdout is not None
        return next((line for line in self.process.stdout if line.startswith(start)), None)


def start(name: str, contestant: Contestant, job: Job, peers: str | None) -> Running:
    """Its process, after its first step."""
    python = sys.executable
    if contestant.is_trainer:
        python = str(Path(peers or "") / "trl" / "bin" / "python")
    scratch = Path(job.scratch) / name
    scratch.mkdir()
    job = replace(job, scratch=str(scratch))
    command = [python, "-m", f"benchmarks.peers.{contestant.module}", job.to_argv()]
    if contestant.variant:
        command.append(contestant.variant)
    errors = (scratch / "stderr").open("w+")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    process = subprocess.Popen(command, env=environment(), cwd=scratch, text=True, **pipes)
    # that of all: cores have other neighbours
    os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    running = Running(name, process, errors)
    running.read_until(STEP_DONE)
    return running


def environment() -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | ours


def print_table(results: dict[str, Result]) -> None:
    """Prints median rates with quartiles, peaks, and our ratio to each: the median of the ratios of each turn."""
    head = (
        "contestant | real tokens per CPU-second | quartiles | peak memory | recipe is | quartiles"
    )
    print(f"\n| {head} |\n| --- | --- | --- | --- | --- | --- |")
    ours = results.get("recipe", {}).get("tokens_per_cpu_s", [])
    for name, result in results.items():
        if not result:
            print(f"| {name} | failed | | | | |")
            continue
        values = result["tokens_per_cpu_s"]
        low, middle, high = (
            f"{value:,.0f}" if value > 10 else f"{value:.3f}"
            for value in np.percentile(values, [25, 50, 75])
        )
        ratios = [mine / theirs for mine, theirs in zip(ours, values)] or [float("nan")]
        low_ratio, ratio, high_ratio = np.percentile(ratios, [25, 50, 75])
        print(
            f"| {name} | {middle} | {low} to {high} | {result['peak_gib']:.1f} GiB "
            f"| {ratio:.2f} x | {low_ratio:.2f} to {high_ratio:.2f} |"
        )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--data", required=True, help="JSON lines with question and answer")
    found.add_argument("--peers", help="folder with the environment trl; left out: our own alone")
    found.add_argument("--shape", default="small", choices=list(SHAPES))
    found.add_argument("--pretrained", help="folder with a model to train in place of a shape")
    found.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    found.add_argument("--steps", type=int, default=12, help="turns that are timed")
    found.add_argument("--warmup-steps", type=int, default=3)
    found.add_argument("--only", nargs="*", choices=list(CONTESTANTS))
    return found


if __name__ == "__main__":
    main()
