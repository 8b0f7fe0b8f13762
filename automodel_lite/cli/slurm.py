"""`automodel-lite slurm`: an sbatch script for this cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from automodel_lite.cli.line import argument_parser
from automodel_lite.config.components import CONF_DIR, IS_INSTALLED
from automodel_lite.errors import ConfigError, did_you_mean

LAUNCH_DIR = CONF_DIR.parent / "launch"


def slurm(argv: list[str]) -> int:
    """Print an sbatch script for this cluster; what sinfo says of its nodes is filled in.

    automodel-lite slurm > job.sbatch
    sbatch job.sbatch --config-name finetune name=mine model.pretrained=... dataset.path=...
    """
    parser = argument_parser(slurm.__doc__)
    parser.add_argument("--recipe", help="one of your own, my_package.kd:main (default: train)")
    parser.add_argument("--partition", help="default: the cluster's")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--time", help="days-hours:minutes:seconds (default: the partition's limit, a day at most)")
    parser.add_argument("--account", help="who pays for the job")
    parser.add_argument("--module", action="append", default=[], help="loaded before the job, `module load ...`")
    parser.add_argument("--container", help="an image that has the package: .sif by Apptainer, any other by Pyxis")
    args = parser.parse_args(argv)
    if args.nodes < 1:
        raise ConfigError(f"--nodes {args.nodes} must be at least 1.")
    text = _script(args.nodes, args.partition, args.time)
    if args.container:  # with the Python in it; the package's folder is mounted: its scripts start the ranks
        root, kind = CONF_DIR.parent, "APPTAINER_IMAGE" if args.container.endswith(".sif") else "PYXIS_IMAGE"
        text = text.replace("$PWD:$PWD", f"$PWD:$PWD,{root}:{root}").replace('--bind "$PWD', f'--bind "$PWD,{root}')
        text = text.replace(f"${{PYTHON:-{sys.executable}}}", "${PYTHON:-python}")
        export = f"export {kind}={shlex.quote(args.container)}"
        text = text.replace("set -uo pipefail\n", f"set -uo pipefail\n{export}\n", 1)
    if args.account:
        text = text.replace("#SBATCH --nodes=", f"#SBATCH --account={args.account}\n#SBATCH --nodes=")
    # the models' folder of this shell; modules before `set -u`, which their scripts do not stand
    before = [f"module load {name}" for name in args.module]
    if home := os.environ.get("HF_HOME"):
        before.append(f"export HF_HOME={shlex.quote(home)}")
    text = text.replace("set -uo pipefail\n", "\n".join([*before, "set -uo pipefail\n"]), 1)
    print(text.replace("automodel_lite train", f"automodel_lite run {args.recipe}") if args.recipe else text, end="")
    return 0


def _script(nodes: int, partition: str | None, time: str | None) -> str:
    """launch/slurm.sbatch with the numbers of a partition, the Python and the package of this process."""
    name, limit, gpus, cpus, num_nodes = _partition(partition)
    if nodes > num_nodes:
        raise ConfigError(f"--nodes {nodes} must be at most {num_nodes}: the nodes of partition {name}.")
    tasks = gpus or 1
    lines = [f"#SBATCH --partition={name}", f"#SBATCH --nodes={nodes}", f"#SBATCH --ntasks-per-node={tasks}"]
    lines += [f"#SBATCH --gpus-per-node={gpus}"] if gpus else []
    lines += [f"#SBATCH --cpus-per-task={max(1, cpus // tasks)}", f"#SBATCH --time={time or limit}"]
    text = (LAUNCH_DIR / "slurm.sbatch").read_text()
    kept = [line for line in text.splitlines() if not re.match(r"#SBATCH --(nodes|ntasks-per-node|time)=", line)]
    place = next(number for number, line in enumerate(kept) if line.startswith("#SBATCH --job-name"))
    text = "\n".join([*kept[: place + 1], *lines, *kept[place + 1 :]]) + "\n"
    text = re.sub(r"(?m)^# +(DRY_RUN=1 )?(sbatch|bash) .*\n", "", text)
    text = text.replace("; docs/slurm.md explains every line.", f" (partition {name}).")
    text = re.sub(r"(bash|source) launch/", rf"\1 {LAUNCH_DIR}/", text)
    text = text.replace(
        '"${PYTHON:-python}" recipes/train_ft.py', f'"${{PYTHON:-{sys.executable}}}" -m automodel_lite train'
    )
    if not IS_INSTALLED:
        text = text.replace("PYTHONPATH=${PYTHONPATH:-$PWD}", f"PYTHONPATH=${{PYTHONPATH:-{CONF_DIR.parent}}}")
    return text


def _partition(wanted: str | None) -> tuple[str, str, int, int, int]:
    """(name, time limit, GPUs of a node, CPUs of a node, number of nodes); raises ConfigError."""
    try:
        command = ["sinfo", "--noheader", "--format=%P|%l|%G|%c|%D"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise ConfigError("there is no SLURM here (no sinfo): run this on the cluster's login node.") from None
    if found.returncode:
        raise ConfigError(f"sinfo: {' '.join(found.stderr.split())}")
    rows = [line.split("|") for line in found.stdout.splitlines() if line.count("|") == 4]
    names = list(dict.fromkeys(row[0].rstrip("*") for row in rows))
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), names[0] if names else "")
    name = wanted or default
    mine = [row for row in rows if row[0].rstrip("*") == name]
    if not mine:
        raise ConfigError(
            f"--partition {name}: there is no such partition{did_you_mean(name, names) or '.'} "
            f"The partitions are {', '.join(names)}."
        )
    # `gpu:h100:8(S:0-1)` are 8; a day, or the partition's limit where it is shorter
    gpus = min(sum(map(int, re.findall(r"gpu(?::[^:,(]+)?:(\d+)", row[2]))) for row in mine)
    cpus = min(int(re.sub(r"\D", "", row[3]) or 1) for row in mine)
    limit, days = mine[0][1], re.match(r"(\d+)-", mine[0][1])
    is_long = limit in ("infinite", "n/a") or (days and int(days[1]) >= 1)
    return name, "24:00:00" if is_long else limit, gpus, cpus, sum(int(row[4]) for row in mine)
