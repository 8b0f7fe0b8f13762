#!/bin/bash
# Trains on all GPUs of this machine, or on its CPU. With MAX_RESTARTS it restarts after a crash, from the last checkpoint.
#
#   launch/local.sh --config-name llama_packed name=first
#   NPROC=2 launch/local.sh --config-name llama_packed name=first
#   MAX_RESTARTS=3 launch/local.sh ...        DRY_RUN=1 launch/local.sh ...
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=${PYTHONPATH:-$PWD}
python=${PYTHON:-python}
nproc=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
((nproc > 0)) || nproc=1
command=(
    "$python" -m torch.distributed.run --standalone --nproc-per-node="$nproc"
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1 --shutdown-timeout=240 --max-restarts="${MAX_RESTARTS:-0}"
    recipes/train_ft.py "$@"
)
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${command[@]}" && echo
    exit 0
fi
exec "${command[@]}"
