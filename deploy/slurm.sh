#!/bin/bash
# Stage servers under Slurm, one per GPU: sbatch --nodes 2 --gpus-per-node 4 deploy/slurm.sh HOST:7950 ~/join
# HOST:7950 is a scheduler that the nodes reach. ~/join holds a line of
#   swarm token create --role stage-server --uses 8 --ttl 12h
#SBATCH --job-name=swarm
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
scheduler=${1:?usage: sbatch slurm.sh HOST:PORT JOIN-FILE}
join=${2:?usage: sbatch slurm.sh HOST:PORT JOIN-FILE}
# Slurm sends SIGTERM two minutes before the time is up: enough to hand the work over.
export scheduler join
# shellcheck disable=SC2016  # the shell of each task expands them
exec srun --kill-on-bad-exit=0 bash -c '
  exec swarm stage-server --scheduler "$scheduler" --join-file "$join" --device auto \
    --listen "$(hostname -i | cut -d" " -f1):0" --http-port 0 --threads "$SLURM_CPUS_PER_TASK" \
    --data-dir "${SLURM_TMPDIR:-/tmp}/swarm-$SLURM_JOB_ID-$SLURM_PROCID" --drain-timeout 90'
