"""One rank of a layout that is compared: the trainer's own command, its initial weights saved.

Started in the place of `torchtitan.train`, so that one launch shows both ends of the training. The
weights go into a checkpoint of step 0 by the run's own manager, which knows them by name in every
layout. The trainer has no setting for that, hence the function put in the place of its `assemble`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # works without being installed

PIDS = "pids"


def leave_pid(argv: list[str]) -> None:
    """Write down this process, so that a hanging rank can be ended: it is in no one's session."""
    option = "--job.dump_folder="
    [folder] = [word.removeprefix(option) for word in argv if word.startswith(option)]
    pids = Path(folder) / PIDS
    pids.mkdir(parents=True, exist_ok=True)
    (pids / str(os.getpid())).touch()


def main(argv: list[str]) -> None:
    """Train, and end this process."""
    from torchtitan import train
    from torchtitan.trainer import Run

    assemble = train.assemble

    def assemble_and_save(*args: Any, **kwargs: Any) -> Run:
        run = assemble(*args, **kwargs)
        assert run.checkpoints is not None, "compare_layouts.py switches checkpoints on"
        run.checkpoints.save_if_due(last=False, now=True)
        return run

    train.assemble = assemble_and_save
    train.train_and_leave(argv)


if __name__ == "__main__":
    leave_pid(sys.argv[1:])  # before torch is imported, which takes seconds
    main(sys.argv[1:])
