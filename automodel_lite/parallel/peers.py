"""The other ranks of a job, watched from the first line of `main`, through the launcher's store. Values are JSON.

    process/3           who rank 3 is: host, process number, start
    beats/3             grows while it lives
    left/3              it ended as it should
    settings/facts      of rank 0: every setting and version; each rank compares its own before the first step
    failure             the first error of any rank, the one record of who failed first; every rank exits with it

A process group would not do: a failed rank does not join the collective in which the others wait for mesh.timeout_s.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

import automodel_lite
from automodel_lite.config.components import flatten
from automodel_lite.errors import MISTAKE_EXIT, ConfigError, DataError, PeerError, RanksDifferError, one_line
from automodel_lite.launched import launched, rank, world_size
from automodel_lite.parallel.mesh import LINE_EVERY_S, RENDEZVOUS
from automodel_lite.parallel.processes import ProcessId, this_process
from automodel_lite.redact import scrub

_LOOK_EVERY_S = 0.5
_OWN_ERROR_S = 2.0  # for a rank to raise the same error itself
_CAUSE_WITHIN_S = 5.0  # for the rank that failed first to record it
_BEAT_EVERY_LOOKS = 10
_SILENT_S, _DEAD_S = 25.0, 60.0  # without a heartbeat: named, and taken for dead
_START_S = 600.0  # for a rank that has not started
_LATEST_S = 3600.0  # for one that has: reading data may take as long on a slow node
_GONE = "ended without a message (killed, out of memory, or a crash)"
MAY_DIFFER = ("cache_dir", "training.num_threads")
"""Settings that may differ between nodes."""


class Peers:
    """The other ranks; one object per rank. `leave` is called in a thread when another rank has failed."""

    def __init__(self, store: dist.Store | None, leave: Callable[[PeerError], None] = lambda error: None) -> None:
        self._store = store  # None: one process, or no launcher
        self.leave = leave
        self._is_over = threading.Event()

    def join(self) -> None:
        """Makes this rank known to the others and watches them from now on; raises ConfigError when another process has
        the same number.
        """
        if self._store is None:
            return
        if self._store.add(f"claims/{rank()}", 1) > 1:
            other = json.loads(self._store.get(f"process/{rank()}"))
            raise ConfigError(
                f"two processes of this job have RANK={rank()}: {_here()}, process {this_process().pid}, and process "
                f"{other['pid']} on {other['host']}: number them from 0 to {world_size() - 1}."
            )
        self._store.set(f"process/{rank()}", json.dumps(asdict(this_process())))
        threading.Thread(target=self._watch, daemon=True).start()

    def compare(self, topic: str, facts: Mapping[str, Any]) -> None:
        """Every rank calls it. Raises RanksDifferError on all of them when any rank's facts are not those of rank 0,
        and PeerError when a rank fails meanwhile or does not come.
        """
        if self._store is None:
            return
        mine = {key: _text(value) for key, value in {"WORLD_SIZE": world_size(), **facts}.items()}
        try:
            self._exchange(self._store, topic, mine)
        except dist.DistError as error:
            raise _no_store(error) from None

    def _exchange(self, store: dist.Store, topic: str, mine: dict[str, str]) -> None:
        if rank() == 0:
            store.set(f"{topic}/facts", json.dumps({"host": socket.gethostname(), "facts": mine}))
        else:
            self._wait(store, lambda: store.check([f"{topic}/facts"]), lambda: [0])
            first = json.loads(store.get(f"{topic}/facts"))
            if differing := _differences(first["facts"], mine):
                lines = [f"  {key}: {a} on rank 0 ({first['host']}), {b} on {_here()}" for key, a, b in differing]
                store.set(f"{topic}/differs", "\n".join(lines))
        self._meet(store, f"{topic}/at", lambda: store.check([f"{topic}/differs"]))
        if not store.check([f"{topic}/differs"]):
            return
        told = store.get(f"{topic}/differs").decode()
        with suppress(PeerError, dist.DistError):  # rank 0 may hold the store: it leaves last
            self._meet(store, f"{topic}/read", lambda: False, _OWN_ERROR_S)
        raise RanksDifferError(
            f"the processes of this job do not agree on its {topic}:\n{told}\nStart the same command on every node, "
            "with the same files and versions."
        )

    def _meet(self, store: dist.Store, place: str, is_settled: Callable[[], bool], latest_s: float = _LATEST_S) -> None:
        """Waits until every rank has come to this place, or the matter is settled without them."""
        store.set(f"{place}/{rank()}", "")
        store.add(place, 1)
        is_done = lambda: store.add(place, 0) >= world_size() or is_settled()  # noqa: E731
        missing = lambda: [r for r in range(world_size()) if not store.check([f"{place}/{r}"])]  # noqa: E731
        self._wait(store, is_done, missing, latest_s)

    def _wait(
        self,
        store: dist.Store,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        latest_s: float = _LATEST_S,
    ) -> None:
        """Waits, with a line every 30 s that names the ranks that are missing; raises PeerError when one has failed, or
        is too late.
        """
        began = time.monotonic()
        next_line = began + LINE_EVERY_S
        while not is_done():
            if store.check(["failure"]):
                raise self._failure(store)
            now = time.monotonic()
            if now < min(next_line, began + latest_s):
                time.sleep(_LOOK_EVERY_S / 10)
                continue
            absent = [r for r in missing() if not store.check([f"process/{r}"])]
            text = f"{_named(absent)}: not started" if absent else f"{_named(missing())}: still reading"
            if now >= began + (min(latest_s, _START_S) if absent else latest_s):
                raise PeerError(f"{text} after {now - began:.0f} s: look at the nodes of this job.", 1)
            if now >= next_line:
                next_line += LINE_EVERY_S
                _print(f"waiting for {text} ({now - began:.0f} s)")

    def tell(self, error: BaseException, doing: str = "") -> None:
        """Records that this rank ends with an error, unless another one was first."""
        self._is_over.set()
        is_mistake = isinstance(error, (ConfigError, DataError))
        is_sentence = is_mistake or type(error).__name__ == "RunStoppedError"
        text = str(error) if is_sentence else f"{type(error).__name__}: {one_line(error, 1000)}"
        text = f"{doing}: {text}" if doing and not is_sentence else text
        with suppress(dist.DistError, RuntimeError):  # the store is gone with the launcher: everybody ends anyway
            self._record(rank(), socket.gethostname(), text, MISTAKE_EXIT if is_mistake else 1)

    def _record(self, failed: int, host: str, text: str, code: int) -> None:
        if self._store is not None and self._store.add("failures", 1) == 1:
            facts = {"rank": failed, "host": host, "text": scrub(text), "code": code}
            self._store.set("failure", json.dumps(facts))

    def cause(self) -> PeerError | None:
        """Returns the first error of the job, for a rank that only noticed it; None when nobody records any."""
        if self._store is None:
            return None
        end = time.monotonic() + _CAUSE_WITHIN_S
        try:
            while time.monotonic() < end:
                if self.has_failed():
                    return self._failure(self._store)
                time.sleep(_LOOK_EVERY_S / 5)
        except (dist.DistError, RuntimeError) as error:
            return _no_store(error)
        return None

    def has_failed(self) -> bool:
        """Returns whether any rank has failed."""
        return self._store is not None and self._store.check(["failure"])

    def stop(self) -> None:
        """Ends the watch: this rank ends as it should, or has said why not."""
        self._is_over.set()
        if self._store is not None:
            with suppress(dist.DistError, RuntimeError):
                self._store.set(f"left/{rank()}", "")

    def _failure(self, store: dist.Store) -> PeerError:
        told = json.loads(store.get("failure"))
        return PeerError(f"rank {told['rank']} on {told['host']}: {told['text']}", told["code"])

    def _watch(self) -> None:
        assert self._store is not None
        listener, neighbors = _Listener(self._store), _Neighbors(self._store)
        looks = 0
        try:
            while not self._is_over.wait(_LOOK_EVERY_S):
                looks += 1
                if looks % _BEAT_EVERY_LOOKS == 0:
                    self._store.add(f"beats/{rank()}", 1)
                    if rank() == 0 and (dead := listener.silent_rank()):
                        self._record(dead[0], dead[1], f"no heartbeat for {_DEAD_S:.0f} s: its host may be down", 1)
                if gone := neighbors.gone():
                    self._record(gone[0], gone[1], _GONE, 1)
                if self.has_failed() and not self._is_over.wait(_OWN_ERROR_S):
                    self.leave(self._failure(self._store))
                    return
        except (dist.DistError, RuntimeError) as error:
            if not self._is_over.wait(_OWN_ERROR_S):
                self.leave(_no_store(error))


class _Neighbors:
    """The ranks of this host: whether their processes live can be seen."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        first = rank() - launched("LOCAL_RANK", 0)
        last = min(first + launched("LOCAL_WORLD_SIZE", world_size()), world_size())
        self._unknown = {number for number in range(max(first, 0), last) if number != rank()}
        self._known: dict[int, ProcessId] = {}

    def gone(self) -> tuple[int, str] | None:
        """Returns rank and host of one whose process is gone and did not end as it should."""
        for number in [number for number in self._unknown if self._store.check([f"process/{number}"])]:
            self._unknown.remove(number)
            self._known[number] = ProcessId(**json.loads(self._store.get(f"process/{number}")))
        for number, process in self._known.items():
            if process.is_gone() and not self._store.check([f"left/{number}"]):
                return number, process.host
        return None


class _Listener:
    """Rank 0 listens to all heartbeats. Silence is counted in its own rounds: a job that is suspended as a whole (a
    laptop, SLURM) goes on as if no time had passed.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> last count, seconds without another

    def silent_rank(self) -> tuple[int, str] | None:
        """Returns rank and host of one that is taken for dead; names those that are silent."""
        for number in range(1, world_size()):
            count = self._store.add(f"beats/{number}", 0)
            last, silent_s = self._beats.get(number, (0, 0.0))
            silent_s = silent_s + _LOOK_EVERY_S * _BEAT_EVERY_LOOKS if count == last else 0.0
            self._beats[number] = count, silent_s
            if count == 0 or silent_s < _SILENT_S or self._store.check([f"left/{number}"]):
                continue  # not started yet (who waits for it says so), or heard of
            host = json.loads(self._store.get(f"process/{number}"))["host"]
            if silent_s >= _DEAD_S:
                return number, host
            if silent_s % LINE_EVERY_S < _LOOK_EVERY_S * _BEAT_EVERY_LOOKS:
                _print(f"rank {number} on {host} is silent ({silent_s:.0f} s)")
        return None


_jobs_begun = 0


def open_peers(is_new_job: bool = False) -> Peers:
    """Returns the ranks of the job that this process is at; the words of the same ranks' next job are apart.

    A client of the store for itself alone: one that waits in a `get` holds its lock, and `check` would wait with it.
    """
    global _jobs_begun
    _jobs_begun += is_new_job
    store = RENDEZVOUS.store() if world_size() > 1 else None
    return Peers(None if store is None else dist.PrefixStore(str(max(_jobs_begun, 1)), store.clone()))  # type: ignore[attr-defined]


@contextmanager
def together(peers: Peers) -> Iterator[None]:
    """An error that passes ends all ranks."""
    try:
        peers.join()
        yield
    except PeerError:
        raise
    except Exception as error:
        peers.tell(error)
        raise
    finally:
        peers.stop()


def versions() -> dict[str, str]:
    """Returns the versions of what computes the numbers; this package's by its files, too."""
    package = Path(automodel_lite.__file__).parent
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    libraries = ("torch", "transformers", "tokenizers", "datasets", "numpy")
    found = {f"version of {name}": metadata.version(name) for name in libraries}
    return found | {"version of python": platform.python_version(), "files of automodel_lite": code.hexdigest()[:12]}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`, without what may differ."""
    return {key: value for key, value in flatten(dict(values)) if key not in MAY_DIFFER}


def _no_store(error: BaseException) -> PeerError:
    return PeerError(f"the launcher's store is gone, as rank 0 or the launcher has ended: {one_line(error)}", 1)


def _differences(first: dict[str, str], mine: dict[str, str]) -> list[tuple[str, str, str]]:
    keys = dict.fromkeys([*first, *mine])
    return [(k, first.get(k, "not set"), mine.get(k, "not set")) for k in keys if first.get(k) != mine.get(k)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _here() -> str:
    return f"rank {rank()} ({socket.gethostname()})"


def _named(ranks: list[int]) -> str:
    """`rank 3`, `ranks 3, 5`, at most eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _print(text: str) -> None:
    """One line per node."""
    if launched("LOCAL_RANK", 0) == 0:
        print(f"{'' if rank() == 0 else f'[rank {rank()}] '}{text}", file=sys.stderr, flush=True)
