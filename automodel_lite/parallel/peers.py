"""Messages between the processes of a job, on the host, apart from gradients and checkpoints. Values travel as JSON.

`Control` sends small messages over a gloo group of its own. `Peers` uses the launcher's store, from the start:

    settings/facts      of rank 0: every setting and version; each rank compares its own before the first step
    failure             the first error of a rank: every rank exits at once, and rank 0 prints it too

A process group would not work: a failed rank does not join the collective in which the others wait for mesh.timeout_s.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automodel_lite.config.components import flatten
from automodel_lite.config.schema import MeshConfig
from automodel_lite.errors import ConfigError, DataError, PeerError, RanksDifferError, RunStoppedError
from automodel_lite.parallel.mesh import RENDEZVOUS, rank, world_size
from automodel_lite.redact import scrub

_ERRORS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "DataError": DataError,
    "RunStoppedError": RunStoppedError,
    "OSError": OSError,
}


@dataclass(frozen=True)
class Control:
    """`group` is None for a run of one process."""

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.group else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if self.group else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def max(self, values: Sequence[int]) -> list[int]:
        """The largest value over all ranks, for each place."""
        if self.group is None:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group)
        return agreed.tolist()

    def sum(self, value: int) -> int:
        if self.group is None:
            return value
        total = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def on_first(self, fn: Callable[[], Any]) -> Any:
        """Calls fn on rank 0 alone: every rank gets its value (JSON), or its error: the same one of `_ERRORS`, or
        RuntimeError.
        """
        if self.group is None:
            return fn()
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        if self.is_first:
            try:
                answer = {"value": fn()}
            except Exception as error:
                failure = error
                kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "RuntimeError")
                number = error.errno if isinstance(error, OSError) else None
                answer = {"error": kind, "number": number, "text": _decoded(error)}
        answer = self._from_first(answer)
        if failure is not None:
            raise failure
        if "error" in answer:
            arguments = (answer["text"],) if answer["number"] is None else (answer["number"], answer["text"])
            raise _ERRORS.get(answer["error"], RuntimeError)(*arguments)
        return answer["value"]

    def barrier(self) -> None:
        if self.group is not None:
            dist.all_reduce(torch.zeros(1), group=self.group)

    def _from_first(self, answer: dict[str, Any]) -> Any:
        text = json.dumps(answer).encode()
        size = torch.tensor(len(text))
        dist.broadcast(size, 0, group=self.group)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.is_first else torch.empty(int(size)).byte()
        dist.broadcast(data, 0, group=self.group)
        return json.loads(data.numpy().tobytes())


SLOW_TIMEOUT_S = 3600  # a slow disk is not a dead rank


def open_control(config: MeshConfig, is_slow: bool = False) -> Control:
    """A new control group over all ranks (every rank calls it), or none without a launcher.

    A slow group waits an hour for a rank that is writing a checkpoint or finishing the run.
    """
    if not dist.is_initialized():
        return Control(None)
    timeout_s = max(config.timeout_s, SLOW_TIMEOUT_S) if is_slow else config.timeout_s
    return Control(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def _decoded(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


_LOOK_EVERY_S = 0.25
_OWN_ERROR_S = 2.0  # for a rank to raise the same error itself
_RANK_0_ERROR_S = 4.0  # for rank 0 to raise it, where torch is slow to import
_PRINT_S = 5.0  # for the rank that failed to print why
_LATEST_S = 3600.0  # for slow nodes: reading data may take as long
MAY_DIFFER = ("cache_dir", "training.num_threads")
"""Settings that may differ between nodes."""


class Peers:
    """The other ranks of the job; one object per rank."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store  # None: one process, or no launcher
        self._is_over = threading.Event()

    def compare(self, topic: str, facts: Mapping[str, Any]) -> None:
        """Every rank calls it. Raises RanksDifferError on all of them when any rank's facts are not those of rank 0,
        and PeerError when a rank fails meanwhile.
        """
        if self._store is None:
            return
        try:
            self._exchange(self._store, topic, {key: _text(value) for key, value in facts.items()})
        except dist.DistError as error:
            raise PeerError(f"the launcher's store is gone, as rank 0 or the launcher has ended: {error}") from None

    def _exchange(self, store: dist.Store, topic: str, mine: dict[str, str]) -> None:
        if rank() == 0:
            store.set(f"{topic}/facts", json.dumps({"host": socket.gethostname(), "facts": mine}))
        else:
            first = json.loads(self._wait_for(f"{topic}/facts"))
            if differing := _differences(first["facts"], mine):
                lines = [f"  {key}: {a} on rank 0 ({first['host']}), {b} on {_here()}" for key, a, b in differing]
                store.set(f"{topic}/differs", "\n".join(lines))
        self._wait_for_all(store, f"{topic}/arrived", _LATEST_S)
        if not store.check([f"{topic}/differs"]):
            return
        told = store.get(f"{topic}/differs").decode()
        with suppress(PeerError, dist.DistError):  # rank 0 may hold the store: it leaves last
            self._wait_for_all(store, f"{topic}/read", _OWN_ERROR_S)
        raise RanksDifferError(
            f"the processes of this job do not agree on its {topic}:\n{told}\nStart the same command on every node, "
            "with the same files and versions."
        )

    def _wait_for_all(self, store: dist.Store, counter: str, seconds: float) -> None:
        """Until every rank has come here; raises PeerError when one fails, or the time is over."""
        store.add(counter, 1)
        end = time.monotonic() + seconds
        while (arrived := store.add(counter, 0)) < world_size():
            self._look(end, f"{world_size() - arrived} of {world_size()} processes did not start, or are still reading")

    def watch(self, leave: Callable[[PeerError], None]) -> None:
        """From now on `leave` is called, in a thread, when another rank has failed."""
        if self._store is not None:
            threading.Thread(target=self._watch, args=(leave,), daemon=True).start()

    def tell(self, error: Exception) -> None:
        """This rank ends with a mistake."""
        self._is_over.set()
        if self._store is None:
            return
        with suppress(dist.DistError, RuntimeError):  # the store is gone with the launcher: everybody ends anyway
            said = json.dumps({"rank": rank(), "host": socket.gethostname(), "text": scrub(str(error))})
            if rank() == 0:
                self._store.set("mistake/0", said)
            if not self._store.check(["failure"]):
                self._store.set("failure", said)

    def is_told_by_first(self, message: str) -> bool:
        """Has rank 0 met the same mistake, and printed it? Waits a moment."""
        if self._store is None:
            return rank() == 0
        end = time.monotonic() + _RANK_0_ERROR_S
        with suppress(dist.DistError, RuntimeError):
            while time.monotonic() < end:
                if self._store.check(["mistake/0"]):
                    return json.loads(self._store.get("mistake/0"))["text"] == scrub(message)
                time.sleep(_LOOK_EVERY_S)
        return False

    def have_printed(self) -> None:
        """This rank has printed its error: the launcher may end it now."""
        if self._store is not None:
            with suppress(dist.DistError, RuntimeError):
                self._store.set("printed", "")

    def stop(self) -> None:
        self._is_over.set()

    def _watch(self, leave: Callable[[PeerError], None]) -> None:
        assert self._store is not None
        try:
            while not self._is_over.wait(_LOOK_EVERY_S):
                if self._store.check(["failure"]) and not self._is_over.wait(_OWN_ERROR_S):
                    leave(self._failure())
                    return
        except (dist.DistError, RuntimeError):
            return  # the store is gone: the job ends

    def _wait_for(self, key: str) -> bytes:
        assert self._store is not None
        end = time.monotonic() + _LATEST_S
        while not self._store.check([key]):
            self._look(end, "rank 0 did not start, or is still reading")
        value: bytes = self._store.get(key)
        return value

    def _look(self, end: float, problem: str) -> None:
        """Between two looks at the store: raises PeerError when a rank has failed, or the time is over."""
        assert self._store is not None
        if self._store.check(["failure"]):
            raise self._failure()
        if time.monotonic() > end:
            raise PeerError(f"{problem}: look at the nodes of this job.")
        time.sleep(_LOOK_EVERY_S / 5)

    def _failure(self) -> PeerError:
        assert self._store is not None
        told = json.loads(self._store.get("failure"))
        end = time.monotonic() + _PRINT_S
        while time.monotonic() < end and not self._store.check(["printed"]):
            time.sleep(_LOOK_EVERY_S)
        return PeerError(f"rank {told['rank']} on {told['host']}: {told['text']}")


_jobs_begun = 0


def open_peers(is_new_job: bool = False) -> Peers:
    """Of the job that this process is at; its words are its own when the same ranks do several, one after the other."""
    global _jobs_begun
    _jobs_begun += is_new_job
    store = RENDEZVOUS.store() if world_size() > 1 else None
    return Peers(None if store is None else dist.PrefixStore(str(max(_jobs_begun, 1)), store))


@contextmanager
def together(peers: Peers) -> Iterator[None]:
    """A mistake that passes ends all ranks."""
    try:
        yield
    except PeerError:
        peers.stop()
        raise
    except (ConfigError, DataError) as error:
        peers.tell(error)
        raise
    finally:
        peers.stop()


def versions() -> dict[str, str]:
    """Of what computes the numbers; of this package by its files, too."""
    package = Path(__file__).resolve().parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    libraries = ("torch", "transformers", "tokenizers", "datasets", "numpy")
    found = {f"version of {name}": metadata.version(name) for name in libraries}
    return found | {"version of python": platform.python_version(), "files of automodel_lite": code.hexdigest()[:12]}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`, without what may differ."""
    return {key: value for key, value in flatten(dict(values)) if key not in MAY_DIFFER}


def _differences(first: dict[str, str], mine: dict[str, str]) -> list[tuple[str, str, str]]:
    keys = dict.fromkeys([*first, *mine])
    return [(k, first.get(k, "not set"), mine.get(k, "not set")) for k in keys if first.get(k) != mine.get(k)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _here() -> str:
    return f"rank {rank()} ({socket.gethostname()})"
