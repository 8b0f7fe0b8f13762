"""One command for a GPU that has half an hour: kernels, features, speed beside rivals, memory, idle time, in one table.

    python benchmarks/gpu_check.py --minutes 30             the most valuable first; results as they come
    python benchmarks/gpu_check.py --minutes 30             again: goes on with what is missing
    python benchmarks/gpu_check.py --only kernel-varlen kernel-flex
    python benchmarks/gpu_check.py --list-wheels            what to bring along to a machine without a network
    python benchmarks/gpu_check.py --plan smoke --device cpu

Needs torch, transformers and those wheels; the last of them, without versions, are on most machines. Each part is a
process of its own with a deadline; its result is a line of gpu_check.jsonl. A part whose package is missing says so; what
is missing, fails or runs out of time is tried again by the next call. One GPU shows nothing of NCCL, of FSDP's traffic
and of context parallelism: see docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WHEELS = {  # what to install -> what is imported; 7 MB
    "hydra-core==1.3.8": "hydra",
    "omegaconf==2.3.1": "omegaconf",
    "antlr4-python3-runtime==4.9.3": "antlr4",  # an sdist: pip wheel makes the wheel
    "datasets==5.2.0": "datasets",
    "dill==0.4.1": "dill",
    "multiprocess==0.70.19": "multiprocess",
    "torchdata==0.11.0": "torchdata",
}
COMMON = {name: name for name in ("accelerate", "pandas", "pyarrow", "psutil", "requests", "xxhash")}  # 60 MB
OPTIONAL = {  # a part that needs one says that it is missing
    "peft==0.21.2": "peft",
    "liger-kernel==0.8.5": "liger_kernel",
    "torchao==0.18.0": "torchao",
    "trl==1.16.0": "trl",
}
PLANS = ("full", "smoke")
LEAST_S = 20.0  # a part is not begun with less


@dataclass(frozen=True)
class Part:
    """One line of the table: a function of `benchmarks/gpu`, in a process of its own."""

    name: str
    call: str  # module.function
    limit_s: int
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages
    least_gib: float = 0.0  # of the GPU


def step(name: str, limit_s: int, least_gib: float = 0.0, needs: tuple[str, ...] = (), **settings: Any) -> Part:
    return Part(f"step-{name}", "steps.measure", limit_s, {"settings": settings}, needs, least_gib)


def kernel(name: str, limit_s: int) -> Part:
    packages = {"flash": ("flash_attn",), "te": ("transformer_engine",)}
    return Part(f"kernel-{name}", "kernels.run", limit_s, {"kernel_name": name}, packages.get(name, ()))


def feature(name: str, overrides: list[str], needs: tuple[str, ...] = ()) -> Part:
    return Part(f"feature-{name}", "recipe.feature", 150, {"overrides": overrides}, needs)


def full_plan() -> list[Part]:
    """The most valuable first; some 28 minutes by estimate."""
    one_b, eight_b = {"shape": "1b", "pack": 8192}, {"shape": "8b", "pack": 8192, "recompute": "full", "steps": 4}
    return [
        Part("imports", "machine.imports", 120),
        Part("expandable-segments", "machine.expandable_segments", 60),
        Part("ceilings", "machine.ceilings", 90),
        kernel("varlen", 120),
        kernel("flex", 240),
        Part("strict-step", "recipe.strict_step", 120),
        Part("built-in-job", "recipe.built_in_job", 180),
        step("packed", 120, **one_b),
        step("compiled", 150, compiled=True, **one_b),
        Part("recipe-1b", "recipe.rate", 180),
        Part("recipe-1b-compiled", "recipe.rate", 180, {"overrides": ["training.compile=true"]}),
        step("sorted", 120, attention="sorted", **one_b),
        step("padded", 120, attention="padded", **one_b),
        step("mask", 120, attention="mask", **one_b),
        step("position_ids", 120, attention="position_ids", **one_b),
        Part("trl-packed", "recipe.trl", 150, {}, ("trl",)),
        feature("adamw_8bit", ["optimizer=adamw_8bit"]),
        feature("flex", ["attention=flex"]),
        feature("compile", ["training.compile=true"]),
        feature("fp8-compile", ["training.fp8=tensorwise", "training.compile=true"], ("torchao",)),
        feature("liger", ["loss=liger"], ("liger_kernel",)),
        feature("async-save", ["checkpoint.mode=async"]),
        Part("verify", "recipe.verify", 150),
        Part("idle-1b", "recipe.idle", 150),
        step("8b", 200, 130, **eight_b),
        step("8b-accumulated", 200, 132, **eight_b | {"micro_steps": 2, "steps": 2}),
        step("8b-compiled", 240, 130, compiled=True, **eight_b),
        step("8b-lora", 150, 60, ("peft",), shape="8b", pack=4096, lora=True, recompute="full"),
        step("8b-lora-compiled", 200, 60, ("peft",), shape="8b", pack=4096, lora=True, recompute="full", compiled=True),
        step("packed-liger", 120, needs=("liger_kernel",), loss="liger", **one_b),
        step("packed-plain-loss", 120, loss="plain", **one_b),
        step("packed-gsm8k", 120, documents="gsm8k", **one_b),
        kernel("flash", 120),
        kernel("te", 240),
        kernel("reference", 120),
    ]


def smoke_plan() -> list[Part]:
    """The same functions in miniature."""
    tiny = {"shape": "tiny", "pack": 256, "steps": 1, "repeats": 2, "warmup": 1}
    return [
        Part("imports", "machine.imports", 120),
        Part("ceilings", "machine.ceilings", 120),
        kernel("reference", 120),
        *(step(a, 120, attention=a, **tiny) for a in ("packed", "padded", "sorted", "mask", "position_ids")),
        step("plain-loss", 120, loss="plain", **tiny),
        step("lora", 120, needs=("peft",), lora=True, **tiny),
        Part("strict-step", "recipe.strict_step", 180),
        Part("recipe-1b", "recipe.rate", 180, {"is_tiny": True}),
        Part("idle-1b", "recipe.idle", 180, {"is_tiny": True}),
        Part("built-in-job", "recipe.built_in_job", 180, {"steps": 2}),
        feature("adamw_8bit", ["optimizer=adamw_8bit"]),
        Part("trl-packed", "recipe.trl", 150, {"is_tiny": True}, ("trl",)),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="the whole call ends by then")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--plan", default="full", choices=PLANS)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"))
    parser.add_argument("--only", nargs="*", default=[], help="these parts alone, again if they are done")
    parser.add_argument("--list-wheels", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.list_wheels:
        print("\n".join({**WHEELS, **OPTIONAL, **COMMON}))
        return 0
    parts = full_plan() if arguments.plan == "full" else smoke_plan()
    if arguments.part:
        return run_here(next(part for part in parts if part.name == arguments.part), arguments)
    if missing := [wheel for wheel, module in {**WHEELS, **COMMON}.items() if find_spec(module) is None]:
        print(f"Nothing was checked; first: pip install {' '.join(missing)}")
        return 2
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device here, nothing was checked. `--plan smoke --device cpu` tries this script.")
        return 0
    machine = {"device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"}
    machine |= {"torch": torch.__version__, "plan": arguments.plan}
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if arguments.device == "cuda" else 0.0
    from benchmarks.gpu.table import last_words, table

    deadline = time.monotonic() + 60 * arguments.minutes
    results = read_results(arguments.out, machine)
    for part in parts:
        if arguments.only and part.name not in arguments.only:
            continue
        if part.name not in arguments.only and results.get(part.name, {}).get("verdict") == "pass":
            continue
        found = skipped(part, arguments, gib) or run_apart(part, arguments, deadline)
        results[part.name] = {"part": part.name, **machine, **found}
        with arguments.out.open("a") as file:
            file.write(json.dumps(results[part.name]) + "\n")
        print(f"{part.name:22s} {found['verdict']:8s} {last_words(found.get('why'))}", flush=True)
    print("\n" + table([part.name for part in parts], results, machine))
    return int(any(result["verdict"] in ("FAIL", "timeout") for result in results.values()))


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
        return {"verdict": "missing", "why": f"needs {part.least_gib:.0f} GiB, this GPU has {gib:.0f}"}
    return None


def run_apart(part: Part, arguments: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """The part in a process of its own, whose whole process group ends with its deadline."""
    left_s = deadline - time.monotonic()
    if left_s < LEAST_S:
        return {"verdict": "no time"}
    verdict = "timeout" if part.limit_s < left_s else "no time"
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part.name, "--out", str(arguments.out)]
    command += ["--device", arguments.device, "--plan", arguments.plan]
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        screen, _ = process.communicate(timeout=min(part.limit_s, left_s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        screen, _ = process.communicate()
        return {"verdict": verdict, "seconds": time.monotonic() - began, "why": screen[-1500:]}
    lines = [line for line in screen.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"verdict": "FAIL", "seconds": time.monotonic() - began, "why": screen[-1500:]}
    return {**json.loads(lines[-1].removeprefix("RESULT ")), "seconds": time.monotonic() - began}


def run_here(part: Part, arguments: argparse.Namespace) -> int:
    """In the child: calls the part's function and prints its result."""
    module, name = part.call.split(".")
    options = {**part.arguments, "device": arguments.device}
    if module == "steps":
        ceilings = read_results(arguments.out, {}).get("ceilings", {})
        options |= {"peak_tflops": ceilings.get("data_sheet_tflops"), "ceiling_tflops": ceilings.get("product_tflops")}
    found = getattr(import_module(f"benchmarks.gpu.{module}"), name)(**options)
    print("RESULT " + json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
