"""torchrun, with the trainer's exit codes.

`torchrun` ends with code 1 and a traceback of its own whatever its processes said. A user's mistake
must end in its one message and code 2 on many ranks as on one, so this entry runs torchrun's own
parser and agent and passes on the code of the rank that failed first. Arguments are torchrun's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

EXPECTED_EXIT_CODES = (2, 3)
"""What `train.py` ends with once it has said itself what is wrong."""


def main(argv: Sequence[str]) -> int:
    """Start the ranks and wait for them; return the first failing rank's code, or 0."""
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(argv)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode not in EXPECTED_EXIT_CODES:
            sys.stderr.write(f"rank {rank} ended with code {failure.exitcode}; see its log above\n")
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
