"""torch's agent for jobs that outlive a node (`--nnodes 2:4`): torchelastic, with four manners.

Agents meet, number the ranks, start and watch them: all of that is torch's, by its c10d rendezvous.
Added here, as overrides of the agent's own steps:

- a node is lost when its agent gives no sign of life; then the others meet again, at no cost of
  `--max_restarts`, and whatever their ranks are doing (torch: when their collectives time out);
- nodes agree on what an exit code means (`verdict.py`);
- only as many nodes train as a layout fits (`elastic.py`); the others stand by;
- a node that comes back waits until the ranks have saved and left (torch: kills them at once).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from torchtitan.mesh.verdict import Ending, Verdict, judge

SECONDS_TO_FAIL = 30
"""How long ranks may outlive a failure of another node's, to say what they know of it."""
SECONDS_TO_LEAVE = 300
"""The same where the others are done or have left: they all end together."""
SECONDS_TO_READ = 10
"""How long an agent stays for others that have not read yet how the job ended."""
LOOK_SECONDS = 1.0
"""How often an agent looks for the others: they may be a thousand, and the store is one."""
POLL_SECONDS = 0.3
RESULT = "torchtitan/result"


class JobEndedError(Exception):
    """The job has ended on all nodes; `code` is its exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What the agent has to know of the job."""

    fewest: int
    most: int
    wait_seconds: int
    nodes_to_use: Callable[[int], int]
    """How many of so many nodes train."""


class Asker(Protocol):
    """What passes signals on to the ranks of this node."""

    num_signals: int

    def ask_to_leave(self) -> None:
        """Let the ranks save and leave."""

    def ended(self) -> None:
        """Note that no rank is left."""


class _Round:
    """One meeting of the nodes, and what they tell each other in it."""

    def __init__(self, handler: Any, *, store: dist.Store, number: int, members: Any) -> None:
        self.number, self.store = number, store
        self.nodes = {rank: node for node, rank in members.items()}
        self.began = time.monotonic()
        self._handler = handler
        self.looked = 0.0
        self._told: dict[int, Ending] = {}
        self._first_ending: float | None = None

    def read_state(self) -> tuple[set[Any], int]:
        """Return the nodes of this round that are alive, and how many wait to be let in."""
        handler = self._handler
        with handler._heartbeat_lock:
            handler._state_holder.sync()
            state = handler._state_holder.state
            present = {*state.participants, *state.wait_list}
            return present & set(self.nodes.values()), len(state.wait_list)

    def tell(self, ending: Ending) -> None:
        """Write down how the ranks of this node have ended."""
        self.store.set(f"ended/{self.number}", json.dumps(asdict(ending)))
        self.store.add("num_ended", 1)

    def endings(self) -> dict[int, Ending]:
        """Return what nodes have told so far; one question to the store where that is nothing."""
        if self.store.add("num_ended", 0) > len(self._told):
            for rank in self.nodes.keys() - self._told.keys():
                if self.store.check([f"ended/{rank}"]):
                    known = json.loads(self.store.get(f"ended/{rank}"))
                    lists = {"codes": tuple(known["codes"]), "lost": tuple(known["lost"])}
                    self._told[rank] = Ending(**known | lists)
        return self._told

    def lost(self, told: dict[int, Ending]) -> list[int]:
        """Return which nodes give no sign of life; who has told its ending may leave."""
        alive, _ = self.read_state()
        return [rank for rank, node in self.nodes.items() if rank not in told and node not in alive]

    def agree(self, verdict: Verdict) -> Verdict:
        """Return what holds for all: the verdict of the first node. A node that comes back to life
        in between may see another."""
        first = self.store.compare_set("verdict", "", json.dumps(asdict(verdict)))
        return Verdict(**json.loads(first))

    def is_overdue(self, told: dict[int, Ending]) -> bool:
        """Tell whether ranks of other nodes have ended so long ago that these here must."""
        if not any(ending.codes for ending in told.values()):
            return False
        self._first_ending = self._first_ending or time.monotonic()
        codes = {code for ending in told.values() for code in ending.codes}
        patience = SECONDS_TO_LEAVE if codes <= {0, 4} else SECONDS_TO_FAIL
        return time.monotonic() - self._first_ending > patience


class ElasticAgent(LocalElasticAgent):
    """torch's agent with these manners, to be mixed with a subclass of it: see `elastic_agent`."""

    nodes: Nodes
    asker: Asker

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._handler: Any = self._worker_group.spec.rdzv_handler
        self._handler.num_nodes_waiting = lambda: 0  # torch would restart the ranks at once
        self._remaining_restarts: int
        self._round: _Round
        self._used, self._has_asked = 0, False

    def _rendezvous(self, worker_group: Any) -> None:
        self.asker.ended()
        # torch keeps the address of the last round's rank 0, which may be gone
        self._handler._bootstrap_store_info = None
        try:
            with _store_answers():
                try:
                    super()._rendezvous(worker_group)
                except dist.DistStoreError:  # rank 0 was lost between meeting and telling
                    _say("a node is lost; the nodes meet again")
                    self._handler._bootstrap_store_info = None
                    super()._rendezvous(worker_group)
        except RendezvousClosedError as error:
            code, why = _read_result(self._handler)
            raise JobEndedError(code, f"the job has ended: {why}") from error
        except RendezvousTimeoutError as error:
            raise JobEndedError(1, "waited in vain for other nodes to meet") from error

    def _assign_worker_ranks(
        self, store: dist.Store, group_rank: int, group_world_size: int, spec: Any
    ) -> list[Worker]:
        members = self._handler._state_holder.state.participants
        self._round = _Round(self._handler, store=store, number=group_rank, members=members)
        self._used, self._has_asked = self.nodes.nodes_to_use(group_world_size), False
        if group_rank == 0:
            _say(_describe_meeting(group_world_size, used=self._used, nodes=self.nodes))
        if group_rank >= self._used:
            return []
        workers: list[Worker] = super()._assign_worker_ranks(store, group_rank, self._used, spec)
        return workers

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        if not worker_group.workers:
            return {}
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        kept, result = self._remaining_restarts, RunResult(WorkerState.HEALTHY)
        if worker_group.workers:
            result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.UNKNOWN:
            return result  # torch raises
        if result.state != WorkerState.UNHEALTHY:  # of a stuck device: never started again
            self._remaining_restarts = kept
        with _store_answers():
            if result.state == WorkerState.HEALTHY:
                if not self._is_over(worker_group):
                    return result
                self._shutdown(signal.SIGKILL)  # they may wait for a lost node
            self.asker.ended()
            return self._conclude(worker_group, result)

    def _is_over(self, worker_group: Any) -> bool:
        """Tell whether ranks that run must end; ask them to leave where a node waits."""
        meeting = self._round
        if time.monotonic() - meeting.looked < LOOK_SECONDS:
            return False
        meeting.looked = time.monotonic()
        present, num_waiting = meeting.read_state()
        told = meeting.endings()
        if any(rank < self._used for rank in meeting.lost(told)):
            return True
        if not worker_group.workers and told:
            return True
        grows = (
            self.nodes.nodes_to_use(min(len(present) + num_waiting, self.nodes.most)) > self._used
        )
        if num_waiting and grows and not self._has_asked:
            if not self._used:
                return True
            self._has_asked = True
            meeting.store.set("room", "1")
            _say("a node waits to be let in: the ranks save and leave")
            self.asker.ask_to_leave()
        if not self._used and time.monotonic() - meeting.began > self.nodes.wait_seconds:
            raise JobEndedError(1, f"no more nodes came within {self.nodes.wait_seconds} s")
        return meeting.is_overdue(told)

    def _conclude(self, worker_group: Any, result: RunResult) -> RunResult:
        """Tell how the ranks here have ended, hear of the others, and do what follows."""
        meeting = self._round
        codes = [failure.exitcode for failure in result.failures.values()]
        is_killed = result.state != WorkerState.SUCCEEDED
        if not codes:  # of ranks that are done, or that were killed here
            codes = [-signal.SIGKILL if is_killed else 0] * len(worker_group.workers)
        lost = meeting.lost(meeting.endings()) if is_killed else []
        meeting.tell(
            Ending(
                codes=tuple(codes),
                lost=tuple(rank for rank in lost if rank < self._used),
                is_signalled=self.asker.num_signals > 0,
                restarts_left=self._remaining_restarts,
            )
        )
        while len(told := meeting.endings()) + len(lost := meeting.lost(told)) < len(meeting.nodes):
            time.sleep(POLL_SECONDS)
        verdict = meeting.agree(judge(told, lost=lost, makes_room=meeting.store.check(["room"])))
        if meeting.number == min(told):
            _say(_describe_end(verdict, lost=[meeting.nodes[rank] for rank in lost]))
        if verdict.action == "done":
            return RunResult(WorkerState.SUCCEEDED, return_values=result.return_values)
        if verdict.action == "meet":
            self._remaining_restarts = verdict.restarts_left + 1  # torch takes one
            return RunResult(WorkerState.FAILED)
        self._end(verdict.code, verdict.why)
        raise JobEndedError(verdict.code, verdict.why)

    def _exit_barrier(self) -> None:
        self._end(0, "all ranks are done")

    def _end(self, code: int, why: str) -> None:
        """Leave the result for nodes that wait, and stay until all have read: the store may be
        on this node."""
        meeting = self._round
        try:
            self._handler._store.set(RESULT, json.dumps([code, why]))
            meeting.store.set(f"left/{meeting.number}", "1")
            deadline = time.monotonic() + SECONDS_TO_READ
            others = list(meeting.endings())
            while time.monotonic() < deadline:
                if all(meeting.store.check([f"left/{rank}"]) for rank in others):
                    return
                time.sleep(POLL_SECONDS)
        except dist.DistError:
            return  # whoever held it has read all and left


def elastic_agent(
    base: type[LocalElasticAgent], *, nodes: Nodes, asker: Asker
) -> type[LocalElasticAgent]:
    """Return `base` with these manners."""
    return type("Agent", (ElasticAgent, base), {"nodes": nodes, "asker": asker})


@contextmanager
def _store_answers() -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RendezvousConnectionError) as error:
        raise JobEndedError(
            1,
            "the node at --rdzv_endpoint, where all meet, gives no answer: it is lost, and the job "
            "with it; start all nodes again, and the run resumes",
        ) from error


def _read_result(handler: Any) -> tuple[int, str]:
    try:
        if handler._store.check([RESULT]):
            code, why = json.loads(handler._store.get(RESULT))
            return int(code), str(why)
    except dist.DistError:
        pass
    return 1, "see the logs of the other nodes"


def _describe_meeting(num_nodes: int, *, used: int, nodes: Nodes) -> str:
    here = f"{num_nodes} of {nodes.most} nodes are here"
    if not used:
        return (
            f"{here}, too few for a layout that elastic.may_change allows. Waiting for the others, "
            f"up to {nodes.wait_seconds} s (elastic.wait_seconds): start them again by the same "
            f"command, or allow other layouts and start all anew"
        )
    beside = f", {num_nodes - used} stand by: no layout fits more" if used < num_nodes else ""
    return f"{here}: {used} train{beside}"


def _describe_end(verdict: Verdict, *, lost: list[Any]) -> str:
    names = f" ({', '.join(f'{node.addr}, agent {node.pid}' for node in lost)})" if lost else ""
    then = {"done": "", "meet": "; the nodes meet again", "end": "; the job ends"}[verdict.action]
    return f"{verdict.why}{names}{then}"


def _say(what: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {what}\n")
    sys.stderr.flush()
