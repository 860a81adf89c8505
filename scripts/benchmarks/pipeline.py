"""The idle time of pipeline schedules, measured against what their tables promise.

    measured   ranks that run the library's runtime; a stage sleeps for as long as its work is said
               to take: --sleep_ms forward, as much for each half of backward
    promised   the same table played through on paper (torchtitan.tools.plan.schedule), with the
               mean of the naps that the stages took in that very pass

Stages that sleep take equal times and no processor, so that several ranks on few cores measure the
schedule and not each other; what is left over the promise is what the runtime and the messages
cost. A figure is one pass through the table, on the rank that took longest. Each stage doubles what
it gets: output and gradients are checked. Stage 0 has tokens as input: where a schedule parts the
halves of backward torch does both of its naps in the second, which ends no step later on paper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.benchmarks.pairs import Comparison, Report, check_close
from scripts.benchmarks.ranks import run_ranks
from torchtitan.mesh.ranks import RankInfo
from torchtitan.parallel.execution import Batch
from torchtitan.parallel.pipeline.schedules import (
    SCHEDULES,
    Runtime,
    Shapes,
    Table,
    check_schedule,
    compute_table,
    ranks_of,
)
from torchtitan.tools.plan.schedule import Costs, Timeline, simulate

SUMMARY = "idle time of the schedules, against what their tables promise"
TARGET = "at most 1.15"
WIDTH = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    names = list(SCHEDULES)
    parser.add_argument(
        "--schedules", nargs="+", choices=names, default=names, metavar="NAME", help="which"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--microbatches", type=int, default=4, metavar="N", help="of a step")
    parser.add_argument("--sleep_ms", type=float, default=50.0, metavar="N", help="of a forward")


def measure(args: argparse.Namespace) -> Report:
    """Run every schedule for as many steps as there are pairs, after one that is not counted.

    Raises:
        UserError: A schedule cannot run so many microbatches on so many ranks.
    """
    for name in args.schedules:
        check_schedule(
            name,
            pp=args.ranks,
            stages_per_rank=_stages_per_rank(name),
            num_microbatches=args.microbatches,
        )
    settings = {
        "schedules": args.schedules,
        "ranks": args.ranks,
        "microbatches": args.microbatches,
        "sleep_ms": args.sleep_ms,
        "steps": args.pairs + 1,
    }
    found = run_ranks(run_schedules, settings, ranks=args.ranks)
    comparisons, notes = [], []
    bubbles: dict[str, Any] = {}
    for name in args.schedules:
        # the first pass is not counted
        times, naps = found[name]["seconds"][1:], found[name]["naps"][1:]
        promised = [_promise(name, settings, nap=nap) for nap in naps]
        bubble = promised[0].total_bubble
        idle = [
            seconds / each.makespan * (1 + bubble) - 1
            for seconds, each in zip(times, promised, strict=True)
        ]
        bubbles[name] = {"promised": bubble, "measured": idle}
        notes.append(f"{name}: idle {median(idle):.1%} of the computing, promised {bubble:.1%}")
        comparisons.append(Comparison(name, TARGET, times, [each.makespan for each in promised]))
        num_stages = args.ranks * _stages_per_rank(name)
        output = 2.0**num_stages * WIDTH * args.microbatches
        check_close(
            f"output and gradients of {name}",
            [found[name]["output"], found[name]["gradient"]],
            [output, output / 2 * num_stages],  # each weight of 2 has half the output as gradient
            tolerance=1e-6,
        )
    about = {"ranks": args.ranks, "microbatches": args.microbatches, "sleep_ms": args.sleep_ms}
    return Report(
        about=about | {"torch": torch.__version__},
        comparisons=comparisons,
        notes=["ours: the runtime; other: its table on paper; both of stages that sleep", *notes],
        more={"bubbles": bubbles},
    )


def _stages_per_rank(name: str) -> int:
    return 2 if SCHEDULES[name].multi_stage else 1


def _table(name: str, settings: dict[str, Any]) -> Table:
    return compute_table(
        name,
        pp=settings["ranks"],
        stages_per_rank=_stages_per_rank(name),
        num_microbatches=settings["microbatches"],
    )


def _nap(name: str, settings: dict[str, Any]) -> float:
    # equal work on a rank, however many stages share it
    return float(settings["sleep_ms"]) / 1e3 / _stages_per_rank(name)


def _promise(name: str, settings: dict[str, Any], *, nap: float) -> Timeline:
    costs = Costs(forward=nap, backward=2 * nap, backward_input=nap, backward_weight=nap)
    return simulate(_table(name, settings), costs=costs)


class _Sleep(torch.autograd.Function):
    """Doubles x; each of forward, gradient of the input and gradient of the weight takes a nap.

    The two gradients sit on two nodes, since schedules that part them run one node at a time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: Callable[[], None]) -> Tensor:
        ctx.nap = nap
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.nap()
        return grads[0] * 1.0, None


class SleepingStage(nn.Module):
    """A stage of equal, known times: a weight of one element, and naps in its graph."""

    def __init__(self, *, seconds: float, first: bool, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))
        self._seconds, self._first, self._last = seconds, first, last
        self.naps: list[float] = []

    def nap(self) -> None:
        """Sleep, and note how long it was: a busy machine wakes nobody in time."""
        began = time.perf_counter()
        time.sleep(self._seconds)
        self.naps.append(time.perf_counter() - began)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        """Return 2 x, or on the last stage its sum."""
        self.nap()
        if self._first:
            # tokens have no gradient: the input's half is the embedding's
            x = torch.ones((*x.shape, WIDTH), requires_grad=True)
        weight = _Sleep.apply(self.weight, self.nap)
        out: Tensor = _Sleep.apply(x, self.nap) * weight
        return out.sum() if self._last else out


def run_schedules(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run each schedule for some steps; return the seconds of each, and what came out."""
    return {name: _run(name, launch.rank, settings) for name in settings["schedules"]}


def _run(name: str, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    table = _table(name, settings)
    ranks = ranks_of(table)
    last = len(ranks) - 1
    stages = {
        stage: SleepingStage(seconds=_nap(name, settings), first=stage == 0, last=stage == last)
        for stage, holder in enumerate(ranks)
        if holder == rank
    }
    assert dist.group.WORLD is not None
    total = torch.zeros(())

    def count(output: Tensor, target: Tensor) -> Tensor:
        nonlocal total
        total = total + output.detach()
        return output

    runtime = Runtime(
        stages,
        table=table,
        shapes=Shapes(tokens=(1, 1), stream=(1, 1, WIDTH), dtype=torch.float32),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        loss=count,
    )
    one = torch.zeros((1, 1), dtype=torch.int64)
    batches = [Batch(tokens=one, labels=one, positions=one[0])] * settings["microbatches"]
    seconds, naps = [], []
    for _ in range(settings["steps"]):
        total = torch.zeros(())
        for stage in stages.values():
            stage.weight.grad = None
            stage.naps.clear()
        dist.barrier()
        began = time.perf_counter()
        runtime.run(batches)
        seconds.append(_over_ranks(time.perf_counter() - began, dist.ReduceOp.MAX))
        own = mean(nap for stage in stages.values() for nap in stage.naps)
        naps.append(_over_ranks(own, dist.ReduceOp.SUM) / dist.get_world_size())
    grads = [stage.weight.grad for stage in stages.values()]
    results = torch.stack([total, torch.stack([g.sum() for g in grads if g is not None]).sum()])
    dist.all_reduce(results)
    output, gradient = results.tolist()
    return {"seconds": seconds, "naps": naps, "output": output, "gradient": gradient}


def _over_ranks(value: float, reduction: Any) -> float:
    reduced = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(reduced, reduction)
    return float(reduced)
