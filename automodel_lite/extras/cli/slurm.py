"""`automodel-lite slurm`: an sbatch script for this cluster."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

from automodel_lite.cli.line import argument_parser
from automodel_lite.config.components import CONF_DIR, IS_INSTALLED
from automodel_lite.errors import ConfigError, did_you_mean

LAUNCH_DIR = CONF_DIR.parent / "launch"


def slurm(argv: list[str]) -> int:
    """Print an sbatch script for this cluster; with the sizes of its nodes as sinfo has them.

    automodel-lite slurm > job.sbatch
    sbatch job.sbatch --config-name finetune name=mine model.pretrained=... dataset.path=...
    """
    parser = argument_parser(slurm.__doc__)
    parser.add_argument("--recipe", help="one of your own, my_package.kd:main (default: train)")
    parser.add_argument("--partition", help="default: the cluster's")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--time", help="days-hours:minutes:seconds (default: the partition's limit, a day at most)"
    )
    parser.add_argument("--account", help="who pays for the job")
    parser.add_argument("--qos", help="quality of service")
    parser.add_argument("--constraint", help="features that the nodes must have, such as h100")
    parser.add_argument(
        "--mem", default="0", help="of each node (default: 0, all of it, as all GPUs are taken)"
    )
    parser.add_argument(
        "--module", action="append", default=[], help="loaded before the job, `module load ...`"
    )
    parser.add_argument(
        "--container", help="an image that has the package: .sif by Apptainer, any other by Pyxis"
    )
    parser.add_argument(
        "--mount",
        action="append",
        default=[],
        help="a folder that is visible inside: /data, or /scratch/me:/data under another name "
        "(this folder and HF_HOME are)",
    )
    parser.add_argument(
        "--prepare",
        type=int,
        metavar="TASKS",
        help="tokenize instead, in so many tasks of an array, one node each",
    )
    args = parser.parse_args(argv)
    if args.prepare is not None and (args.prepare < 1 or args.nodes > 1 or args.recipe):
        raise ConfigError(
            f"--prepare {args.prepare} is a number of tasks, at least 1, each of one node: leave "
            "--nodes and --recipe out."
        )
    if args.mount and not args.container:
        raise ConfigError(
            f"--mount {args.mount[0]} is of a container: set --container, or leave it out."
        )
    if args.nodes < 1:
        raise ConfigError(f"--nodes {args.nodes} must be at least 1.")
    print(_script(args), end="")
    return 0


def _script(args: argparse.Namespace) -> str:
    """The numbers of a partition, the Python and the package of this process; launch/slurm.sbatch
    does the rest.
    """
    part, limit, gpus, cpus, num_nodes = _partition(args.partition)
    if args.nodes > num_nodes:
        raise ConfigError(
            f"--nodes {args.nodes} must be at most {num_nodes}: the nodes of partition {part}."
        )
    gpus = 0 if args.prepare else gpus
    tasks = gpus or 1
    resources = {
        "partition": part,
        "account": args.account,
        "qos": args.qos,
        "constraint": args.constraint,
        "nodes": args.nodes,
        "ntasks-per-node": tasks,
        "mem": args.mem,
        "gpus-per-node": gpus,
        "cpus-per-task": max(1, cpus // tasks),
        "time": args.time or limit,
    }
    script = LAUNCH_DIR / "slurm.sbatch"
    purpose = "Trains on SLURM, one task per GPU"
    call = f'exec bash {shlex.quote(str(script))} "$@"'
    if args.prepare:
        resources["array"] = f"1-{args.prepare}"
        purpose = f"Tokenizes in {args.prepare} tasks; once they have ended, --array=0 merges them"
        call = (
            '[[ $SLURM_ARRAY_TASK_ID == 0 ]] || set -- "$@" --task "$SLURM_ARRAY_TASK_ID"\n'
            f"{call} --tasks {args.prepare}"
        )
    always = re.findall(r"(?m)^#SBATCH --(?!nodes|ntasks-per-node|time).*\n", script.read_text())
    lines = [
        "#!/bin/bash",
        f"# {purpose} (partition {part}): sbatch job.sbatch --config-name ...",
        *(f"#SBATCH --{key}={value}" for key, value in resources.items() if value),
        "".join(always).rstrip(),
        *(f"module load {name}" for name in args.module),
        *_exports(args),
        call,
    ]
    return "\n".join(lines) + "\n"


def _exports(args: argparse.Namespace) -> Iterator[str]:
    """Yields the variables that launch/slurm.sbatch reads; the Python may be set from outside."""
    command = f"run {args.recipe}" if args.recipe else "train"
    fixed = {
        "LAUNCH": str(LAUNCH_DIR),
        "RECIPE": f"-m automodel_lite {'prepare' if args.prepare else command}",
    }
    if args.container:  # with the Python and the package in it
        kind = "APPTAINER_IMAGE" if args.container.endswith(".sif") else "PYXIS_IMAGE"
        fixed |= {kind: args.container, "MOUNT": ",".join(args.mount)}
    if home := os.environ.get("HF_HOME"):  # the models' folder of this shell
        fixed["HF_HOME"] = home
    for key, value in fixed.items():
        yield f"export {key}={shlex.quote(value)}"
    defaults = {"PYTHON": "python" if args.container else sys.executable}
    if not IS_INSTALLED and not args.container:
        defaults["PYTHONPATH"] = str(LAUNCH_DIR.parent)
    for key, value in defaults.items():
        yield f"export {key}=${{{key}:-{shlex.quote(value)}}}"


def _partition(wanted: str | None) -> tuple[str, str, int, int, int]:
    """(name, time limit, GPUs of a node, CPUs of a node, number of nodes); raises ConfigError."""
    try:
        command = ["sinfo", "--noheader", "--format=%P|%l|%G|%c|%D"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise ConfigError(
            "there is no SLURM here (no sinfo): run this on the cluster's login node."
        ) from None
    if found.returncode:
        last = found.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{last}: SLURM does not answer: run this on the cluster's login node.")
    rows = [line.split("|") for line in found.stdout.splitlines() if line.count("|") == 4]
    rows.sort(key=lambda row: "*" not in row[0])  # the cluster's default, `name*`, first
    names = list(dict.fromkeys(row[0].rstrip("*") for row in rows))
    name = wanted or next(iter(names), "")
    mine = [row for row in rows if row[0].rstrip("*") == name]
    if not mine:
        raise ConfigError(
            f"--partition {name}: there is no such partition{did_you_mean(name, names)} "
            f"The partitions are {', '.join(names)}."
        )
    # `gpu:h100:8(S:0-1)` are 8; a day, or the partition's limit where it is shorter
    gpus = min(sum(map(int, re.findall(r"gpu(?::[^:,(]+)?:(\d+)", row[2]))) for row in mine)
    cpus = min(int(re.sub(r"\D", "", row[3]) or 1) for row in mine)
    limit = mine[0][1]
    is_long = limit in ("infinite", "n/a") or re.match(r"0*[1-9]\d*-", limit)
    return name, "24:00:00" if is_long else limit, gpus, cpus, sum(int(row[4]) for row in mine)
