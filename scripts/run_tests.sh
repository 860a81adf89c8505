#!/usr/bin/env bash
# Format, lint, types and tests: ./scripts/run_tests.sh [--all | pytest arguments]
# Without arguments, tests marked `long` are left out: campaigns, benchmarks, commands of docs/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
use_python dev

python -m ruff format --check .
python -m ruff check .
python -m mypy
case "${1-}" in
  "") set -- -m "not long" ;;
  --all) shift ;;
esac
# two at a time: tests with ranks mostly wait for each other; whoever is done takes of the rest
python -m pytest -n 2 --dist worksteal "$@"
