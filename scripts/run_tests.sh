#!/usr/bin/env bash
# Format, lint, types and every test: ./scripts/run_tests.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
use_python dev

python -m ruff format --check .
python -m ruff check .
python -m mypy
# two at a time: tests with ranks mostly wait for each other; whoever is done takes of the rest
python -m pytest -n 2 --dist worksteal "$@"
