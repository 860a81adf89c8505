"""Pipeline schedules: the order of each rank's work, from torch's own tables, and their runtime.

A schedule class of torch computes the order when it is built, from three numbers: ranks, stages per
rank and microbatches. Here it is built around a placeholder for a stage, so the table is available
without ranks or a model. The runtime executes the same table, so that drawings, plans and runs
agree. Only this file imports `torch.distributed.pipelining`, whose internals change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import PipelineStage

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.execution import Batch

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
# the letters of torch's tables
KINDS: Mapping[str, Kind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}


@dataclass(frozen=True, order=True)
class Action:
    """One stage's work on one microbatch. `backward` covers both inputs and weights."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        letter = next(letter for letter, kind in KINDS.items() if kind == self.kind)
        return f"{self.stage}{letter}{self.microbatch}"


Table = list[list[Action]]
"""The actions of each rank, in order."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Properties of one schedule, read from torch's class where possible."""

    name: str
    microbatch_per_stage: bool = False
    """Whether it needs at least one microbatch per stage."""
    in_rounds: bool = False
    """Whether microbatches run in equal rounds of about one per rank."""

    @property
    def multi_stage(self) -> bool:
        """Whether a rank may hold several stages."""
        return not issubclass(get_schedule_class(self.name), PipelineScheduleSingle)

    @property
    def usual_stages(self) -> int:
        """Stages per rank, unless the settings determine them."""
        return 2 if self.multi_stage else 1

    @cached_property
    def placement(self) -> Literal["loop", "v"]:
        """Whether stages wrap around from the last rank to the first, or return rank by rank."""
        first_rank = {action.stage for action in self._example[0]}
        return "v" if 3 in first_rank else "loop"

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed separately."""
        return any(action.kind == "backward_input" for row in self._example for action in row)

    @cached_property
    def _example(self) -> Table:
        return _torch_table(self, pp=2, stages_per_rank=self.usual_stages, num=4)


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="GPipe"),
        Schedule(name="1F1B", microbatch_per_stage=True),
        Schedule(name="Interleaved1F1B", in_rounds=True),
        Schedule(name="LoopedBFS"),
        Schedule(name="InterleavedZeroBubble", in_rounds=True),
        Schedule(name="ZBVZeroBubble"),
        Schedule(name="DualPipeV", microbatch_per_stage=True),
    )
}


def check_schedule(schedule: str, *, pp: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Check that a schedule can run with these numbers; raise ConfigError if it cannot. The message
    suggests numbers that work."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"a pipeline schedule is one of {', '.join(SCHEDULES)}; got {schedule!r}")
    if min(pp, stages_per_rank, num_microbatches) < 1:
        raise ConfigError(
            f"ranks, stages per rank and microbatches must be at least 1, got {pp}, "
            f"{stages_per_rank} and {num_microbatches}"
        )
    facts, mistakes = SCHEDULES[schedule], []
    needed = 1 if not facts.multi_stage else 2 if facts.placement == "v" else stages_per_rank
    if stages_per_rank != needed:
        mistakes.append(
            f"{schedule} puts exactly {needed} stage{'s' * (needed > 1)} on a rank, got "
            f"{stages_per_rank}; for {pp} rank{'s' * (pp > 1)} make {needed * pp} in all, or "
            f"remove pipeline_parallel_layers_per_stage"
        )
    num_stages = pp * needed
    if facts.microbatch_per_stage and num_microbatches < num_stages:
        mistakes.append(
            f"{schedule} needs at least as many microbatches as stages: {num_stages} for {pp} "
            f"ranks of {needed}, got {num_microbatches}; use more microbatches (a larger "
            "training.local_batch_size or a smaller pipeline_parallel_microbatch_size), or fewer "
            "ranks"
        )
    rounds = max(1, num_microbatches // pp)
    if facts.in_rounds and num_microbatches % rounds:
        fits = [n for n in range(1, 2 * num_microbatches + 1) if n % max(1, n // pp) == 0]
        below = max(n for n in fits if n < num_microbatches)
        above = min(n for n in fits if n > num_microbatches)
        mistakes.append(
            f"{schedule} runs microbatches in equal rounds: {num_microbatches} do not divide by "
            f"{rounds} rounds ({num_microbatches} // {pp} ranks); try {below} or {above}"
        )
    if mistakes:
        raise ConfigError(mistakes)


def compute_table(schedule: str, *, pp: int, stages_per_rank: int, num_microbatches: int) -> Table:
    """Return the actions of each rank, in order, as computed by torch's schedule class.

    A pair that DualPipeV marks as overlapped appears as two actions in turn, which is how torch's
    runtime executes it. Raises ConfigError if the schedule cannot run with these numbers.
    """
    check_schedule(
        schedule, pp=pp, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches
    )
    return _torch_table(
        SCHEDULES[schedule], pp=pp, stages_per_rank=stages_per_rank, num=num_microbatches
    )


def _torch_table(schedule: Schedule, *, pp: int, stages_per_rank: int, num: int) -> Table:
    # the attributes of a stage that the constructors of torch's schedules read
    stage: Any = SimpleNamespace(
        group_rank=0, group_size=pp, num_stages=pp * stages_per_rank, submod=None
    )
    stages = [stage] * stages_per_rank if schedule.multi_stage else stage
    order = get_schedule_class(schedule.name)(stages, num).pipeline_order
    table: Table = []
    for rank in range(pp):
        # no gaps, no reductions, pairs unpacked
        parts = [
            part for action in order[rank] if action for part in action.sub_actions or [action]
        ]
        row = [
            Action(part.stage_index, KINDS[part.computation_type.value], part.microbatch_index)
            for part in parts
            if part.computation_type.value in KINDS
        ]
        if not schedule.multi_stage:  # torch's 1F1B numbers the last rank's forwards from 1
            numbers = count()
            row = [
                replace(action, microbatch=next(numbers)) if action.kind == "forward" else action
                for action in row
            ]
        table.append(row)
    return table


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of the tensors between stages, so that torch need not infer them from a trial run."""

    tokens: tuple[int, int]
    stream: tuple[int, int, int]
    dtype: torch.dtype
    """Dtype of the stream."""

    def examples(self, *, first: bool, last: bool) -> dict[str, Tensor]:
        """Return a stage's input and output on the meta device."""
        stream = torch.empty(self.stream, dtype=self.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(self.tokens, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return {
            "input_args": tokens if first else stream,
            "output_args": loss if last else stream,
        }


class Stage(PipelineStage):
    """A stage that never sends to its own rank."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 connects adjacent stages on the same rank too, which gloo refuses
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]


class _Schedule(_PipelineScheduleRuntime):
    """Takes batches that are already split, because torch would split only tensors."""

    def _split_inputs(self, args: tuple[Any, ...], kwargs: Any = None) -> tuple[Any, Any]:
        [microbatches] = args
        return [args for args, _ in microbatches], [kwargs for _, kwargs in microbatches]

    def _warmup_p2p(self, stages: Any, *args: Any, **kwargs: Any) -> None:
        if dist.get_backend(stages[0].group) != "fake":
            super()._warmup_p2p(stages, *args, **kwargs)
            return
        from torch.distributed.pipelining.schedules import InferenceMode  # torch 2.11 has none

        for stage in stages:  # a plan has a fake group, and no peer to agree with
            stage._inference_mode = InferenceMode.STATIC


class Runtime:
    """Executes a table over the stages of this rank, with torch's own runtime.

    All schedules run this way, including those with one stage per rank, so that drawings match
    runs. Pairs of DualPipeV run as two actions that each send their result at once. A table with
    only forwards is for evaluation.

    `stages` are the modules of this rank, by stage. `loss` maps the loss and the labels of a
    microbatch to the scalar to run backward from.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        table: Table,
        shapes: Shapes,
        group: dist.ProcessGroup,
        device: torch.device,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        ranks = ranks_of(table)
        num_stages = len(ranks)
        self._holds_first, self._holds_last = 0 in stages, num_stages - 1 in stages
        self._schedule = _Schedule(
            [
                Stage(
                    module,
                    index,
                    num_stages,
                    device,
                    group=group,
                    **shapes.examples(first=index == 0, last=index == num_stages - 1),
                )
                for index, module in stages.items()
            ],
            count_microbatches(table),
            loss_fn=loss,
            scale_grads=False,
        )
        self._trains = any(action.kind != "forward" for row in table for action in row)
        for owner in (self._schedule, *self._schedule._stages):
            owner.stage_index_to_group_rank = dict(enumerate(ranks))
        self._schedule.pipeline_order_with_comms = lower(table)

    def run(self, microbatches: Sequence[Batch]) -> None:
        """Run the microbatches of a batch through the table."""
        run = self._schedule.step if self._trains else self._schedule.eval
        inputs: list[tuple[tuple[Tensor, ...], dict[str, object]]] = []
        for part in microbatches:
            kwargs: dict[str, object] = {"positions": part.positions, "labels": part.labels}
            if part.documents is not None:  # split backwards of torch 2.11 do not support None
                kwargs["documents"] = part.documents
            inputs.append(((part.tokens,) if self._holds_first else (), kwargs))
        # the model has the labels already, but torch requires a target to compute a loss
        target = torch.cat([part.labels for part in microbatches]) if self._holds_last else None
        run(inputs, target=target, return_outputs=False)
        if not self._trains:
            for stage in self._schedule._stages:
                stage.clear_runtime_states()  # no backward will free them


def forward_table(ranks: Sequence[int], *, num_microbatches: int) -> Table:
    """Return the table that runs each stage forward over all microbatches in order."""
    table: Table = [[] for _ in range(max(ranks) + 1)]
    for stage, rank in enumerate(ranks):
        table[rank] += [Action(stage, "forward", number) for number in range(num_microbatches)]
    return table


def ranks_of(table: Table) -> tuple[int, ...]:
    """Return the rank of each stage of a table."""
    ranks = {action.stage: rank for rank, row in enumerate(table) for action in row}
    return tuple(ranks[stage] for stage in range(len(ranks)))


def count_microbatches(table: Table) -> int:
    """Return the number of microbatches of a table."""
    return 1 + max(action.microbatch for row in table for action in row)


def lower(table: Table) -> dict[int, list[_Action]]:
    """Add the remaining actions: gather a stage's weights, reduce its gradients, send and receive.

    Stages are gathered once, before the first action of their rank, and kept until their last one.
    (torch's own preparation keeps at most three stages, so a rank with four gathers them again and
    again. It does not support tables without backwards either.)
    """
    ranks = ranks_of(table)
    num_microbatches = count_microbatches(table)
    actions = {}
    for rank, row in enumerate(table):
        num_stages = len({action.stage for action in row})
        torch_row = [_Action.from_str(str(action)) for action in row]
        gathering = _add_unshard_reshard(torch_row, max_active_stages=num_stages)
        actions[rank] = _add_reduce_grad(gathering, num_microbatches)
    lowered: dict[int, list[_Action]] = _add_send_recv(
        actions, stage_to_rank=lambda stage: ranks[stage], num_stages=len(ranks)
    )
    # torch 2.15 waits for a send where the table has an action for it, earlier ones at the end
    add_wait_send = getattr(torch_schedules, "_add_wait_send", None)
    return add_wait_send(lowered) if add_wait_send else lowered
