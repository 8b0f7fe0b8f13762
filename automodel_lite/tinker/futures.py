"""Futures of calls in process.

Calls that train are done when they are asked for. Prompts wait until an answer is wanted, so that
those which a script asks one by one are drawn as one batch; in which order is the script's own
order, the same on every rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture
from typing import Any, Generic, TypeVar

from tinker import APIFuture

T = TypeVar("T")
_QUIET_ROUNDS = 3  # of the event loop, in which no task has asked for more


class Future(APIFuture, Generic[T]):  # type: ignore[misc]
    """A call that is done, or waits until `start` is called.

    start       does what waits, this call among it
    num_waiting  how many wait
    """

    def __init__(
        self,
        start: Callable[[], None] | None = None,
        num_waiting: Callable[[], int] | None = None,
    ) -> None:
        self._future: ConcurrentFuture[T] = ConcurrentFuture()
        self._start = start
        self._num_waiting = num_waiting

    def result(self, timeout: float | None = None) -> T:
        return self.future().result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        if self._num_waiting is not None and not self._future.done():
            # the other tasks of the loop come to their own prompts first
            most = -1
            quiet = 0
            while quiet < _QUIET_ROUNDS and not self._future.done():
                await asyncio.sleep(0)
                found = self._num_waiting()
                quiet = quiet + 1 if found <= most else 0
                most = max(most, found)
        return self.future().result(timeout)

    def future(self) -> ConcurrentFuture[T]:
        if not self._future.done() and self._start is not None:
            self._start()
        return self._future

    def do(self, call: Callable[[], T]) -> None:
        """Takes what a call returns as the result, or its error; the first one stays."""
        if self._future.done():
            return
        try:
            value = call()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(value)


class ClientFuture(Future[T]):
    """A future of a client that is used as the client, too, as those of the service are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result(), name)


def done(call: Callable[[], T], kind: type[Future[T]] = Future) -> Any:
    """Returns the future of a call that is made now; its error is raised by the future."""
    found = kind()
    found.do(call)
    return found
