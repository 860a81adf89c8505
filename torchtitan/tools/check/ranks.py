"""The ranks of a check, their machines, and the collection of their answers.

In every check each rank answers for itself or for its machine, and rank 0 gathers and compares the
answers. A failure is an answer too, so that no rank waits for a failed one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan.base.errors import UserError
from torchtitan.mesh.ranks import RankInfo

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank, and the machines of all ranks."""

    launch: RankInfo
    device: torch.device
    machines: Sequence[str]
    """Name of the machine, per rank."""

    @property
    def firsts(self) -> Sequence[int]:
        """First rank of each machine."""
        return [self.machines.index(machine) for machine in dict.fromkeys(self.machines)]

    @property
    def is_first(self) -> bool:
        """Whether this rank answers for its machine."""
        return self.launch.rank in self.firsts

    def gather(self, answer: T) -> list[T]:
        """Return the answers of all ranks on rank 0, else []."""
        answers: list[Any] = [None] * self.launch.world_size
        dist.gather_object(answer, answers if self.launch.rank == 0 else None)
        return answers if self.launch.rank == 0 else []

    def gather_first(self, answer: T) -> dict[str, T]:
        """Return the answer of each machine by name on rank 0, else {}."""
        answers = self.gather(answer)
        return {self.machines[rank]: answers[rank] for rank in self.firsts} if answers else {}

    def named(self, ranks: Sequence[int]) -> str:
        """Return a short text with ranks and their machines."""
        machines = ", ".join(dict.fromkeys(self.machines[rank] for rank in ranks))
        numbers = ", ".join(map(str, ranks[:4])) + (" ..." if len(ranks) > 4 else "")
        return f"rank{'s' * (len(ranks) > 1)} {numbers} on {machines}"


def find_ranks(launch: RankInfo, *, device: torch.device) -> Ranks:
    """Gather the host of each rank, with the number of torchrun's agent if a host has several."""
    own = socket.gethostname(), os.environ.get("GROUP_RANK", "0")
    results: list[Any] = [None] * launch.world_size
    dist.all_gather_object(results, own)
    hosts = {host: len({agent for h, agent in results if h == host}) for host, _ in results}
    names = [f"{host} (agent {agent})" if hosts[host] > 1 else host for host, agent in results]
    return Ranks(launch=launch, device=device, machines=names)


@dataclass(kw_only=True)
class Checked:
    """Result of a check, on rank 0."""

    name: str
    summary: str = ""
    """One line."""
    faults: Sequence[str] = ()


@dataclass(frozen=True)
class Failed:
    """Answer of a machine that cannot do something."""

    why: str


def attempt(work: Callable[[], T]) -> T | Failed:
    """Return the result of `work`, or its error."""
    try:
        return work()
    except (OSError, UserError) as error:
        return Failed(str(error))


def usual(values: Sequence[float]) -> float:
    """Return the median; of an even number of values, the larger of the two in the middle."""
    return sorted(values)[len(values) // 2]
