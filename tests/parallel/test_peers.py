"""Ranks that were started differently, or of which one meets a mistake: named on all of them, in seconds."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import automodel_lite
from automodel_lite.errors import ConfigError, DataError, PeerError
from automodel_lite.launched import this_process
from automodel_lite.parallel import peers as peers_module
from automodel_lite.parallel.peers import Peers, end_together, flat, open_peers, versions
from automodel_lite.run.stopping import StoppedEarly
from automodel_lite.training.launch import watch_ranks
from tests.ranks import run_ranks
from tests.runs import train_quick, wait_until

ROOT, PACKAGE = Path(__file__).resolve().parents[2], Path(automodel_lite.__file__).parent


def _compare(rank: int, world_size: int, facts: list[dict[str, Any]]) -> tuple[str, float]:
    began, peers = time.monotonic(), open_peers()
    try:
        peers.compare("settings", facts[rank])
    except ConfigError as error:
        return str(error), time.monotonic() - began
    peers.compare("data", {"tokens": 5})
    return "", time.monotonic() - began


def test_facts_that_differ_are_named_with_both_values() -> None:
    same = {"seed": 0, "optimizer.lr": 1e-3, "list": [1, None]}
    assert {text for text, _ in run_ranks(_compare, 3, [same] * 3)} == {""}
    other = {"seed": 0, "optimizer.lr": 2e-3, "list": [1, None], "more": "x"}
    for text, took_s in run_ranks(_compare, 3, [same, same, other]):
        assert re.search(r"optimizer.lr: 0.001 on rank 0 \(.*\), 0.002 on rank 2 \(", text)
        assert re.search(r"more: not set on rank 0 \(.*\), x on rank 2 \(", text)
        assert "seed" not in text
        assert took_s < 100  # and not the hour that a rank would be waited for


def test_what_is_compared() -> None:
    assert flat(
        {"a": {"b": 1, "c": {}}, "cache_dir": "/x", "training": {"num_threads": 2, "max_steps": 3}}
    ) == {
        "a.b": 1,
        "a.c": {},
        "training.max_steps": 3,
    }
    assert {
        "version of torch",
        "version of transformers",
        "files of automodel_lite",
    } <= versions().keys()


def test_files_of_the_package_are_those_that_are_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How families and columns are named stands in YAML."""
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "copy"))
    found = {versions.__wrapped__()["files of automodel_lite"]}
    monkeypatch.setattr(automodel_lite, "__file__", str(copy / "__init__.py"))
    for name in ("thd.py", "attention/families.yaml", "data/tokens/chat_template.jinja"):
        with (copy / name).open("a") as file:
            file.write("\n")
        found.add(versions.__wrapped__()["files of automodel_lite"])
    assert len(found) == 4


def _train_otherwise(rank: int, world_size: int, folder: str, overrides: list[list[str]]) -> str:
    # of a rank that is held up for a second, the watch would end the process
    peers_module._LOOK_EVERY_S = 10.0
    try:
        train_quick(Path(folder), *overrides[rank])
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=7", "seed: 0 on rank 0 .*, 7 on rank 1"),
        pytest.param(
            "mesh.timeout_s=17",
            "mesh.timeout_s: 600 on rank 0 .*, 17 on rank 1",
            marks=pytest.mark.system,
        ),
    ],
)
def test_a_run_of_different_settings_does_not_start(
    tmp_path: Path, override: str, said: str
) -> None:
    """Another seed or clipping on one node once trained to the end, with other losses."""
    began = time.monotonic()
    for text in run_ranks(_train_otherwise, 2, str(tmp_path / "run"), [[], [override]]):
        assert re.search(said, text), text
    assert time.monotonic() - began < 100
    assert not (tmp_path / "run").exists()


def _meet_a_mistake(rank: int, world_size: int, waits_in: str) -> str:
    peers = open_peers()
    heard: list[str] = []
    peers.on_failure = lambda error: heard.append(str(error))
    try:
        with end_together(peers):
            if rank == 1:
                raise DataError("a.jsonl:7: not JSON")
            if waits_in == "compare":
                peers.compare("data", {})
            while not heard:
                time.sleep(0.05)
            return heard[0]
    except (PeerError, DataError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ("a.jsonl:7: not JSON", "rank 0 on {}: a.jsonl:7: not JSON"),
        ("rank 0 on {}, in step 12: lost", "rank 0 on {}, in step 12: lost"),
    ],
    ids=["a mistake", "one that names its rank"],
)
def test_the_rank_that_failed_first_is_named_once(recorded: str, told: str) -> None:
    peers = Peers(dist.HashStore())
    host = socket.gethostname()
    peers.record(recorded.format(host), 1)
    assert str(peers.first_failure()) == told.format(host)


@pytest.mark.parametrize("waits_in", ["compare", "a collective"])
def test_the_mistake_of_one_rank_reaches_the_others_in_seconds(waits_in: str) -> None:
    began = time.monotonic()
    first, second = run_ranks(_meet_a_mistake, 2, waits_in)
    assert re.fullmatch(r"rank 1 on \S+: a.jsonl:7: not JSON", first)
    assert second == "a.jsonl:7: not JSON"
    assert time.monotonic() - began < 100


SCRIPT = """
import os
from automodel_lite.cli import run_recipe
from automodel_lite.errors import DataError
from recipes import train_ft
real = {where}
def hooked(*args):
    if os.environ["RANK"] == "1":
        raise DataError("dataset.path=/only/here does not exist")
    return real(*args)
{where} = hooked
run_recipe("recipes.train_ft:main")
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["train_ft.prepare_data", "train_ft.TrainFinetuneRecipe.step"])
def test_a_mistake_of_one_rank_is_printed_by_rank_0(tmp_path: Path, where: str) -> None:
    script = tmp_path / "hooked.py"
    script.write_text(SCRIPT.format(where=where))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    began = time.monotonic()
    done = subprocess.run(
        [
            *command,
            "--config-name",
            "smoke",
            f"output_dir={tmp_path}/run",
            "training.num_threads=1",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert time.monotonic() - began < 100
    assert re.search(
        r"^rank 1 on \S+: (rank 1: )?dataset.path=/only/here does not exist", done.stderr, re.M
    ), done.stderr
    if (tmp_path / "run").exists():
        assert '"failed"' in (tmp_path / "run/STATUS.json").read_text()


def _leave_late(rank: int, world_size: int) -> bool:
    peers = open_peers()
    with end_together(peers):
        peers.compare("settings", {})
        if rank == 1:
            time.sleep(0.5)
    return peers._store.check([f"left/{1 - rank}"])  # type: ignore[union-attr]


def test_the_rank_that_holds_the_store_leaves_last() -> None:
    """Of a run that is finished, rank 0 was done while rank 1 still read the store, and rank 1 exited with 1."""
    assert run_ranks(_leave_late, 2)[0]


def _stop_one(rank: int, world_size: int) -> str:
    heard: list[PeerError] = []
    try:
        with watch_ranks() as peers:
            peers.on_failure = heard.append
            if rank == 1:
                raise StoppedEarly(signal.SIGTERM)
            wait_until(lambda: bool(heard), 100)
            return f"{heard[0].exit_code} {heard[0]}"
    except StoppedEarly:
        return ""


def test_a_rank_that_a_signal_ends_takes_those_along_that_wait_for_it() -> None:
    """Rank 0, waiting in C++ for the connections of the others, heard neither its own signal nor that rank 1 was gone."""
    said, _ = run_ranks(_stop_one, 2)
    assert re.fullmatch(r"75 rank 1 on \S+: stopped by SIGTERM before the first step: .*", said)


def _die(rank: int, world_size: int) -> str:
    heard: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # known from the start under the number of a process that is gone
            pid = os.fork()
            os._exit(0) if pid == 0 else os.waitpid(pid, 0)
            patch.setattr(
                "automodel_lite.parallel.peers.this_process",
                lambda: replace(this_process(), pid=pid),
            )
        peers = open_peers()
        peers.on_failure = lambda error: heard.append(str(error))
        try:
            with end_together(peers):
                peers.compare("settings", {})
                while not heard:
                    time.sleep(0.05)
                return heard[0]
        except PeerError as error:
            return str(error)


def test_a_rank_that_is_killed_is_named_within_seconds() -> None:
    """Before training, where no collective would fail: the others once waited for over 700 s without a line."""
    began = time.monotonic()
    for said in run_ranks(_die, 2):
        assert re.fullmatch(
            r"rank 1 on \S+: ended without a message \(killed, out of memory, or a crash\)", said
        )
    assert time.monotonic() - began < 100


class Clock:
    """One that goes on by what is slept, in no time."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def _wait_alone(rank: int, world_size: int) -> str:
    """Rank 0 of three, of which the others never come."""
    os.environ |= {"WORLD_SIZE": "3"}
    said = io.StringIO()
    peers = open_peers()
    with redirect_stderr(said), pytest.MonkeyPatch.context() as patch, suppress(PeerError):
        for name, value in {"LINE_EVERY_S": 0.3, "_START_S": 1.0, "time": Clock()}.items():
            patch.setattr(f"automodel_lite.parallel.peers.{name}", value)
        peers.join()
        peers.compare("settings", {})
    return said.getvalue()


def test_a_rank_that_never_comes_is_named() -> None:
    lines = run_ranks(_wait_alone, 1)[0].splitlines()
    assert lines[0] == "waiting for ranks 1, 2: not started (0 s)"
    assert len(lines) == 3


def _get(store: dist.Store) -> None:
    with suppress(dist.DistError):
        store.get("late")


def test_a_watching_thread_has_a_store_of_its_own() -> None:
    """A `get` that waits holds the lock of its client: `check` through it came back after the whole wait."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=100), wait_for_workers=False)
    others = [store.clone(), store.clone()]  # type: ignore[attr-defined]
    waiting = threading.Thread(target=_get, args=(store,))
    waiting.start()
    time.sleep(0.3)  # it has begun to wait, most probably
    began = time.monotonic()
    assert not others[0].check(["failure"])
    assert time.monotonic() - began < 60
    others[1].set("late", "")
    waiting.join()


def _join_under(rank: int, world_size: int, numbers: list[int]) -> str:
    os.environ |= {"RANK": str(numbers[rank]), "WORLD_SIZE": str(world_size)}
    peers = open_peers()
    try:
        peers.join()
    except ConfigError as error:
        return str(error)
    return ""


def test_two_ranks_with_one_number_are_named() -> None:
    said = sorted(run_ranks(_join_under, 3, [0, 1, 1]))
    assert said[:2] == ["", ""]
    assert re.fullmatch(
        r"two processes of this job have RANK=1: process \d+ on \S+, and process \d+ on \S+: number them from 0 to 2\.",
        said[2],
    )


def _fall_silent(rank: int, world_size: int) -> str:
    """Rank 1, on a host of its own, ends without a word after three heartbeats: rank 0 cannot see its process."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    heard: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_LOOK_EVERY_S": 0.05, "_BEAT_EVERY_LOOKS": 2, "_DEAD_S": 2.0}.items():
            patch.setattr(f"automodel_lite.parallel.peers.{name}", value)
        peers = open_peers()
        peers.on_failure = lambda error: heard.append(str(error))
        peers.join()
        if rank == 1:
            wait_until(lambda: peers._store.add("beats/1", 0) >= 3, 100)  # type: ignore[union-attr]
            peers._is_over.set()
        else:
            wait_until(lambda: bool(heard), 100)
        dist.barrier()  # one that leaves as it should is not taken for dead
        peers.stop()
    return heard[0] if heard else ""


@pytest.mark.system
def test_a_host_without_heartbeats_is_taken_for_dead() -> None:
    first, _ = run_ranks(_fall_silent, 2)
    assert re.fullmatch(r"rank 1 on \S+: no heartbeat for \d+ s: its host may be down", first)
