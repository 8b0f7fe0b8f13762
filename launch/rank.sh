#!/bin/bash
# One rank of an srun step: SLURM's numbers under the names that PyTorch reads, then the recipe in place of this shell,
# so that signals reach it.
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[^0-9]*}
exec "$@"
