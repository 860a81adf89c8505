#!/usr/bin/env bash
# Format, lint, types and every test: ./scripts/run_tests.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
use_python dev

python -m ruff format --check .
python -m ruff check .
python -m mypy
python -m pytest "$@"
