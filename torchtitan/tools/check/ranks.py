"""The ranks that are looked at, the machines they run on, and how their answers come together.

Every check has the same course: each rank answers for itself or for its machine, rank 0 gathers the
answers, compares them and writes down what does not fit. What a rank cannot do is an answer too, so
that no rank waits for one that has failed.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan.base.errors import UserError
from torchtitan.mesh.ranks import RankInfo

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank, and where all ranks of the job run."""

    launch: RankInfo
    device: torch.device
    machines: Sequence[str]
    """Of each rank the name of its machine."""

    @property
    def firsts(self) -> Sequence[int]:
        """The first rank of each machine."""
        return [self.machines.index(machine) for machine in dict.fromkeys(self.machines)]

    @property
    def is_first(self) -> bool:
        """Whether this rank answers for its machine."""
        return self.launch.rank in self.firsts

    def gather(self, answer: T) -> list[T]:
        """Return the answers of all ranks on rank 0, and none on others."""
        answers: list[Any] = [None] * self.launch.world_size
        dist.gather_object(answer, answers if self.launch.rank == 0 else None)
        return answers if self.launch.rank == 0 else []

    def gather_first(self, answer: T) -> dict[str, T]:
        """Return the answer of each machine, by its name, on rank 0, and none on others."""
        answers = self.gather(answer)
        return {self.machines[rank]: answers[rank] for rank in self.firsts} if answers else {}

    def named(self, ranks: Sequence[int]) -> str:
        """Return ranks and their machines as a reader wants to see them."""
        machines = ", ".join(dict.fromkeys(self.machines[rank] for rank in ranks))
        numbers = ", ".join(map(str, ranks[:4])) + (" ..." if len(ranks) > 4 else "")
        return f"rank{'s' * (len(ranks) > 1)} {numbers} on {machines}"


def find_ranks(launch: RankInfo, *, device: torch.device) -> Ranks:
    """Ask all ranks where they run. torchrun numbers its agents, of which two may share a host."""
    own = socket.gethostname(), os.environ.get("GROUP_RANK", "0")
    found: list[Any] = [None] * launch.world_size
    dist.all_gather_object(found, own)
    hosts = {host: len({agent for h, agent in found if h == host}) for host, _ in found}
    names = [f"{host} (agent {agent})" if hosts[host] > 1 else host for host, agent in found]
    return Ranks(launch=launch, device=device, machines=names)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that does not fit, and what to do about it."""

    what: str
    remedy: str


@dataclass(kw_only=True)
class Checked:
    """What a check says."""

    name: str
    summary: str
    """One line."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "ok": not self.findings}


@dataclass(frozen=True)
class Failed:
    """Why a machine could not do what was asked."""

    why: str


def attempt(work: Callable[[], T]) -> T | Failed:
    """Return what `work` returns, or why it cannot: a file, a folder or a setting."""
    try:
        return work()
    except (OSError, UserError) as error:
        return Failed(str(error))


def odd_ones(answers: Mapping[str, T]) -> tuple[T, dict[str, T]]:
    """Return what most machines answer, of equally many the first's, and those that differ."""
    usual = Counter(answers.values()).most_common(1)[0][0]
    return usual, {machine: answer for machine, answer in answers.items() if answer != usual}


def usual(values: Sequence[float]) -> float:
    """Return the median, of an even number the larger one: of two the quicker is the usual."""
    return sorted(values)[len(values) // 2]
