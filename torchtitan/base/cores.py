"""How many processes or threads may compute at once here.

A container or a scheduler often leaves a process some of the machine's cores, which Linux tells and
`os.cpu_count()` does not. Imports no torch: processes that prepare data do without it.
"""

from __future__ import annotations

import os
import sys


def num_cores() -> int:
    """Return how many cores this process may use; off Linux, all there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
