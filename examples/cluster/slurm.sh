#!/bin/bash
# One run on two machines of a SLURM cluster, four processes each: sbatch examples/cluster/slurm.sh my.toml
# The experiment, its data and the environment must be at the same paths on all machines. Killed, or out of time, the
# same command goes on from the last checkpoint.
#SBATCH --job-name=fedblend
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# Where host names do not lead to the fast network: the name of its interface, as `ip address` shows it.
# export GLOO_SOCKET_IFNAME=ib0
srun bash -c 'torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$SLURM_CPUS_PER_TASK" \
  --master-addr "$MASTER_ADDR" --master-port 29500 --no-python \
  fedblend run "$0" --out "runs/slurm-$SLURM_JOB_NAME" --resume' "$1"
