"""Two hosts of one machine: network namespaces joined by a cable. One of them is lost while they train."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import QUICK, losses_by_step, wait_for_rows

ROOT = Path(__file__).resolve().parents[2]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces with the addresses 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and iproute2: apt-get install iproute2")
    names = [f"aml{os.getpid()}h{number}" for number in (1, 2)]
    try:
        for name in names:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    ends = [f"v{os.getpid()}{number}" for number in (1, 2)]
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for number, (name, end) in enumerate(zip(names, ends), start=1):
        _ip("link", "set", end, "netns", name)
        _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
        _ip("-n", name, "link", "set", end, "up")
        _ip("-n", name, "link", "set", "lo", "up")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start(hosts: list[str], folder: Path, *overrides: str) -> list[subprocess.Popen[bytes]]:
    """One torchrun a host, each in a process group of its own."""
    processes = []
    for number, host in enumerate(hosts):
        interface = subprocess.check_output(
            ["ip", "-n", host, "-o", "-4", "addr", "show", "scope", "global"], text=True
        )
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": interface.split()[1],
        }
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        launcher += [f"--node-rank={number}", "--master-addr=10.77.0.1", "--master-port=29571"]
        recipe = [
            "recipes/train_ft.py",
            "--config-name",
            "smoke",
            f"output_dir={folder}/run",
            *QUICK,
            *overrides,
        ]
        with open(folder / f"host{number}.log", "ab") as log:
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *launcher, *recipe],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return processes


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()


@pytest.mark.system
def test_a_lost_host_ends_the_job_and_it_goes_on_with_a_new_one(
    hosts: list[str], tmp_path: Path
) -> None:
    options = ["training.log_every_steps=1", "checkpoint.every_steps=5"]
    launched = time.monotonic()
    first = start(hosts, tmp_path, *options, "training.max_steps=100000")
    try:
        wait_for_rows(tmp_path / "run", more_than=12, seconds=180, log=tmp_path / "host0.log")
        started_s = time.monotonic() - launched  # tells how slow the machine is
        children = subprocess.run(
            ["pgrep", "-g", str(first[1].pid)], capture_output=True, text=True
        ).stdout.split()
        workers = subprocess.run(
            ["pgrep", "-P", children[-1]], capture_output=True, text=True
        ).stdout.split()
        for pid in {*children, *workers}:  # the second host is gone, torchrun and ranks
            subprocess.run(["kill", "-9", pid], capture_output=True)
        began = time.monotonic()
        first[0].wait(timeout=120)
        took_s = time.monotonic() - began
        print(f"the other host left after {took_s:.1f} s")
        assert first[0].returncode != 0
        assert took_s < 30 + started_s
    finally:
        end(first)
    last = max(losses_by_step(tmp_path / "run")) + 20
    again = start(
        hosts, tmp_path, *options, f"training.max_steps={last}", "checkpoint.accept_changes=true"
    )
    try:
        assert [process.wait(timeout=180) for process in again] == [0, 0], (
            tmp_path / "host0.log"
        ).read_text()[-2000:]
    finally:
        end(again)
    assert sorted(losses_by_step(tmp_path / "run")) == list(range(1, last + 1))
    assert "continues from step_" in (tmp_path / "host0.log").read_text()
