#!/bin/bash
#SBATCH --job-name=ftcli
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600
# sbatch launch/slurm.sh my.yaml [options of ftcli]
#
# Ten minutes before its time is over the job gets SIGTERM: ftcli finishes its step, writes a checkpoint and ends with 75,
# and the job puts itself into the queue again. The run directory lies on a disk of the cluster (or run.mirror in a bucket).
set -u
recipe="${1:?a recipe}"
shift

child=
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
ftcli train "$recipe" "$@" &
child=$!
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not ftcli
    wait "$child"
    status=$?
done
if [ "$status" -eq 75 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
