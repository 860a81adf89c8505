"""torchrun, with the trainer's exit codes and its patience.

`torchrun` ends with code 1 and a traceback of its own whatever its processes said. A user's mistake
must end in its one message and code 2 on many ranks as on one, so this entry runs torchrun's own
parser and agent and passes on the code of the rank that failed first. Arguments are torchrun's.

Nor does torchrun let a run end politely: on a signal it kills the ranks after 30 seconds, data
workers first. Here the agent only passes signals on to the ranks and keeps watching, until they
have saved and left or whoever sent the signal loses patience. The agent is a subclass put in
torch's place, since torch has no setting for this.
"""

from __future__ import annotations

import sys

from torchtitan.base.log import begin_process, find_option

if __name__ == "__main__":
    num_ranks = find_option(sys.argv, "--nproc_per_node", "--nproc-per-node") or "1"
    begin_process(sys.argv[1:], num_ranks=num_ranks, are_here=True)

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

STOPPED = 4
EXPECTED_EXIT_CODES = (2, 3, STOPPED)
"""What `train.py` ends with once it has said itself what is wrong."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Forwarder:
    """Passes signals on to the ranks of this machine."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.is_starting = False
        self.num_signals = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.num_signals += 1
        if self.is_starting:
            return  # `started` makes up for it: a rank could be left behind
        if not self.pids:
            raise SystemExit(STOPPED)
        self._forward()

    def started(self, pids: Sequence[int]) -> None:
        """Take over the ranks that were just started."""
        self.pids, self.is_starting = list(pids), False
        if self.num_signals:
            self._forward()

    def _forward(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):  # it has ended already
                # SIGTERM whatever came: a rank that is still importing dies of it without a word
                os.kill(pid, signal.SIGTERM)


def agent_class(forwarder: Forwarder) -> type[LocalElasticAgent]:
    """Return torch's agent, with signals left to `forwarder`."""

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            forwarder.is_starting = True
            pids: dict[int, Any] = super()._start_workers(worker_group)
            forwarder.started(list(pids.values()))
            return pids

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()]
            if forwarder.num_signals or any(code in EXPECTED_EXIT_CODES for code in codes):
                self._remaining_restarts = 0  # --max_restarts is for crashes
            return result

    return Agent


def main(argv: Sequence[str]) -> int:
    """Start the ranks and wait for them; return the first failing rank's code, or 0."""
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.setLevel(logging.CRITICAL)
    forwarder = Forwarder()
    api.LocalElasticAgent = agent_class(forwarder)
    before = {number: signal.signal(number, forwarder) for number in SIGNALS}
    arguments = parse_args(list(argv))
    arguments.signals_to_handle = "SIGHUP,SIGQUIT"  # torch may end the ranks on these
    try:
        run(arguments)
    except ChildFailedError as error:
        return _exit_code(error, signalled=forwarder.num_signals > 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _exit_code(error: ChildFailedError, *, signalled: bool) -> int:
    """Return the code of the rank that failed first; one that said why comes before all others."""
    rank, failure = error.get_first_failure()
    codes = [failure.exitcode, *(other.exitcode for other in error.failures.values())]
    for code in codes:
        if code in EXPECTED_EXIT_CODES:
            return code
    if signalled and failure.exitcode in (-signal.SIGTERM, -signal.SIGINT):
        return STOPPED  # while it was importing
    if not signalled:
        sys.stderr.write(f"rank {rank} ended with code {failure.exitcode}; see its log above\n")
    return failure.exitcode if failure.exitcode > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
