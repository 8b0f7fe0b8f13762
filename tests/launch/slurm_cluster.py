"""A real SLURM of two nodes on this host: from Debian's packages, without systemd, cgroups or a data base."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.ranks import free_port

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
KillWait=30
SlurmdTimeout=300
MessageTimeout=60
TCPTimeout=30
ReturnToService=2
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here; None when there can."""
    if not shutil.which("slurmctld"):
        return "needs SLURM: apt-get install slurm-wlm"
    return None if os.geteuid() == 0 else "needs root to start slurmd"


class Cluster:
    """`up` starts the daemons, `down` ends them; `call` runs a SLURM command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def up(self) -> None:
        ports = [free_port() for _ in range(3)]
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n]} CPUs=1 RealMemory=1000"
            for n in (1, 2)
        )
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(
            CONF.format(host=host, folder=self.folder, port=ports[0], nodes=nodes)
        )
        self.call("slurmctld", "-c")
        for n in (1, 2):
            (self.folder / f"spool-n{n}").mkdir()
            self.call("slurmd", "-N", f"n{n}")
        for _ in range(600):
            if self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2":
                return
            time.sleep(0.2)
        raise AssertionError(f"the nodes did not come up: {self.call('sinfo', '-R', '-l')}")

    def down(self) -> None:
        self.call("scancel", "--state=RUNNING", "-u", "root")
        for path in self.folder.glob("*.pid"):
            try:
                os.kill(int(path.read_text()), 15)
            except (ProcessLookupError, ValueError):
                continue

    def call(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state_of(self, job: str) -> str:
        return self.call("scontrol", "show", "job", job).split("JobState=")[1].split()[0]
