"""Runs a test function on several ranks (gloo, CPU), each a process of its own.

The processes come from a fork server that has loaded `tests.warm`, which saves each of them half a CPU-second.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.forked import INTERPRETER

TIMEOUT_S = 300
PROCESS_LIMIT_S = 240  # of one that shares the machine with others; alone it takes two
PRELOADED = ["tests.warm"]


def fork_server() -> ForkServerContext:
    """The context whose server has loaded `tests.warm`; it is started here, as the program would start it with less."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()
    context.set_executable(os.environ.get(INTERPRETER, sys.executable))
    forkserver.ensure_running()
    context.set_executable(sys.executable)
    return context


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """fn(rank, world_size, *args) on each rank, with the default process group up -> the results in rank order.

    `fn` is a function at the top level of a module; arguments and results are pickled. The first error of a rank is
    raised here as AssertionError with its traceback; the other ranks are ended. A rank that is done stays until all
    are: rank 0 may hold the store that a slower one has still to open.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank,
                args=(theirs, fn, rank, world_size, str(Path(folder, "store")), port, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port for one who listens with SO_REUSEADDR, as stores do; while it is bound here, nobody is given its number."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def free_port() -> int:
    """A port for other programs: below those of which the kernel gives one to whoever asks for any."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")


def in_a_process(fn: Callable[..., Any], folder: Path, *args: Any) -> tuple[int, str]:
    """fn(*args) in a process from the fork server, inside `folder` -> its exit code, and all that the screen shows."""
    process = fork_server().Process(target=_in_folder, args=(fn, folder, args))
    process.start()
    process.join(PROCESS_LIMIT_S)
    screen = (folder / "screen").read_text(errors="replace")
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{args} did not end within {PROCESS_LIMIT_S} s:\n{screen}")
    assert process.exitcode is not None
    return process.exitcode, screen


def _in_folder(fn: Callable[..., Any], folder: Path, args: tuple) -> None:
    os.chdir(folder)
    screen = os.open("screen", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    fn(*args)


def _collect(pipes: list[Connection]) -> list[Any]:
    """One message from each rank, the first failure first."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, TIMEOUT_S)
        if not ready:
            raise AssertionError(
                f"ranks {sorted(set(range(len(pipes))) - set(results))} gave no result: timeout"
            )
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died without a message") from None
            if not ok:
                raise AssertionError(
                    "\n".join(
                        [f"rank {rank} failed:\n{value}", *_other_failures(pipes, results, rank)]
                    )
                )
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _other_failures(pipes: list[Connection], results: dict[int, Any], first: int) -> Iterator[str]:
    """Of the ranks that fail within a second: the first message is often not that of the cause."""
    for rank, pipe in enumerate(pipes):
        if rank != first and rank not in results and pipe.poll(1.0):
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "died without a message"
            if not ok:
                yield f"rank {rank} failed too:\n{value}"


def _rank(
    pipe: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    port: int,
    args: tuple,
) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        dist.barrier()  # `fn` may end, and close its connections, before others have opened theirs
        result = fn(rank, world_size, *args)
        pipe.send((True, result))
        with suppress(EOFError):
            pipe.recv()  # nothing comes: it is closed when all are done
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.close()
        # gloo's threads abort one process in ten that is left to the interpreter's own clean-up
        os._exit(0)
