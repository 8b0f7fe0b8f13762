"""Real tokens per CPU-second of our recipe beside its peers: same model, data, tokens a step, one thread, in one run.

    python -m benchmarks.peers_cpu --data gsm8k_train.jsonl --peers /path/to/environments
    python -m benchmarks.peers_cpu --data gsm8k_train.jsonl --shape 32m --only recipe bare sorted

Each contestant is a process of its own; a round runs all of them once, so that a busy machine is busy for all. Steps
are timed by process CPU time, from the end of the warm-up to the end of the last step: data loading and logging
included. `--peers` holds one virtual environment a peer (torch first and alone, so that no package chooses its build):

    python -m venv P/trl     P/trl/bin/pip install torch==2.13.0;     P/trl/bin/pip install trl accelerate
    python -m venv P/litgpt  P/litgpt/bin/pip install torch==2.13.0;  P/litgpt/bin/pip install litgpt
    python -m venv P/nemo    P/nemo/bin/pip install torch==2.13.0;    P/nemo/bin/pip install --no-deps nemo_automodel megatron-fsdp flashoptim
                             P/nemo/bin/pip install datasets mistral-common tiktoken torchao torchdata transformers
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.job import SHAPES, Job

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Contestant:
    """A module of benchmarks.peers; `environment` is a folder below --peers, None = this interpreter's."""

    module: str
    variant: str | None = None
    environment: str | None = None


CONTESTANTS = {
    "recipe": Contestant("recipe"),
    "compiled": Contestant("recipe", "training.compile=true"),
    "bare": Contestant("bare"),
    "sorted": Contestant("loops", "sorted"),
    "sorted_compiled": Contestant("loops", "sorted_compiled"),
    "mask": Contestant("loops", "mask"),
    "random": Contestant("loops", "random"),
    "trl_packed": Contestant("trainers", "trl_packed", "trl"),
    "trl_padded": Contestant("trainers", "trl_padded", "trl"),
    "hf_padded": Contestant("trainers", "hf_padded", "trl"),
    "litgpt_padded": Contestant("litgpt_padded", None, "litgpt"),
    "nemo_padded": Contestant("nemo_recipe", None, "nemo"),
}


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Prints a row a round and the table; returns the rates of each contestant, a value a round."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(args.work or folder, args.shape, args.precision, args.steps, args.warmup_steps, args.data, folder)
        names = [n for n in args.only or CONTESTANTS if CONTESTANTS[n].environment is None or args.peers]
        run(Contestant("prepare"), job, args)
        rates: dict[str, list[float]] = {name: [] for name in names}
        for number in range(args.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                result = run(CONTESTANTS[name], job, args)
                if result is not None:
                    rates[name].append(result["tokens_per_cpu_s"])
                    print(f"round {number + 1}  {name:14s} {result['tokens_per_cpu_s']:8,.0f}", flush=True)
    print_table(rates)
    return rates


def run(contestant: Contestant, job: Job, args: argparse.Namespace) -> dict[str, float] | None:
    """One process; None when it failed, which is said."""
    python = sys.executable
    if contestant.environment is not None:
        python = str(Path(args.peers) / contestant.environment / "bin" / "python")
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, "-m", f"benchmarks.peers.{contestant.module}", replace(job, scratch=scratch).to_argv()]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [*command, *([contestant.variant] if contestant.variant else [])],
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
        )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
            return result
    if done.returncode or contestant.module != "prepare":
        print(f"{contestant.module} {contestant.variant or ''} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    print(done.stdout, end="")
    return None


def print_table(rates: dict[str, list[float]]) -> None:
    """Median rate, its spread, and our recipe's ratio to it: the median of the ratios of each round."""
    print("\n| contestant | real tokens per CPU-second | lowest to highest | recipe is |\n| --- | --- | --- | --- |")
    ours = rates.get("recipe", [])
    for name, values in sorted(rates.items(), key=lambda item: -statistics.median(item[1] or [0])):
        if not values:
            print(f"| {name} | failed | | |")
            continue
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, values)) if ours else float("nan")
        span = f"{min(values):,.0f} to {max(values):,.0f}"
        print(f"| {name} | {statistics.median(values):,.0f} | {span} | {ratio:.2f} x |")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--data", required=True, help="JSON lines with question and answer")
    found.add_argument(
        "--peers", help="folder with the environments trl, litgpt, nemo; left out: our own and the loops"
    )
    found.add_argument("--shape", default="small", choices=list(SHAPES))
    found.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    found.add_argument("--steps", type=int, default=12)
    found.add_argument("--warmup-steps", type=int, default=3)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--only", nargs="*", choices=list(CONTESTANTS))
    found.add_argument("--work", help="keep the tokenized rows in this folder")
    return found


if __name__ == "__main__":
    main()
