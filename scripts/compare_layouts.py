"""Train one job in several layouts on this machine, and say where they part.

    python scripts/compare_layouts.py train_configs/compare_layouts.toml single fsdp2 hsdp2x2

The same as `python -m torchtitan.tools.audit compare layouts`; --help says all of it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.tools.compare.compare_layouts import end_ranks_on_signals, main

if __name__ == "__main__":
    end_ranks_on_signals()
    sys.exit(main(sys.argv[1:], prog="compare_layouts.py"))
