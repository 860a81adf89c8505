# Sourced by run_train.sh and scripts/run_tests.sh: makes `python` one that has all we need.
#
#   source scripts/env.sh [extra]        extra: an optional dependency group of pyproject.toml
#
# The active Python is used if it holds every requirement in a version that fits; else .venv in the
# repository's root is, made with pip on first use and completed when the requirements change.

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_extra=${1:-}

_fits() {
    "$1" - "$_root/pyproject.toml" "$_extra" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
groups = [project["dependencies"]]
extras = [sys.argv[2]] if sys.argv[2] else []
for extra in extras:
    for line in project["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            extras.extend(requirement.extras)
        else:
            groups.append([line])
for line in (line for group in groups for line in group):
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate():
        if not requirement.specifier.contains(version(requirement.name), prereleases=True):
            sys.exit(1)
PY
}

_venv_python="$_root/.venv/bin/python"
if command -v python3 >/dev/null && _fits python3; then
    python() { command python3 "$@"; }
elif [ -x "$_venv_python" ] && _fits "$_venv_python"; then
    python() { "$_venv_python" "$@"; }
else
    if ! python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
        echo "torchtitan needs Python 3.10 to 3.13 as python3, got: $(python3 --version 2>&1)" >&2
        exit 2
    fi
    echo "Setting up .venv with pip, once; PyTorch is a large download ..." >&2
    [ -x "$_venv_python" ] || python3 -m venv "$_root/.venv" || exit 2
    "$_venv_python" -m pip install --quiet --disable-pip-version-check packaging \
        --editable "$_root${_extra:+[$_extra]}" || {
        echo "pip could not install torchtitan's requirements; run the command again to go on" >&2
        exit 2
    }
    echo "Set up $_root/.venv" >&2
    python() { "$_venv_python" "$@"; }
fi
export PYTHONPATH="$_root${PYTHONPATH:+:$PYTHONPATH}"
