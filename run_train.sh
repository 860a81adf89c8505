#!/usr/bin/env bash
# Set up Python if it needs to be, and train: ./run_train.sh [JOB] [--section.key value ...]
#
#   JOB              TOML file, or the name of one in train_configs (default $CONFIG_FILE or debug_model)
#   NGPU=N           ranks on this machine, one a GPU or CPU process (default 1)
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

job=("${CONFIG_FILE:-debug_model}")
[ $# -gt 0 ] && [[ $1 != -* ]] && job=()
for argument in "$@"; do
    [[ $argument == --job.config_file* ]] && job=()
done

# in this shell's place, so that a signal to it reaches the trainer;
# ${job[@]+...}: an empty list is an error to the bash of macOS
interpreter=$(python -c 'import sys; print(sys.executable)')
exec "$interpreter" -m torchtitan train ${job[@]+"${job[@]}"} "$@"
