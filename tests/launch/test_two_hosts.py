"""Two hosts of one machine: network namespaces joined by a cable. One of them is lost while they train."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import warm_python
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


ENTERS = """
import ctypes, os, sys
with open(sys.argv.pop(1)) as namespace:
    assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET
if "LOCAL_RANK" in os.environ:
    from automodel_lite.cli import run_recipe
    run_recipe("recipes.train_ft:main")
else:
    from torch.distributed.run import main
    main()
"""
"""torchrun, or a rank that it starts: copies of a process that is in no namespace, which enter theirs."""


def start(hosts: list[str], folder: Path, *overrides: str) -> list[subprocess.Popen[bytes]]:
    """One torchrun a host."""
    program = folder / "enters.py"
    program.write_text(ENTERS)
    processes = []
    for number, host in enumerate(hosts):
        interface = subprocess.check_output(
            ["ip", "-n", host, "-o", "-4", "addr", "show", "scope", "global"], text=True
        )
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": interface.split()[1],
        }
        entering = [str(program), f"/var/run/netns/{host}"]
        launcher = ["--nnodes=2", "--nproc-per-node=1"]
        launcher += [f"--node-rank={number}", "--master-addr=10.77.0.1", "--master-port=29571"]
        settings = ["--config-name", "smoke", f"output_dir={folder}/run", *QUICK, *overrides]
        with open(folder / f"host{number}.log", "ab") as log:
            processes.append(
                subprocess.Popen(
                    [warm_python(), *entering, *launcher, *entering, *settings],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
    return processes


def lose(host: str) -> int:
    """SIGKILL for all that runs on it, torchrun and ranks; returns how many that are."""
    pids = subprocess.check_output(["ip", "netns", "pids", host], text=True).split()
    for pid in pids:
        subprocess.run(["kill", "-9", pid], capture_output=True)
    return len(pids)


def end(hosts: list[str], processes: list[subprocess.Popen[bytes]]) -> None:
    for host in hosts:
        lose(host)
    for process in processes:
        process.kill()
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
        assert lose(hosts[1]) >= 2
        began = time.monotonic()
        first[0].wait(timeout=120)
        took_s = time.monotonic() - began
        print(f"the other host left after {took_s:.1f} s")
        assert first[0].returncode != 0
        assert took_s < 30 + started_s
    finally:
        end(hosts, first)
    last = max(losses_by_step(tmp_path / "run")) + 20
    again = start(
        hosts, tmp_path, *options, f"training.max_steps={last}", "checkpoint.accept_changes=true"
    )
    try:
        assert [process.wait(timeout=180) for process in again] == [0, 0], (
            tmp_path / "host0.log"
        ).read_text()[-2000:]
    finally:
        end(hosts, again)
    assert sorted(losses_by_step(tmp_path / "run")) == list(range(1, last + 1))
    assert "continues from step_" in (tmp_path / "host0.log").read_text()
