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
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import NothingComputedError
from benchmarks.gpu.plan import Part

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, Any]
CACHE_BYTES = 16 * 2**20
START_S = 10.0  # until torch and transformers are imported
SAVING_S = 20.0
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
    """Runs the parts in one process. A part that fails or takes too long ends the process: the rest gets another one. A
    part that is expected to take longer than what is left is passed over, as one behind it may be shorter.

    deadline  of the whole call, by `time.monotonic`
    record    is called with each result as soon as it is there
    """
    worker: _Worker | None = None
    try:
        for part in parts:
            needed_s = part.seconds if worker else part.seconds + START_S
            if deadline - time.monotonic() < needed_s:
                record(part, {"verdict": "no time"})
                continue
            worker = worker or _Worker(arguments)
            found = worker.result(part, deadline)
            record(part, found)
            if found["verdict"] in ("FAIL", "timeout", "no time"):
                worker.end()
                worker = None
    except BaseException:  # the check is ended: nothing is waited for
        if worker:
            worker.end()
        raise
    if worker:
        worker.finish()


class _Worker:
    """A process that is told the parts one by one. It ends with this one, however that ends: its input is then closed."""

    def __init__(self, arguments: Namespace) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--worker"]
        command += ["--out", str(arguments.out), "--device", arguments.device]
        self.process = subprocess.Popen(
            [*command, "--plan", arguments.plan],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
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
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: there will be no more lines
            self.process.stdin.write(part.name + "\n")
            self.process.stdin.flush()
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

    def finish(self) -> None:
        """Lets it save what the compilers made, which comes behind the last result."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SAVING_S)
        self.end()

    def end(self) -> None:
        """Ends the process and its children, if they have not ended by themselves."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def names_of_parts() -> Iterator[str]:
    """Yields the names that the check writes, until it writes an empty one; ends this process and its children at once
    where the check has ended without a word.
    """
    names: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            names.put(line.strip())
        if os.getpgrp() == os.getpid():  # with its children
            os.killpg(0, 9)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    yield from iter(names.get, "")


def run_here(
    parts: dict[str, Part],
    names: Iterable[str],
    device: str,
    results: dict[str, Found],
    caches: Sequence[Path],
) -> int:
    """In the worker: calls each part's function and prints its result; stops at the first that fails, whose error may
    have left the GPU unusable.

    caches  archives of what the compilers made: all are read, and the first is written
    """
    ceilings = results.get("ceilings", {})
    load_caches(caches)
    group = ""
    for name in names:
        part = parts[name]
        group = part.group or part.name
        module, function = part.call.split(".")
        options = {**part.arguments, "device": device}
        if module == "steps":
            options["peak_tflops"] = ceilings.get("data_sheet_tflops")
            options["ceiling_tflops"] = ceilings.get("bf16_tflops")
        worked_s = _cpu_s()
        try:
            found = getattr(import_module(f"benchmarks.gpu.{module}"), function)(**options)
        except NothingComputedError as error:
            found = {"verdict": NO_NUMBERS, "why": str(error)}
        except Exception:
            found = {"verdict": "FAIL", "why": traceback.format_exc()[-1500:]}
        if part.published:
            found["published"] = part.published
        found["cpu_s"] = _cpu_s() - worked_s
        print("\nRESULT " + json.dumps(found), flush=True)
        if found["verdict"] == "FAIL":
            return 1
        _free(device)
    # results come first: on a lent machine the last seconds may be missing
    save_caches(caches[0], group)
    return 0


def _cpu_s() -> float:
    """Seconds that cores have worked for this process and its children."""
    return sum(os.times()[:4])


def load_caches(archives: Iterable[Path]) -> None:
    """Gives the compilers what earlier calls made: a graph costs seconds instead of a minute."""
    import torch

    for made in {name: made for path in archives for name, made in members(path).items()}.values():
        with suppress(Exception):  # of another torch
            torch.compiler.load_cache_artifacts(made)


def members(archive: Path) -> dict[str, bytes]:
    """Group -> what its process has compiled; none of a file that is missing or cut short."""
    try:
        with zipfile.ZipFile(archive) as file:
            return {name: file.read(name) for name in file.namelist()}
    except (OSError, zipfile.BadZipFile, zlib.error):
        return {}


def save_caches(archive: Path, group: str) -> None:
    """Adds what this process has compiled or found, if it is small enough to be carried along: one file for all."""
    import torch

    made = torch.compiler.save_cache_artifacts()
    if made is None or len(made[0]) >= CACHE_BYTES:
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    whole = archive.with_name(archive.name + ".new")
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in (members(archive) | {group: made[0]}).items():
            file.writestr(name, content)
    whole.replace(archive)


def _free(device: str) -> None:
    import torch

    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
