#!/bin/bash
#SBATCH --job-name=altup
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # one torchrun a node, which starts a process a GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300      # tells this script five minutes before the time is over
#SBATCH --requeue
#SBATCH --open-mode=append       # one log for all lives of the job
#
# Pretrain on several nodes, in as many jobs as it takes:
#
#   sbatch examples/slurm.sh --data /shared/c4 --out /shared/runs/xl --size xl --method altup --k 2 --parallel fsdp
#
# The arguments are those of `altup pretrain`; data and run lie where all nodes see them. Before the time is over the
# run saves, and the job is put into the queue again. After a crash torchrun starts all processes again, three times;
# then the job is put into the queue again, if it has saved anything since it began: a mistake is not repeated for
# ever. A job that is cancelled stays so. Whatever is started again goes on from the newest checkpoint.

SECONDS_TO_SAVE=${SECONDS_TO_SAVE:-270} # less than between the signal and the end
RESTARTS=${RESTARTS:-3}

out=
previous=
for argument in "$@"; do
    [ "$previous" = --out ] && out=$argument
    case $argument in --out=*) out=${argument#--out=} ;; esac
    previous=$argument
done
if [ -z "$out" ]; then
    echo "no --out; give the arguments of altup pretrain behind $0" >&2
    exit 2
fi

newest_step() {
    find "$out/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sed 's/.*step-//' | sort -n | tail -n 1
}

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SECONDS_TO_SAVE # how long torchrun waits for its processes to save
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1            # or restarted processes get the addresses of dead ones
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# srun hands SIGTERM to torchrun on every node, and torchrun to the processes, which finish their step and save.
time_over=
cancelled=
trap 'time_over=1; kill -TERM $!' USR1
trap 'cancelled=1; kill -TERM $!' TERM

before=$(newest_step)
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --max-restarts "$RESTARTS" -m altup pretrain "$@" --resume &
step=$!
while true; do
    wait "$step"
    code=$?
    kill -0 "$step" 2>/dev/null || break # else a signal has ended the waiting
done

if [ "$code" = 0 ] || [ -n "$cancelled" ]; then
    exit "$code"
fi
after=$(newest_step)
if [ -n "$time_over" ] || [ "${after:-0}" -gt "${before:-0}" ]; then
    echo "step ${after:-0}: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    exit 75 # for now; it goes on
fi
echo "failed (exit code $code) before anything was saved; see the messages above" >&2
exit "$code"
