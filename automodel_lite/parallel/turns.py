"""Runs the passes of two micro-batches in turns, so that the rows that one sends to experts travel
under the other's products (mesh.ep_overlap).

    first    attention, router | experts           | attention, router | ...
    rows                  out ->|->          back ->|->
    second                     | attention, router | experts           | ...

Each micro-batch has a thread, and one of them runs at a time: who has launched an exchange hands
over, and waits for its rows when it is its turn again. The backward pass hands over at the same
exchanges. Turns depend on the model alone, never on time, so all ranks launch their collectives in
one order, and gradients are added up in one order.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


def pairs_before_last(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yields all but the last two by two; the last alone, as gradients are reduced behind it, and
    of an even number the first.

    >>> list(pairs_before_last("abcd"))
    ['a', 'bc', 'd']
    """
    before_last = items[:-1]
    first = len(before_last) % 2
    if first:
        yield before_last[:1]
    for start in range(first, len(before_last), 2):
        yield before_last[start : start + 2]
    if items:
        yield items[-1:]


def in_turns(
    first: Callable[[], Result], second: Callable[[], Result], device: torch.device
) -> list[Result]:
    """Runs both, the first in this thread, and returns what they return; raises what the one that
    failed has raised.

    Random numbers of the second have a seed that is drawn here.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_())
    turns = _Turns(device)
    results: dict[int, Result] = {}

    def run(own: int, function: Callable[[], Result]) -> None:
        error: BaseException | None = None
        _OWN.turns = turns
        _OWN.number = own
        try:
            turns.wait(own)
            if own == 1:
                torch.manual_seed(seed)
            # A backward pass runs in the thread that has called it: torch's own thread for a GPU
            # would run both passes, and wait for itself.
            with torch.autograd.set_multithreading_enabled(False):
                results[own] = function()
        except BaseException as raised:
            error = raised
        finally:
            _OWN.turns = None
            turns.leave(own, error)

    def run_second() -> None:
        if device.type == "cuda":  # the current one is each thread's own
            torch.cuda.set_device(device)
        run(1, second)

    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(run_second,), name="second micro-batch", daemon=True
    )
    thread.start()
    run(0, first)
    states = _random_states(device)
    thread.join()
    _set_random_states(device, states)
    if turns.error is not None:
        raise turns.error
    return [results[0], results[1]]


def takes_turns() -> bool:
    """Returns whether another micro-batch may run while this thread waits."""
    return _OWN.turns is not None


def hand_over() -> None:
    """Lets the other micro-batch run until it hands over or ends."""
    assert _OWN.turns is not None
    _OWN.turns.hand_over(_OWN.number)


# ---------------------------------------------- whose turn it is
class _Turns:
    """Two threads, of which one runs: 0 or 1."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._whose = 0
        self._running = {0, 1}
        self.error: BaseException | None = None

    def wait(self, own: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._whose == own or self.error is not None)
        if self.error is not None:
            raise _StoppedError

    def hand_over(self, own: int) -> None:
        # Each has its random numbers: a recomputation sets generators back to what they were in its
        # first run, in the middle of the other's work.
        states = _random_states(self._device)
        with self._changed:
            if 1 - own in self._running:
                self._whose = 1 - own
                self._changed.notify_all()
        self.wait(own)
        _set_random_states(self._device, states)

    def leave(self, own: int, error: BaseException | None) -> None:
        with self._changed:
            self._running.discard(own)
            self._whose = 1 - own
            if self.error is None and not isinstance(error, _StoppedError):
                self.error = error
            self._changed.notify_all()


class _StoppedError(BaseException):
    """Ends a thread whose partner has failed."""


class _Own(threading.local):
    turns: _Turns | None = None
    number = 0


_OWN = _Own()


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
