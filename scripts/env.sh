# Sourced by run_train.sh and run_tests.sh, for `use_python [extra]`: it makes `python` one that has
# the requirements of pyproject.toml, and those of the extra.
#
# The active Python is used if it has them all. Otherwise .venv in the repository's root is: it is
# made on first use, and completed when the requirements change (set_up.py).

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

use_python() {
    local extra=${1:-} venv="$_root/.venv" missing
    export PYTHONPATH="$_root${PYTHONPATH:+:$PYTHONPATH}"
    python() { command python3 "$@"; }
    if missing=$(python "$_root/scripts/set_up.py" check "$extra" 2>/dev/null); then
        return
    fi
    python() { "$_root/.venv/bin/python" "$@"; }
    if [ -x "$venv/bin/python" ] && python "$_root/scripts/set_up.py" check "$extra" >/dev/null; then
        return
    fi
    if ! python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))'; then
        echo "torchtitan needs Python 3.10 to 3.14 as python3, got: $(python3 --version 2>&1)" >&2
        exit 2
    fi
    echo "$(command -v python3) lacks:" $(head -n 3 <<<"$missing") >&2
    echo "Setting up $venv; PyTorch is a large download ..." >&2
    # also where an earlier set-up was interrupted before pip was there
    python -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$venv" || exit 2
    if ! python "$_root/scripts/set_up.py" install "$extra" >&2; then
        echo "The set-up of $venv failed; run the command again to retry. Where PyPI alone can be" \
            "reached: UV_DEFAULT_INDEX=https://pypi.org/simple" >&2
        exit 2
    fi
    echo "Set up $venv" >&2
}
