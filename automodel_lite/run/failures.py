"""What goes wrong in a run: steps that are not finite, ranks that fail, ranks that make no progress.

Steps whose loss or gradient is not finite are dumped and skipped; too many in a row end the run.

    bad_steps/step_00000017/
        rank_00000.json           step, packs of the whole step, loss sum and gradient norm over all ranks
        rank_00000.safetensors    this rank's micro-batches: input_ids_0, labels_0, position_ids_0, cu_seqlens_0 ...

When one rank fails, the others fail a moment later in a collective: their errors are consequences. Every rank records
its error in logs/; a rank whose error is a consequence waits for the cause and reports that instead.

    logs/rank_00003.log         its traceback
    logs/failure_rank_00003.json

The watchdog writes the stacks of a rank that makes no progress to its log, so that a hang can be located. Another
process keeps the time (`guard.py`). A thread that holds the interpreter's lock writes the stacks, or, when it cannot
get the lock, the main thread writes its own. faulthandler's own timer walks the frames of running threads: it crashed
one healthy rank in 400 dumps.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from automodel_lite.errors import (
    CPU_MEMORY,
    ConfigError,
    DataError,
    RunStoppedError,
    is_lost_peer,
    is_out_of_memory,
    one_line,
)
from automodel_lite.models.layers import local
from automodel_lite.parallel.peers import Control
from automodel_lite.redact import scrub
from automodel_lite.run.durable import json_line, write_atomically
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.lock import RunLock
from automodel_lite.run.stopping import StoppedEarly
from automodel_lite.thd import ThdBatch


@torch.no_grad()
def are_finite(parameters: Iterable[Tensor], ranks: Control) -> bool:
    """Are all trained weights finite, on all ranks? Reads them once, which costs less than writing them."""
    bad = torch.zeros((), dtype=torch.bool)
    for parameter in parameters:
        if parameter.requires_grad:
            here = local(parameter)
            bad = bad.to(here.device) | ~torch.isfinite(here).all()
    return not ranks.max([int(bad)])[0]


class StepNumbers:
    """A step's loss (summed over its label tokens) and gradient norm over all ranks, on their way to the host."""

    def __init__(self, loss_sum: Tensor, grad_norm: Tensor) -> None:
        values = torch.stack([loss_sum.detach().float(), grad_norm.detach().float()])
        self._host = torch.empty(2, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._copied = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

    def read(self) -> tuple[float, float]:
        """Waits until the device has finished the step."""
        if self._copied is not None:
            self._copied.synchronize()
        loss_sum, grad_norm = self._host.tolist()
        return loss_sum, grad_norm


@dataclass
class BadSteps:
    """Counts the bad steps in a row, which the optimizer has skipped on the device.

    A step's numbers are read when the next step is under way (`watch`), or when they are wanted (`settle`), so that the
    device never waits for the host. Every rank calls every method, and the numbers are those of all ranks.
    """

    folder: Path
    max_in_a_row: int
    rank: int
    say: Callable[[str], None]
    in_a_row: int = 0
    _watched: tuple[int, Sequence[int], Sequence[ThdBatch], StepNumbers] | None = None

    def watch(self, step: int, pack_ids: Sequence[int], batches: Sequence[ThdBatch], numbers: StepNumbers) -> None:
        """Settles the step before; `batches` are kept until this one is settled."""
        self.settle()
        self._watched = (step, pack_ids, batches, numbers)

    def settle(self) -> None:
        """Waits for the step under watch: a bad one is dumped; raises RunStoppedError when it is one too many in a
        row.
        """
        if self._watched is None:
            return
        (step, pack_ids, batches, numbers), self._watched = self._watched, None
        loss_sum, grad_norm = numbers.read()
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            self.in_a_row = 0
        else:
            self._bad(step, pack_ids, batches, loss_sum, grad_norm)

    def _bad(
        self, step: int, pack_ids: Sequence[int], batches: Sequence[ThdBatch], loss_sum: float, grad_norm: float
    ) -> None:
        self.in_a_row += 1
        where = self.folder / f"step_{step:08d}"
        facts = {"step": step, "pack_ids": list(pack_ids), "loss_sum": loss_sum, "grad_norm": grad_norm}
        try:
            _dump(where, self.rank, facts, batches)
        except (OSError, SafetensorError) as error:
            self.say(f"WARNING: {where} cannot be written: {error}")
        what = f"step {step}: the loss or the gradient is not finite (gradient norm {grad_norm})"
        if self.in_a_row > self.max_in_a_row:
            raise RunStoppedError(
                f"{what}, the {_ordinal(self.in_a_row)} time in a row: the run stops; training.max_bad_steps="
                f"{self.max_in_a_row} are skipped. The packs {_first_few(pack_ids)} are dumped in {where}; no "
                "checkpoint was written since the last good step. Look at the data, lower optimizer.lr, or raise the "
                "warm-up."
            )
        self.say(f"{step:7d}  WARNING: {what}: not applied; packs {_first_few(pack_ids)}, dumped in {where}")


def _dump(where: Path, rank: int, facts: dict[str, object], batches: Sequence[ThdBatch]) -> None:
    where.mkdir(parents=True, exist_ok=True)
    (where / f"rank_{rank:05d}.json").write_text(json_line(facts))
    tensors = {}
    for number, batch in enumerate(batches):
        for name in ("input_ids", "labels", "position_ids", "cu_seqlens"):
            tensors[f"{name}_{number}"] = vars(batch)[name].cpu().contiguous().clone()
    save_file(tensors, where / f"rank_{rank:05d}.safetensors")


def _first_few(pack_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pack_ids[:8]))
    return f"{shown} and {len(pack_ids) - 8} more" if len(pack_ids) > 8 else shown


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


_WAIT_FOR_CAUSE_S = 5.0
_LOST_WORKER = re.compile(r"DataLoader worker \(pid")  # raised in the middle of whatever the rank is doing


Place = tuple[int | None, str | None]
"""The step that a run has done, and the name of its newest checkpoint."""


@contextmanager
def recorded(
    watchdog: Watchdog, lock: RunLock, memory: Callable[[], str], place: Callable[[], Place] = lambda: (None, None)
) -> Iterator[None]:
    """Leaves the error that passes in the run's logs and STATUS.json, if the folder is still this run's; replaces a
    consequence by its cause, as RunStoppedError. Nothing is left in a folder that another job has taken over: that job
    would mistake the record for one of its own ranks', and exit without a save on a stop signal.

    memory   what a full memory held, and what to change: see memory.out_of_memory_text
    """
    run, rank = watchdog.run, watchdog.rank
    record = run.logs / f"failure_rank_{rank:05d}.json"
    if rank == 0:
        for old in run.logs.glob("failure_rank_*.json"):
            old.unlink(missing_ok=True)
    try:
        yield
    except StoppedEarly as stopped:
        if rank == 0 and lock.is_held():
            run.end(stopped.state, str(stopped), *place())
        raise
    except Exception as error:
        doing = watchdog.doing
        is_mistake = isinstance(error, (ConfigError, DataError))
        is_consequence = is_lost_peer(error) and not is_out_of_memory(error)
        if lock.is_held() or not (is_mistake or lock.is_taken()):
            _leave_record(watchdog, record, error, is_consequence)
        cause = _cause_of(run.logs, rank, doing, error) if is_consequence else _sentence(error, rank, doing)
        if lock.is_held():
            run.end("failed", cause, *place())
        if is_out_of_memory(error):
            raise RunStoppedError(out_of_memory(error, rank, doing, memory())) from error
        if is_consequence:
            raise RunStoppedError(cause) from error
        if _LOST_WORKER.match(str(error)):
            raise RunStoppedError(_lost_worker(error, rank, doing)) from error
        raise


def _sentence(error: Exception, rank: int, doing: str) -> str:
    if isinstance(error, (ConfigError, DataError, RunStoppedError)):
        return str(error) if rank == 0 else f"rank {rank}: {error}"
    return f"rank {rank}, {doing}: {type(error).__name__}: {error}"


def out_of_memory(error: BaseException, rank: int, doing: str, memory: str) -> str:
    """What was tried, what the memory held, and what to change."""
    text = one_line(error, 400)
    if cpu := CPU_MEMORY.search(text):
        text = f"tried to allocate {int(cpu[1]) / 2**30:.2f} GiB."
    lines = [f"out of memory on rank {rank} ({socket.gethostname()}), {doing}: {text}"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak, now = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.memory_allocated() / 2**30
        lines.append(f"The GPU held at most {peak:.1f} GiB of tensors, {now:.1f} GiB at the end.")
    return "\n".join([*lines, memory])


def _lost_worker(error: BaseException, rank: int, doing: str) -> str:
    return (
        f"a data worker of rank {rank} on {socket.gethostname()} is gone, {doing}: {one_line(error)} Most often the "
        "host ran out of memory: lower dataloader.num_workers or dataloader.prefetch_factor. Run the same command "
        "again to continue from the newest checkpoint."
    )


def _leave_record(watchdog: Watchdog, path: Path, error: Exception, is_consequence: bool) -> None:
    facts = {
        "time": time.time(),
        "rank": watchdog.rank,
        "host": socket.gethostname(),
        "doing": watchdog.doing,
        "is_consequence": is_consequence,
        "error": scrub(f"{type(error).__name__}: {error}")[:1000],
    }
    try:
        with open(watchdog.log, "a") as log:
            log.write(scrub(f"{time.strftime('%F %T')} {watchdog.doing}\n{traceback.format_exc()}\n"))
        write_atomically(path, json.dumps(facts))
    except OSError:
        return  # the error itself is on its way to the screen


def _cause_of(folder: Path, rank: int, doing: str, error: Exception) -> str:
    """The message of a rank whose error is a consequence."""
    prefix = f"rank {rank} stopped, {doing}"
    end = time.monotonic() + _WAIT_FOR_CAUSE_S
    while time.monotonic() < end:
        causes = [facts for facts in _records(folder) if not facts["is_consequence"]]
        if causes:
            first = min(causes, key=lambda facts: float(facts["time"]))
            return f"{prefix}: rank {first['rank']} on {first['host']} failed first, {first['doing']}: {first['error']}"
        time.sleep(0.2)
    return (
        f"{prefix}: another rank ended without a message (killed, out of memory, or its host is down), or did not "
        f"answer within mesh.timeout_s: {one_line(error)}"
    )


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("failure_rank_*.json"):
        try:
            yield json.loads(path.read_text())
        except (OSError, ValueError):
            continue


_SIGNAL = signal.SIGRTMAX - 3  # unused elsewhere: USR1 is the scheduler's, USR2 submitit's
_END_S = 2.0


class Watchdog:
    """`beat` at every step; when the next beat does not come in time, the stacks of all threads go to the log, again
    and again.
    """

    def __init__(self, run: RunFolder, rank: int, after_s: float) -> None:
        self.run, self.rank = run, rank
        self.log = run.logs / f"rank_{rank:05d}.log"
        self.doing = "setting up"  # what the rank is at, for error reports
        self._after_s = after_s
        self._last = time.monotonic()
        self._file: TextIO | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, token: str) -> None:
        """From now on the rank is watched; `token` is the one in the run's lock. A run that never starts leaves no
        file.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.log, "a", buffering=1)  # noqa: SIM115 - open as long as the process
        faulthandler.register(_SIGNAL, self._file, all_threads=False)
        script = Path(__file__).with_name("guard.py")
        where = [str(self.run.path), str(self.rank), token, str(self._after_s), str(int(_SIGNAL))]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._guard.stdin
        os.set_blocking(self._guard.stdin.fileno(), False)  # a guard that hangs must not hold up its rank
        threading.Thread(target=self._answer, daemon=True).start()
        self._tell({"doing": self.doing})

    def beat(self, doing: str) -> None:
        """The rank begins something new."""
        now = time.monotonic()
        if self._file and self._after_s and now - self._last > self._after_s:
            self._file.write(f"the stacks above are of: {self.doing}; it took {now - self._last:.0f} s\n")
        self.doing, self._last = doing, now
        self._tell({"doing": doing})

    @property
    def is_in_step(self) -> bool:
        return self.doing.startswith("in step")

    def has_failed(self) -> bool:
        """Has any rank recorded an error?"""
        return any(self.run.logs.glob("failure_rank_*.json"))

    def stop(self) -> None:
        """Stops watching: the rank ends normally, or has recorded why not."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        self._tell({"bye": True}, guard)
        try:
            guard.wait(_END_S)
        except subprocess.TimeoutExpired:
            guard.kill()  # its signal would end this process, once nobody answers it
            guard.wait()
        faulthandler.unregister(_SIGNAL)

    def _tell(self, said: dict[str, object], guard: subprocess.Popen[bytes] | None = None) -> None:
        guard = guard or self._guard
        if guard is None:
            return
        assert guard.stdin
        with suppress(OSError):  # it is gone, or hangs: the training goes on without it
            os.write(guard.stdin.fileno(), json.dumps(said).encode() + b"\n")

    def _answer(self) -> None:
        """Writes the stacks whenever the guard requests them."""
        guard = self._guard
        assert guard
        assert guard.stdout
        while guard.stdout.read(1):
            self.dump()
            self._tell({"has_dumped": True})

    def dump(self) -> None:
        """The stacks of all threads, to the log."""
        assert self._file
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"Timeout ({timedelta(seconds=self._after_s)})! {time.strftime('%F %T')} {self.doing}\n"]
        for number, frame in sys._current_frames().items():
            if number != threading.get_ident():
                lines += [f"Thread {names.get(number, number)}:\n", *traceback.format_stack(frame)]
        with suppress(OSError, ValueError):  # the disk is full, or the process ends
            self._file.write(scrub("".join(lines)))
