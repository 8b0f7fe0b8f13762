"""One command for a GPU that has half an hour: kernels, speed beside rivals, loss curves, memory, features, in one table.

    python benchmarks/gpu_check.py --minutes 13             the most valuable first; results as they come
    python benchmarks/gpu_check.py --minutes 9              where commands are ended after ten minutes; call it again
    python benchmarks/gpu_check.py --list                   the parts in their order, with the seconds of each
    python benchmarks/gpu_check.py --only step-packed step-compiled
    python benchmarks/gpu_check.py --list-wheels            what to bring along to a machine without a network
    python benchmarks/gpu_check.py --plan smoke --device cpu

Needs torch, transformers and those wheels; the last of them, without versions, are on most machines. The package need
not be installed. Each result is a line of gpu_check.jsonl, in the folder that $OUT names (else here), written as soon as
it is there; a call goes on with what is missing there and in a gpu_check.jsonl of the checkout, where the file of the
last call belongs when $OUT is a new folder every time. What is missing, fails or runs out of time is tried again.
gpu_calibration.json, beside it, has the measured rates of the card, gpu_check_caches.zip what the compilers made, which
is written behind the results. A part begins only if the seconds that it is expected to take are left; whatever ends the
check ends its workers.

One GPU shows nothing of NCCL, of FSDP's traffic and of context parallelism.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.plan import PLANS, Part, full_plan, groups, smoke_plan
from benchmarks.gpu.table import last_words, table
from benchmarks.gpu.workers import NO_NUMBERS, START_S, names_of_parts, run_group, run_here

# what to install -> what is imported; 7 MB
WHEELS = {
    "hydra-core==1.3.8": "hydra",
    "omegaconf==2.3.1": "omegaconf",
    "antlr4-python3-runtime==4.9.3": "antlr4",  # an sdist: pip wheel makes the wheel
    "datasets==5.2.0": "datasets",
    "dill==0.4.1": "dill",
    "multiprocess==0.70.19": "multiprocess",
    "torchdata==0.11.0": "torchdata",
}
COMMON = ("accelerate", "pandas", "pyarrow", "psutil", "requests", "xxhash")  # 60 MB
# a part that needs one says that it is missing
OPTIONAL = ("peft==0.21.2", "liger-kernel==0.8.5", "torchao==0.18.0", "trl==1.16.0")
FILE = "gpu_check.jsonl"
CACHES = "gpu_check_caches.zip"
# part -> what it has measured for the planner
CALIBRATION = {
    "ceilings": ("bf16_tflops", "memory_tb_per_s", "link_gb_per_s"),
    "rates": ("product_tflops", "attention_tflops", "step_tb_per_s"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="the whole call ends by then")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--plan", default="full", choices=PLANS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT, FILE))
    parser.add_argument(
        "--only", nargs="*", default=[], help="these parts alone, again if they are done"
    )
    parser.add_argument("--list-wheels", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.list_wheels:
        print("\n".join([*WHEELS, *OPTIONAL, *COMMON]))
        return 0
    parts = full_plan() if arguments.plan == "full" else smoke_plan()
    named = {part.name: part for part in parts}
    if arguments.list:
        print(estimates(parts))
        return 0
    if arguments.worker:
        caches = [folder / CACHES for folder in (arguments.out.parent, ROOT)]
        known = read_results(arguments.out, {})
        return run_here(named, names_of_parts(), arguments.device, known, caches)
    if unknown := [name for name in arguments.only if name not in named]:
        print(f"Nothing was checked: {'; '.join(unknown_text(name, named) for name in unknown)}.")
        return 2
    needed = WHEELS | {name: name for name in COMMON}
    missing = [wheel for wheel, module in needed.items() if find_spec(module) is None]
    if missing:
        print(f"Nothing was checked; first: pip install {' '.join(missing)}")
        return 2
    import torch

    machine, gib = {"device": "cpu"}, 0.0
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            print(
                "SKIPPED: no CUDA device here, nothing was checked. `--plan smoke --device cpu` tries this script."
            )
            return 0
        machine = {"device": torch.cuda.get_device_name()}
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    machine |= {"torch": torch.__version__, "plan": arguments.plan}
    # by the way of an exception, which ends the worker
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = check_all(parts, arguments, machine, gib)
    print("\n" + table([part.name for part in parts], results, machine))
    bad = ("FAIL", "timeout", NO_NUMBERS)
    return int(any(result["verdict"] in bad for result in results.values()))


def unknown_text(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    others = f", but {', '.join(close)}" if close else ""
    return f"no part is called {name}{others} (--list names all)"


def estimates(parts: list[Part]) -> str:
    """The parts in their order: seconds, and minutes until each has ended, processes' starts included."""
    lines = []
    total_s = 0.0
    for group in groups(parts):
        total_s += START_S
        for part in group:
            total_s += part.seconds
            lines.append(f"{part.name:32s} {part.seconds:4.0f} s {total_s / 60:6.1f} min")
    return "\n".join(lines)


def check_all(
    parts: list[Part], arguments: argparse.Namespace, machine: dict[str, Any], gib: float
) -> dict[str, dict[str, Any]]:
    """Runs what has not passed yet, and returns the results of this call and of those before it."""
    deadline = time.monotonic() + 60 * arguments.minutes
    results = read_results(ROOT / FILE, machine) | read_results(arguments.out, machine)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        known = read_results(arguments.out, machine)
        for name in results.keys() - known.keys():  # so that this file is whole
            file.write(json.dumps(results[name]) + "\n")
        file.flush()

        def record(part: Part, found: dict[str, Any]) -> None:
            results[part.name] = {"part": part.name, **machine, **found}
            file.write(json.dumps(results[part.name]) + "\n")
            file.flush()
            if part.name in CALIBRATION and found["verdict"] == "pass":
                rates = {"device": machine["device"], "torch": machine["torch"]}
                for name, keys in CALIBRATION.items():
                    rates |= {
                        key: results[name][key] for key in keys if key in results.get(name, {})
                    }
                arguments.out.with_name("gpu_calibration.json").write_text(json.dumps(rates) + "\n")
            words = last_words(found.get("why"))
            print(f"{part.name:28s} {found['verdict']:10s} {words}", flush=True)

        for group in groups(parts):
            waiting = []
            for part in group:
                is_wanted = results.get(part.name, {}).get("verdict") != "pass"
                if arguments.only:
                    is_wanted = part.name in arguments.only
                if not is_wanted:
                    continue
                if reason := skipped(part, arguments, gib):
                    record(part, reason)
                else:
                    waiting.append(part)
            run_group(waiting, arguments, deadline, record)
    return results


def read_results(path: Path, machine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The last line of each part, of this machine and plan."""
    results: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        if all(row.get(key) == value for key, value in machine.items()):
            results[row["part"]] = row
    return results


def skipped(part: Part, arguments: argparse.Namespace, gib: float) -> dict[str, Any] | None:
    """Why a part cannot run here at all."""
    missing = [name for name in part.needs if find_spec(name) is None]
    why = ""
    if missing:
        why = f"not installed: {', '.join(missing)}"
    elif arguments.device == "cuda" and gib < part.least_gib:
        why = f"needs {part.least_gib:.0f} GiB, this GPU has {gib:.0f}"
    elif arguments.device == "cuda" and gib > part.most_gib:
        why = "a larger card has a row of its own"
    return {"verdict": "missing", "why": why} if why else None


if __name__ == "__main__":
    sys.exit(main())
