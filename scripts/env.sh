# Sourced by run_train.sh and scripts/run_tests.sh, for `use_python [extra]`: it makes `python` one
# that has all we need, and the extra's packages (see pyproject.toml) too.
#
# The active Python is used if it holds every requirement in a version that fits; else .venv in the
# repository's root is, made with pip on first use and completed when the requirements change.

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

use_python() {
    local extra=${1:-} venv="$_root/.venv"
    export PYTHONPATH="$_root${PYTHONPATH:+:$PYTHONPATH}"
    if command -v python3 >/dev/null && _fits python3 "$extra"; then
        python() { command python3 "$@"; }
        return
    fi
    python() { "$_root/.venv/bin/python" "$@"; }
    if [ -x "$venv/bin/python" ] && _fits "$venv/bin/python" "$extra"; then
        return
    fi
    if ! python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
        echo "torchtitan needs Python 3.10 to 3.13 as python3, got: $(python3 --version 2>&1)" >&2
        exit 2
    fi
    echo "Setting up $venv with pip, once; PyTorch is a large download ..." >&2
    # also where an earlier set-up was interrupted before pip was there
    python -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$venv" || exit 2
    if ! python -m pip install --progress-bar on --disable-pip-version-check packaging \
        --editable "$_root${extra:+[$extra]}" >&2; then
        echo "pip could not install torchtitan's requirements; run the command again to go on" >&2
        exit 2
    fi
    echo "Set up $venv" >&2
}

# Succeeds if the Python $1 has the project's requirements, and those of the extra $2 if not empty.
_fits() {
    "$1" - "$_root/pyproject.toml" "$2" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
lines = list(project["dependencies"])
extras = [sys.argv[2]] if sys.argv[2] else []
for extra in extras:
    for line in project["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            extras.extend(requirement.extras)
        else:
            lines.append(line)
for requirement in map(Requirement, lines):
    if requirement.marker is None or requirement.marker.evaluate():
        if not requirement.specifier.contains(version(requirement.name), prereleases=True):
            sys.exit(1)
PY
}
