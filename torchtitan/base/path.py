"""Where Python searches for modules. Imports only what Python has loaded when it starts."""

import os
import sys


def drop_current_folder() -> None:
    """Remove the current folder from the search path, unless it is the repository.

    `python -m` searches it first, also for its own modules; the command `torchtitan` does not. It
    may come from a stranger and hold a `numpy.py`. `base.custom` finds own code there. Processes
    that this one starts do not search it either, from Python 3.11 on.
    """
    repository = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if repository == os.getcwd():
        return
    os.environ["PYTHONSAFEPATH"] = "1"
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
