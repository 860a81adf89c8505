#!/usr/bin/env bash
# Format, lint, types and tests: ./scripts/run_tests.sh [--all | pytest arguments]
# Without arguments: the gate, without the tests marked `slow` and those marked `long`
# (campaigns, benchmarks, commands of docs/). Continuous integration runs -m "not long".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
unset PYTHONDONTWRITEBYTECODE  # else each process of a test compiles PyTorch's sources anew
use_python dev

python -m ruff format --check .
python -m ruff check .
python -m mypy & types=$!  # beside the tests
trap 'kill "$types" 2>/dev/null || true' EXIT
case "${1-}" in
  "") set -- -m "not long" --gate ;;
  --all) shift ;;
esac
# three on two cores: tests with ranks mostly wait for each other; whoever is done takes of the rest
code=0
python -m pytest -n 3 --dist worksteal "$@" || code=$?
wait "$types" || code=1
exit "$code"
