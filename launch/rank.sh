#!/bin/bash
# One rank of an srun step: maps SLURM's variables to the names that PyTorch reads, then replaces this shell with the
# recipe, so that signals reach it.
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[^0-9]*}
exec "$@"
