"""Compare two runs: `python -m torchtitan.audit runs A B`, which has a script's name too.

python scripts/compare_runs.py outputs/a outputs/b
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.audit import runs
from torchtitan.base.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Compare, print what was found, and return the exit code."""
    try:
        return runs.main(argv)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
