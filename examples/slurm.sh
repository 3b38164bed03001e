#!/bin/bash
# Train under SLURM, on one node or several, for longer than one job may last:
#
#     sbatch examples/slurm.sh --data DIR --model resnet50 --epochs 90 --out runs/days
#
# What follows is given to `dsimg train`. Two minutes before the time limit the training saves and leaves with exit
# code 75, and the job puts itself in the queue again; its next start goes on where this one stopped.
# Set the nodes, the GPUs and the time here:
#SBATCH --job-name=dsimg
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dsimg-%j.out
set -u
# Activate what has dsimg in it here, such as: source .venv/bin/activate

FAILURES_IN_A_ROW=3                       # then the job ends: trying on would help nobody
STOP_FILE=$PWD/dsimg-$SLURM_JOB_ID.stop   # these two lie where all nodes see them
FAILURES=$PWD/dsimg-$SLURM_JOB_ID.failures
rm -f "$STOP_FILE"                        # left by the start before this one

# USR1 comes to this shell alone (the B: above), before the time limit. TERM comes when the job is cancelled or
# preempted: save as well, but do not queue a job again that someone has cancelled; a preempted one SLURM queues itself.
interrupted='' ended=''
trap 'interrupted=1; touch "$STOP_FILE"' USR1
trap 'interrupted=1; ended=1; touch "$STOP_FILE"' TERM

# srun starts the ranks itself, so that its exit code is the highest of theirs.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT STOP_FILE
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun no longer takes it from the job by itself

# dsimg finds ranks that are gone and shares a node's cores among its ranks, so srun is to do neither.
# shellcheck disable=SC2016  # the ranks' own variables, not this shell's
srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
    export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python -m dsimg train --stop_file "$STOP_FILE" "$@"
' rank "$@" &
running=$!

# A signal ends `wait` early; then it is called again.
while :; do
    interrupted=''
    wait "$running"
    code=$?
    [ -n "$interrupted" ] || break
done
rm -f "$STOP_FILE"

case $code in
    0 | 2)  # done, or an error for you to mend
        rm -f "$FAILURES"
        exit "$code" ;;
    75)  # stopped on request
        rm -f "$FAILURES" ;;
    *)  # a rank died, or its node
        echo "exit code $code" >>"$FAILURES"
        if [ "$(wc -l <"$FAILURES")" -ge "$FAILURES_IN_A_ROW" ]; then
            echo "$FAILURES_IN_A_ROW starts in a row failed, the last with exit code $code: giving up"
            rm -f "$FAILURES"
            exit "$code"
        fi ;;
esac
[ -z "$ended" ] || exit "$code"
echo "exit code $code: back into the queue"
scontrol requeue "$SLURM_JOB_ID"
