"""torchrun, with the trainer's exit codes and its patience.

`torchrun` ends with code 1 and a traceback of its own whatever its processes said. A user's mistake
must end in its one message and code 2 on many ranks as on one, so this entry runs torchrun's own
parser and agent and passes on the code of the rank that failed first. Arguments are torchrun's.

Nor does torchrun let a run end politely: on a signal it kills the ranks after 30 seconds, data
workers first. Here the agent only passes signals on to the ranks and keeps watching, until they
have saved and left or whoever sent the signal loses patience. The agent is a subclass put in
torch's place, since torch has no setting for this.

With a range of nodes, `--nnodes 2:4`, the job outlives a node: see `mesh/agent.py`.
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
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, parse_args, run

from torchtitan.base.errors import ConfigError, UserError
from torchtitan.job import load_job
from torchtitan.mesh.agent import JobEndedError, Nodes, elastic_agent
from torchtitan.mesh.elastic import FULL_WORLD_SIZE, STARTED, Layouts
from torchtitan.mesh.verdict import HUNG, STOPPED

TRAINER = "torchtitan.train"
EXPECTED_EXIT_CODES = (2, 3, STOPPED)
"""What `train.py` ends with once it has said itself what is wrong."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Forwarder:
    """Passes signals on to the ranks of this machine."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.is_starting = False
        self.num_signals = 0
        self.is_elastic = False
        """Whether other nodes go on when this one leaves without ranks."""
        self._are_leaving = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.num_signals += 1
        if self.is_starting:
            return  # `started` makes up for it: a rank could be left behind
        if not self.pids:
            if self.is_elastic:  # torch leaves the rendezvous open after this one alone
                raise SignalException("without ranks", signal.Signals(number))
            raise SystemExit(STOPPED)
        if not (self._are_leaving and self.num_signals == 1):  # a second request would end them
            self._forward()

    def started(self, pids: Sequence[int]) -> None:
        """Take over the ranks that were just started."""
        self.pids, self.is_starting, self._are_leaving = list(pids), False, False
        if self.num_signals:
            self._forward()

    def ask_to_leave(self) -> None:
        """Let the ranks save and leave, though nobody has asked for the end of the job."""
        if not self.num_signals:
            self._are_leaving = True
            self._forward()

    def ended(self) -> None:
        """Note that no rank is left."""
        self.pids, self._are_leaving = [], False

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
    agent = agent_class(forwarder)
    arguments = parse_args(list(argv))
    try:
        if (nodes := find_nodes(arguments)) is not None:
            agent, forwarder.is_elastic = elastic_agent(agent, nodes=nodes, asker=forwarder), True
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    api.LocalElasticAgent = agent
    before = {number: signal.signal(number, forwarder) for number in SIGNALS}
    arguments.signals_to_handle = "SIGHUP,SIGQUIT"  # torch may end the ranks on these
    try:
        run(arguments)
    except JobEndedError as ended:
        sys.stderr.write(f"{ended}\n" if ended.code else "")
        return ended.code
    except SignalException:
        return STOPPED
    except ChildFailedError as error:
        return _exit_code(error, signalled=forwarder.num_signals > 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def find_nodes(arguments: Any) -> Nodes | None:
    """Return how the job may lose nodes, and tell its ranks; None where their number is fixed, or
    another program than the trainer is launched.

    Raises:
        ConfigError: The settings are wrong, or no layout fits so few nodes.
    """
    if not arguments.module or arguments.training_script != TRAINER:
        return None
    torchs, _, _ = config_from_args(arguments)
    fewest, most, ranks = torchs.min_nodes, torchs.max_nodes, torchs.nproc_per_node
    if fewest == most:
        return None
    job = load_job(arguments.training_script_args)
    config, settings = job.config, job.config.elastic
    with job.wording():
        if not config.checkpoint.enable:
            raise ConfigError.at(
                "checkpoint.enable",
                f"a job with --nnodes {arguments.nnodes} goes on from its checkpoints when a node "
                f"is lost, and makes none; write checkpoint.enable = true",
            )
        layouts = Layouts(
            parallelism=config.parallelism,
            training=config.training,
            settings=settings,
            full_world_size=most * ranks,
        )
        layouts.check(fewest=fewest, ranks_per_node=ranks)
    os.environ[FULL_WORLD_SIZE] = str(layouts.full_world_size)
    os.environ[STARTED] = str(time.monotonic())
    if "join_timeout" not in arguments.rdzv_conf:
        more = f"join_timeout={settings.wait_seconds}"
        arguments.rdzv_conf = ",".join(filter(None, [arguments.rdzv_conf, more]))
    return Nodes(
        fewest=fewest,
        most=most,
        wait_seconds=settings.wait_seconds,
        nodes_to_use=partial(layouts.nodes_to_use, fewest=fewest, ranks_per_node=ranks),
    )


def _exit_code(error: ChildFailedError, *, signalled: bool) -> int:
    """Return the code of the rank that failed first; one that said why comes before all others."""
    rank, failure = error.get_first_failure()
    codes = [failure.exitcode, *(other.exitcode for other in error.failures.values())]
    for code in codes:
        if code in EXPECTED_EXIT_CODES:
            return code
    if HUNG in codes:
        sys.stderr.write("a rank hangs, see the log above; start again to go on\n")
        return STOPPED
    if signalled and failure.exitcode in (-signal.SIGTERM, -signal.SIGINT):
        return STOPPED  # while it was importing
    if not signalled:
        sys.stderr.write(f"rank {rank} ended with code {failure.exitcode}; see its log above\n")
    return failure.exitcode if failure.exitcode > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
