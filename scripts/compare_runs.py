"""Compare two runs: every logged figure, and every tensor of the checkpoints that both have.

    python scripts/compare_runs.py outputs/a outputs/b

The same as `python -m torchtitan.tools.audit compare runs`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.tools.compare.compare_runs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="compare_runs.py"))
