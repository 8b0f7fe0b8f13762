"""A stand-in for Pyxis: `srun --container-image=FOLDER` runs the step in that folder as its root.

The folder is a real other root (a mount namespace of its own, bind mounts, chroot): a file of the host that is not
mounted is not there. Where a SLURM job runs the tasks are its own; elsewhere there is one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/bash
image='' mounts='' workdir='' options=()
while [[ ${1:-} == -* ]]; do
    case $1 in
        --container-image=*) image=${1#*=} ;;
        --container-mounts=*) mounts=${1#*=} ;;
        --container-workdir=*) workdir=${1#*=} ;;
        *) options+=("$1") ;;
    esac
    shift
done
inside=()
[[ -z $image ]] || inside=(unshare -m FOLDER/enter "$image" "$mounts" "$workdir")
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    exec /usr/bin/srun "${options[@]}" ${inside[@]+"${inside[@]}"} "$@"
fi
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_TASKS_PER_NODE=1
exec ${inside[@]+"${inside[@]}"} "$@"
"""
ENTER = """#!/bin/bash
set -e
root=$1 mounts=$2 workdir=$3
shift 3
mount --make-rprivate /
for folder in SYSTEM; do
    mkdir -p "$root$folder" && mount --rbind "$folder" "$root$folder"
done
while IFS=: read -r -d, from to; do
    mkdir -p "$root$to" && mount --bind "$from" "$root$to"
done <<<"$mounts,"
mkdir -p "$root/tmp"
export PATH=/opt/image/bin:/usr/bin:/bin HOME=/tmp
exec /usr/sbin/chroot "$root" bash -c 'cd "$1" && shift && exec "$@"' enter "$workdir" "$@"
"""


def missing() -> str | None:
    """Why no step can have another root here; None when it can."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode:
        return "needs root and mount namespaces"
    return None


def make_image(root: Path) -> None:
    """A root with a Python at /opt/image that has a copy of the package, and no checkout."""
    python = root / "opt" / "image"
    venv.create(python, symlinks=True)
    site = next((python / "lib").glob("python*")) / "site-packages"
    for name in ("automodel_lite", "recipes", "conf", "launch"):
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    others = [x for x in sys.path if x.endswith("site-packages") and Path(x).is_dir()]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in others))


def make_srun(folder: Path) -> Path:
    """A folder with the stand-in, to go first in PATH."""
    homes = [sys.base_prefix, *(x for x in sys.path if x.endswith("site-packages"))]
    system = [
        x for x in ("/usr", "/bin", "/lib", "/lib64", "/etc", "/dev", "/proc") if Path(x).exists()
    ]
    folder.mkdir()
    for name, text in (("srun", SRUN), ("enter", ENTER)):
        text = text.replace("FOLDER", str(folder))
        (folder / name).write_text(text.replace("SYSTEM", " ".join([*system, *homes])))
        (folder / name).chmod(0o755)
    return folder
