"""`python -m torchtitan VERB ...` is the command `torchtitan VERB ...`.

Python searches the current folder first, which may come from a stranger and hold a `numpy.py`. Own
code is found there by `base.custom`.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    is_repository = Path(__file__).parents[1] == Path.cwd()
    if sys.path[0] in ("", os.getcwd()) and not is_repository:
        del sys.path[0]

    from torchtitan.tools.command import run

    run()
