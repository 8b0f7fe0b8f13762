"""The other ranks of a job, watched from the first line of `main`, through the launcher's store.
Values are JSON.

    process/3           who rank 3 is: host, process number, start
    beats/3             grows while it lives
    left/3              it ended as it should
    settings/3          every setting and version of rank 3, which rank 0 compares with its own
                        before the first step
    sha256/3            the files that rank 3 has hashed, for the ranks of its host
    failure             the first error of any rank, the one record of who failed first; every rank
                        exits with it

A process group would not do: a failed rank does not join the collective in which the others wait
for mesh.timeout_s.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

import automodel_lite
from automodel_lite.config.components import flatten
from automodel_lite.errors import (
    MISTAKE_EXIT,
    SENTENCES,
    ConfigError,
    DataError,
    PeerError,
    is_lost_peer,
    one_line,
)
from automodel_lite.launched import (
    ProcessId,
    launch_variable,
    named_ranks,
    rank,
    this_process,
    world_size,
)
from automodel_lite.parallel.mesh import LINE_EVERY_S, holds_store, launchers_store
from automodel_lite.redact import scrub

_LOOK_EVERY_S = 0.5
_OWN_ERROR_S = 2.0  # for a rank to raise the same error itself
_CAUSE_WITHIN_S = 5.0  # for the rank that failed first to record it
_BEAT_EVERY_LOOKS = 10
_DEAD_S = 60.0  # without a heartbeat
_START_S = 600.0  # for a rank that has not started
_LEAVE_S = 30.0  # for the others to end, once rank 0 is done
_LATEST_S = 3600.0  # for one that has: reading data may take as long on a slow node
_GONE = "ended without a message (killed, out of memory, or a crash)"
MAY_DIFFER = ("cache_dir", "training.num_threads")
"""Settings that may differ between nodes."""


class Peers:
    """The other ranks; one object per rank."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store  # None: one process, or no launcher
        # called in a thread when another rank has failed
        self.on_failure: Callable[[PeerError], None] = lambda error: None
        self._is_over = threading.Event()

    def join(self) -> None:
        """Makes this rank known, and watches the others; raises ConfigError when another process
        has its number.
        """
        if self._store is None:
            return
        mine = this_process()
        if self._store.add(f"claims/{rank()}", 1) > 1:
            other = json.loads(self._store.get(f"process/{rank()}"))
            raise ConfigError(
                f"two processes of this job have RANK={rank()}: process {mine.pid} on {mine.host}, "
                f"and process {other['pid']} on {other['host']}: number them from 0 to "
                f"{world_size() - 1}."
            )
        self._store.set(f"process/{rank()}", json.dumps(asdict(mine)))
        threading.Thread(target=self._watch, daemon=True).start()

    def compare(self, topic: str, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError on all ranks unless all have the same facts, PeerError when one fails
        or is late.
        """
        store = self._store
        if store is None:
            return
        values = {"WORLD_SIZE": world_size(), **flat(facts)}
        mine = {
            key: v if isinstance(v, str) else json.dumps(v, default=str)
            for key, v in values.items()
        }
        here = f"rank {rank()} ({socket.gethostname()})"
        lines = list[str]()
        try:
            # rank 0 alone compares, one rank after the other: the store has little to do, whatever
            # their number
            if rank() == 0:
                for other in range(1, world_size()):
                    self._wait(store, topic, range(other, world_size()))
                    there, theirs = json.loads(store.get(f"{topic}/{other}"))
                    for key in {**mine, **theirs}:
                        a = mine.get(key, "not set")
                        b = theirs.get(key, "not set")
                        lines += [f"  {key}: {a} on {here}, {b} on {there}"] if a != b else []
                store.set(f"{topic}/0", json.dumps(lines))
            else:
                store.set(f"{topic}/{rank()}", json.dumps([here, mine]))
                self._wait(store, topic, range(1))
                lines = json.loads(store.get(f"{topic}/0"))
        except dist.DistError as error:
            raise _no_store(error) from None
        if lines:
            if rank() == 0:
                # it may hold the store, which the others have still to read
                time.sleep(_OWN_ERROR_S)
            differing = "\n".join(lines)
            raise ConfigError(
                f"the processes of this job do not agree on its {topic}:\n{differing}\nStart the "
                "same command on every node, with the same files and versions."
            )

    def on_this_host(self) -> list[int]:
        """Returns the ranks of this host, in order, once `compare` has seen all ranks. By their
        processes and not by their numbers: SLURM may number the ranks of two hosts in turn.
        """
        if self._store is None:
            return [rank()]
        known = self._store.multi_get([f"process/{number}" for number in range(world_size())])
        processes = [ProcessId(**json.loads(text)) for text in known]
        return [number for number, process in enumerate(processes) if process.is_here()]

    def gather(self, topic: str, ranks: Sequence[int], value: Any) -> list[Any]:
        """Returns the values of these ranks, in their order; each of them calls it. Raises
        PeerError when one fails or is late.
        """
        store = self._store
        if store is None:
            return [value]
        try:
            store.set(f"{topic}/{rank()}", json.dumps(value))
            for number in ranks:
                self._wait(store, topic, range(number, number + 1))
            return [json.loads(store.get(f"{topic}/{number}")) for number in ranks]
        except dist.DistError as error:
            raise _no_store(error) from None

    def _wait(self, store: dist.Store, topic: str, ranks: range) -> None:
        """Waits for the first of these ranks; names those that are missing every 30 s, raises
        PeerError in the end.
        """
        began = time.monotonic()
        next_line = began + LINE_EVERY_S
        while not store.check([f"{topic}/{ranks[0]}"]):
            if store.check(["failure"]):
                raise self._failure()
            time.sleep(_LOOK_EVERY_S / 10)
            now = time.monotonic()
            if now < next_line:
                continue
            next_line += LINE_EVERY_S
            late = [number for number in ranks if not store.check([f"{topic}/{number}"])]
            absent = [number for number in late if not store.check([f"process/{number}"])]
            text = (
                f"{named_ranks(absent)}: not started"
                if absent
                else f"{named_ranks(late)}: still reading"
            )
            if now >= began + (_START_S if absent else _LATEST_S):
                raise PeerError(
                    f"{text} after {now - began:.0f} s: look at the nodes of this job.", 1
                )
            if launch_variable("LOCAL_RANK", 0) == 0:  # one line per node
                who = f"[rank {rank()}] " if rank() else ""
                print(f"{who}waiting for {text} ({now - began:.0f} s)", file=sys.stderr, flush=True)

    def report(self, error: BaseException, doing: str = "") -> None:
        """Records that this rank ends with an error, unless another one was first."""
        self._is_over.set()
        is_mistake = isinstance(error, (ConfigError, DataError))
        is_sentence = isinstance(error, SENTENCES)
        text = str(error) if is_sentence else f"{type(error).__name__}: {one_line(error, 1000)}"
        text = f"{doing}: {text}" if doing and not is_sentence else text
        self.record(text, MISTAKE_EXIT if is_mistake else 1)

    def record(self, text: str, code: int) -> None:
        """Records that this rank ends, as by a signal, unless another one was first: all others end
        with this code.
        """
        # the store is gone with the launcher: everybody ends anyway
        with suppress(dist.DistError, RuntimeError):
            self._record(rank(), socket.gethostname(), text, code)

    def _record(self, failed: int, host: str, text: str, code: int) -> None:
        if self._store is not None and self._store.add("failures", 1) == 1:
            facts = {"rank": failed, "host": host, "text": scrub(text), "code": code}
            self._store.set("failure", json.dumps(facts))

    def first_failure(self) -> PeerError | None:
        """Returns the first error of the job, for a rank that only noticed it; None when nobody
        records any.
        """
        end = time.monotonic() + _CAUSE_WITHIN_S
        try:
            while self._store is not None and time.monotonic() < end:
                if self._store.check(["failure"]):
                    return self._failure()
                time.sleep(_LOOK_EVERY_S / 5)
        except (dist.DistError, RuntimeError) as error:
            return _no_store(error)
        return None

    def stop(self) -> None:
        """Ends the watch: this rank ends as it should, or has said why not."""
        self._is_over.set()
        if self._store is not None:
            with suppress(dist.DistError, RuntimeError):
                self._store.set(f"left/{rank()}", "")

    def keep_store(self) -> None:
        """Waits on the rank that holds the store until the others that were seen have left, or are
        gone: of a run that is finished already, rank 0 was done while others still read the store,
        and they failed.
        """
        if self._store is None or not holds_store():
            return
        end = time.monotonic() + _LEAVE_S
        others = [n for n in range(1, world_size()) if self._store.check([f"process/{n}"])]
        while time.monotonic() < end:
            late = [number for number in others if not self._store.check([f"left/{number}"])]
            others = [number for number in late if not self._process(number).is_gone()]
            if not others:
                return
            time.sleep(_LOOK_EVERY_S / 10)

    def _process(self, number: int) -> ProcessId:
        assert self._store is not None
        return ProcessId(**json.loads(self._store.get(f"process/{number}")))

    def _failure(self) -> PeerError:
        assert self._store is not None
        first = json.loads(self._store.get("failure"))
        text = first["text"]
        at = f"rank {first['rank']} on {first['host']}"
        if at not in text:
            text = f"{at}: {text}"
        return PeerError(text, first["code"])

    def _watch(self) -> None:
        """In a thread: ends this rank when another one has failed, and records one that can no
        longer do it itself.
        """
        store = self._store
        assert store is not None
        neighbors: dict[int, ProcessId] = {}
        beats: dict[int, tuple[int, float]] = {}
        looks = 0
        try:
            while not self._is_over.wait(_LOOK_EVERY_S):
                looks += 1
                if looks % _BEAT_EVERY_LOOKS == 0:
                    self._beat(store, beats)
                self._look_at_neighbors(store, neighbors)
                if not store.check(["failure"]):
                    continue
                # read now: the rank that holds the store may end in the meantime
                first_failure = self._failure()
                if not self._is_over.wait(_OWN_ERROR_S):
                    store.set(f"left/{rank()}", "")
                    self.on_failure(first_failure)
                    return
        except (dist.DistError, RuntimeError) as error:
            if not self._is_over.wait(_OWN_ERROR_S):
                self.on_failure(_no_store(error))

    def _beat(self, store: dist.Store, beats: dict[int, tuple[int, float]]) -> None:
        """Counts up this rank's heartbeat; rank 0 records the failure of a rank without one.

        beats  of each rank: its last count, and the seconds since it changed
        """
        store.add(f"beats/{rank()}", 1)
        if rank() == 0 and (dead := _silent_rank(store, beats)) is not None:
            host = json.loads(store.get(f"process/{dead}"))["host"]
            reason = f"no heartbeat for {_DEAD_S:.0f} s: its host may be down"
            self._record(dead, host, reason, 1)

    def _look_at_neighbors(self, store: dist.Store, neighbors: dict[int, ProcessId]) -> None:
        """Records the failure of ranks of this host whose processes are gone.

        neighbors  those that have told their process so far; more are added
        """
        first = max(0, rank() - launch_variable("LOCAL_RANK", 0))
        last = min(first + launch_variable("LOCAL_WORLD_SIZE", world_size()), world_size())
        for other in range(first, last):
            is_new = other not in neighbors and other != rank()
            if is_new and store.check([f"process/{other}"]):
                neighbors[other] = self._process(other)
        for other, process in neighbors.items():
            if process.is_gone() and not store.check([f"left/{other}"]):
                self._record(other, process.host, _GONE, 1)


def _silent_rank(store: dist.Store, beats: dict[int, tuple[int, float]]) -> int | None:
    """Returns a rank that is taken for dead. Rank 0 calls it in each of its rounds, which count the
    seconds: a job that is suspended as a whole (a laptop, SLURM) goes on. `beats` has the last
    count of each rank, and the seconds since.
    """
    for other in range(1, world_size()):
        count = store.add(f"beats/{other}", 0)
        last, silent_s = beats.get(other, (0, 0.0))
        silent_s += _LOOK_EVERY_S * _BEAT_EVERY_LOOKS
        if count != last:
            silent_s = 0.0
        beats[other] = (count, silent_s)
        has_started = count > 0
        if has_started and silent_s >= _DEAD_S and not store.check([f"left/{other}"]):
            return other
    return None


_JOBS = itertools.count(1)


def open_peers() -> Peers:
    """Returns the ranks of the job that this process is at; what the same ranks' next job writes is
    apart.
    """
    number = next(_JOBS)
    if world_size() == 1:
        return Peers(None)
    # a client of its own: one that waits in a `get` holds its lock, and `check` would wait with it
    return Peers(
        dist.PrefixStore(
            f"peers of job {number}",
            launchers_store().clone(),  # type: ignore[attr-defined]
        )
    )


@contextmanager
def end_together(peers: Peers) -> Iterator[None]:
    """An error that passes ends all ranks, each with the first one: a rank that only noticed that
    another one is gone looks up why.
    """
    is_told = True
    try:
        peers.join()
        yield
    except PeerError:
        raise
    except Exception as error:
        if is_lost_peer(error) and (cause := peers.first_failure()):
            raise cause from error
        peers.report(error)
        raise
    except BaseException:  # a signal, of which the others may know nothing
        is_told = False
        raise
    finally:
        peers.stop()
        if is_told:
            peers.keep_store()


@cache
def versions() -> dict[str, str]:
    """Returns the versions of what computes the numbers; this package's by its files, too."""
    package = Path(automodel_lite.__file__).parent
    code = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".yaml", ".json", ".jinja"):
            code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    libraries = ("torch", "transformers", "tokenizers", "datasets", "numpy")
    return {
        **{f"version of {name}": metadata.version(name) for name in libraries},
        "version of python": platform.python_version(),
        "files of automodel_lite": code.hexdigest()[:12],
    }


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`, without what may differ."""
    return {key: value for key, value in flatten(dict(values)) if key not in MAY_DIFFER}


def _no_store(error: BaseException) -> PeerError:
    gone = f"the launcher's store is gone, as rank 0 or the launcher has ended: {one_line(error)}"
    return PeerError(gone, 1, is_printed=False)
