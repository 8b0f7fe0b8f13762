"""Processes that run the parts of a group, one after another, with a deadline for each."""

from __future__ import annotations

import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import NothingComputedError
from benchmarks.gpu.plan import Part

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, Any]
CACHE_BYTES = 16 * 2**20
NO_NUMBERS = "no numbers"
"""Of a part that ran to where it compares numbers, on a card that computes none: neither passed nor failed."""


def environment() -> dict[str, str]:
    """Of every process: the checkout is found where the package is not installed, nobody waits for a hub that cannot be
    reached, and memory comes in growing segments, as the recipe's own start chooses.
    """
    known = os.environ | {"HF_HUB_OFFLINE": "1"}
    known["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    known.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return known


def run_group(
    parts: list[Part], arguments: Namespace, deadline: float, record: Callable[[Part, Found], None]
) -> None:
    """Runs the parts in one process. A part that fails or takes too long ends the process: the rest gets another one.

    deadline  of the whole call, by `time.monotonic`
    record    is called with each result as soon as it is there
    """
    waiting = list(parts)
    while waiting:
        if deadline - time.monotonic() < waiting[0].limit_s / 2:
            for part in waiting:
                record(part, {"verdict": "no time"})
            return
        worker = _Worker(waiting, arguments)
        is_running = True
        while waiting and is_running:
            part = waiting.pop(0)
            found = worker.result(part, deadline)
            record(part, found)
            is_running = found["verdict"] not in ("FAIL", "timeout", "no time")
        worker.end()


class _Worker:
    def __init__(self, parts: list[Part], arguments: Namespace) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--parts"]
        command += [part.name for part in parts]
        command += ["--out", str(arguments.out), "--device", arguments.device]
        self.process = subprocess.Popen(
            [*command, "--plan", arguments.plan],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def result(self, part: Part, deadline: float) -> Found:
        """Of the next part; without one, why: its time or the call's was over, or its process died."""
        began, screen = time.monotonic(), ""
        ends = min(began + part.limit_s, deadline)
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                verdict = "timeout" if began + part.limit_s < deadline else "no time"
                break
            if line is None:
                verdict = "FAIL"
                break
            if line.startswith("RESULT "):
                found: Found = json.loads(line.removeprefix("RESULT "))
                return {**found, "seconds": time.monotonic() - began}
            screen += line
        return {"verdict": verdict, "seconds": time.monotonic() - began, "why": screen[-1500:]}

    def end(self) -> None:
        """Ends the process and its children, if they have not ended by themselves."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def run_here(parts: list[Part], device: str, results: dict[str, Found], caches: Path) -> int:
    """In the worker: calls each part's function and prints its result; stops at the first that fails, whose error may
    have left the GPU unusable.

    caches  folder of what the compilers made, kept for the next call, which may run on a new machine
    """
    ceilings = results.get("ceilings", {})
    load_caches(caches)
    for part in parts:
        module, name = part.call.split(".")
        options = {**part.arguments, "device": device}
        if module == "steps":
            options["peak_tflops"] = ceilings.get("data_sheet_tflops")
            options["ceiling_tflops"] = ceilings.get("bf16_tflops")
        worked_s = _cpu_s()
        try:
            found = getattr(import_module(f"benchmarks.gpu.{module}"), name)(**options)
        except NothingComputedError as error:
            found = {"verdict": NO_NUMBERS, "why": str(error)}
        except Exception:
            found = {"verdict": "FAIL", "why": traceback.format_exc()[-1500:]}
        found["cpu_s"] = _cpu_s() - worked_s
        print("\nRESULT " + json.dumps(found), flush=True)
        if found["verdict"] == "FAIL":
            return 1
        save_caches(caches / f"{part.group or part.name}.bin")
        _free(device)
    return 0


def _cpu_s() -> float:
    """Seconds that cores have worked for this process and its children."""
    return sum(os.times()[:4])


def load_caches(folder: Path) -> None:
    """Gives the compilers what earlier calls made: a graph costs seconds instead of a minute."""
    import torch

    for path in sorted(folder.glob("*.bin")):
        with suppress(Exception):  # of another torch, or cut short
            torch.compiler.load_cache_artifacts(path.read_bytes())


def save_caches(path: Path) -> None:
    """Writes what this process has compiled or found, if it is small enough to be carried along."""
    import torch

    made = torch.compiler.save_cache_artifacts()
    if made is not None and len(made[0]) < CACHE_BYTES:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made[0])


def _free(device: str) -> None:
    import torch

    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
