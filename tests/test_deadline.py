"""A deadline ends Python that goes on for ever, in any thread, and nothing that ended in time."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from automodel_lite.interpreter import Deadline, DeadlineExceeded


def spin(seconds: float) -> int:
    rounds, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        rounds += 1
    return rounds


def test_an_endless_block_is_ended_here_and_in_a_thread() -> None:
    deadline = Deadline(0.2)
    caught = []

    def run() -> None:
        with pytest.raises(DeadlineExceeded), deadline:
            spin(30)
        caught.append(True)

    start = time.monotonic()
    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert caught == [True, True]
    assert time.monotonic() - start < 20


def test_short_blocks_go_on_and_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automodel_lite.interpreter.CHECK_EVERY_S", 0.001)
    deadline = pickle.loads(pickle.dumps(Deadline(0.05)))
    for _ in range(50):
        with deadline:
            assert spin(0.002) > 0
    with pytest.raises(KeyError), deadline:
        raise KeyError("x")


def test_a_block_that_swallows_the_exception_is_ended_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automodel_lite.interpreter.CHECK_EVERY_S", 0.001)
    swallowed = []

    def swallow() -> None:
        try:
            spin(30)
        except DeadlineExceeded as error:
            swallowed.append(error)

    with pytest.raises(DeadlineExceeded), Deadline(0.05):
        swallow()
    assert len(swallowed) == 1


def test_the_exception_never_leaks_behind_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end just when their time does: each is either ended or not, and what follows is left alone."""
    monkeypatch.setattr("automodel_lite.interpreter.CHECK_EVERY_S", 0.0005)
    deadline = Deadline(0.002)
    ended = 0
    for number in range(400):
        try:
            with deadline:
                spin(0.001 + 0.002 * (number % 20) / 20)
        except DeadlineExceeded:
            ended += 1
        spin(0.0005)
    assert 0 < ended < 400


def test_the_watching_thread_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automodel_lite.interpreter.CHECK_EVERY_S", 0.001)
    before = set(threading.enumerate())
    for _ in range(20):
        with Deadline(10):
            pass
    watchers = [thread for thread in threading.enumerate() if thread not in before]
    for thread in watchers:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in watchers)
