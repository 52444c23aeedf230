#!/usr/bin/env bash
# A sweep over all GPUs of several machines: sbatch scripts/slurm_sweep.sh --env ant --num-seeds 256
# One process a GPU; JAX finds the others through Slurm's environment, and process 0 reports.
#SBATCH --job-name=purejaxppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
# JAX takes a port by the job's number: a second training in the same job needs another JAX_COORDINATOR_PORT.
# Two minutes before the end every process gets SIGTERM, and what was done until then is written.
set -euo pipefail
srun --kill-on-bad-exit=1 python -m purejaxppo.run --distributed "$@"
