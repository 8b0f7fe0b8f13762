"""One command for a GPU that has half an hour: kernels, speed beside rivals, loss curves, memory, features, in one table.

    python benchmarks/gpu_check.py --minutes 30             the most valuable first; results as they come
    python benchmarks/gpu_check.py --minutes 9              where commands are ended after ten minutes; call it again
    python benchmarks/gpu_check.py --only step-packed step-compiled
    python benchmarks/gpu_check.py --list-wheels            what to bring along to a machine without a network
    python benchmarks/gpu_check.py --plan smoke --device cpu

Needs torch, transformers and those wheels; the last of them, without versions, are on most machines. The package need
not be installed. Each result is a line of gpu_check.jsonl, in the folder that $OUT names (else here), written as soon as
it is there; a call goes on with what is missing there and in a gpu_check.jsonl of the checkout, where the file of the
last call belongs when $OUT is a new folder every time. What is missing, fails or runs out of time is tried again.
gpu_calibration.json, beside it, has the measured rates of the card, gpu_check_caches what the compilers made.

One GPU shows nothing of NCCL, of FSDP's traffic and of context parallelism.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.plan import PLANS, Part, full_plan, groups, smoke_plan
from benchmarks.gpu.table import last_words, table
from benchmarks.gpu.workers import run_group, run_here

WHEELS = {  # what to install -> what is imported; 7 MB
    "hydra-core==1.3.8": "hydra",
    "omegaconf==2.3.1": "omegaconf",
    "antlr4-python3-runtime==4.9.3": "antlr4",  # an sdist: pip wheel makes the wheel
    "datasets==5.2.0": "datasets",
    "dill==0.4.1": "dill",
    "multiprocess==0.70.19": "multiprocess",
    "torchdata==0.11.0": "torchdata",
}
# 60 MB
COMMON = {
    name: name for name in ("accelerate", "pandas", "pyarrow", "psutil", "requests", "xxhash")
}
OPTIONAL = {  # a part that needs one says that it is missing
    "peft==0.21.2": "peft",
    "liger-kernel==0.8.5": "liger_kernel",
    "torchao==0.18.0": "torchao",
    "trl==1.16.0": "trl",
}
FILE = "gpu_check.jsonl"


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
    parser.add_argument("--parts", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.list_wheels:
        print("\n".join({**WHEELS, **OPTIONAL, **COMMON}))
        return 0
    parts = full_plan() if arguments.plan == "full" else smoke_plan()
    if arguments.parts:
        chosen = {part.name: part for part in parts}
        return run_here(
            [chosen[name] for name in arguments.parts],
            arguments.device,
            read_results(arguments.out, {}),
            arguments.out.with_name("gpu_check_caches"),
        )
    if missing := [
        wheel for wheel, module in {**WHEELS, **COMMON}.items() if find_spec(module) is None
    ]:
        print(f"Nothing was checked; first: pip install {' '.join(missing)}")
        return 2
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "SKIPPED: no CUDA device here, nothing was checked. `--plan smoke --device cpu` tries this script."
        )
        return 0
    machine = {"device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"}
    machine |= {"torch": torch.__version__, "plan": arguments.plan}
    gib = (
        torch.cuda.get_device_properties(0).total_memory / 2**30
        if arguments.device == "cuda"
        else 0.0
    )
    results = check_all(parts, arguments, machine, gib)
    print("\n" + table([part.name for part in parts], results, machine))
    return int(any(result["verdict"] in ("FAIL", "timeout") for result in results.values()))


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
            if part.name == "ceilings" and found["verdict"] == "pass":
                keys = ("bf16_tflops", "memory_tb_per_s", "link_gb_per_s")
                rates = {
                    "device": machine["device"],
                    "torch": machine["torch"],
                    **{key: found[key] for key in keys},
                }
                arguments.out.with_name("gpu_calibration.json").write_text(json.dumps(rates) + "\n")
            print(
                f"{part.name:28s} {found['verdict']:8s} {last_words(found.get('why'))}", flush=True
            )

        for group in groups(parts):
            waiting = []
            for part in group:
                is_done = results.get(part.name, {}).get("verdict") == "pass"
                if (is_done and part.name not in arguments.only) or (
                    arguments.only and part.name not in arguments.only
                ):
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
    if missing:
        return {"verdict": "missing", "why": f"not installed: {', '.join(missing)}"}
    if arguments.device == "cuda" and gib < part.least_gib:
        return {
            "verdict": "missing",
            "why": f"needs {part.least_gib:.0f} GiB, this GPU has {gib:.0f}",
        }
    if arguments.device == "cuda" and gib > part.most_gib:
        return {"verdict": "missing", "why": "a larger card has a row of its own"}
    return None


if __name__ == "__main__":
    sys.exit(main())
