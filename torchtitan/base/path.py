"""Where Python searches for modules. Imports nothing, because it is called before all imports."""

import os
import sys
from pathlib import Path


def drop_current_folder() -> None:
    """Remove the current folder from the search path, unless it is the repository.

    `python -m` searches it first. It may come from a stranger and hold a `numpy.py`. Own code is
    found there by `base.custom`. Processes that this one starts do not search it either, from
    Python 3.11 on.
    """
    if Path(__file__).parents[2] == Path.cwd():
        return
    os.environ["PYTHONSAFEPATH"] = "1"
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
