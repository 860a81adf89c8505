#!/usr/bin/env bash
# Train: ./run_train.sh [--section.key value ...]
#
#   NGPU=N           ranks on this machine, one a GPU or CPU process (default 1)
#   CONFIG_FILE=F    TOML file of the job (default train_configs/debug_model.toml)
#   LOG_RANK=0,1     global ranks whose log is shown, or `all` (default 0)
set -euo pipefail
script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do # it may be called by another name, from anywhere
    target=$(readlink "$script")
    [[ $target == /* ]] || target=$(dirname "$script")/$target
    script=$target
done
root=$(cd "$(dirname "$script")" && pwd)
source "$root/scripts/env.sh"
use_python

NGPU=${NGPU:-1}
if ! [[ $NGPU =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU must be the number of ranks, 1 or more, got: $NGPU" >&2
    exit 2
fi
config=(--job.config_file "${CONFIG_FILE:-$root/train_configs/debug_model.toml}")
# ${config[@]+...} below: an empty list is an error to the bash of macOS
for argument in "$@"; do
    [[ $argument == --job.config_file* ]] && config=()
    [[ $argument == --help || $argument == -h ]] && NGPU=1 # one rank is enough to say it
done

# in this shell's place, so that a signal to it reaches the trainer
interpreter=$(python -c 'import sys; print(sys.executable)')
if [ "$NGPU" = 1 ]; then
    exec "$interpreter" -m torchtitan.train ${config[@]+"${config[@]}"} "$@"
else
    # ranks that share the cores of one machine must not each start a thread a core
    cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
    exec "$interpreter" -m torchtitan.launch --standalone --nproc_per_node "$NGPU" -m torchtitan.train ${config[@]+"${config[@]}"} "$@"
fi
