"""The idle time of pipeline schedules, beside that of their tables.

    measured   ranks run the library's pipeline runtime with stages that sleep: --sleep_ms in
               forward, and the same in each half of backward
    computed   the same table simulated (torchtitan.tools.plan.schedule) with the mean sleep of the
               stages in that pass

Sleeping stages take equal times and no processor, so that several ranks on few cores measure the
schedule; the difference is the cost of the runtime and its messages. A time is one pass through the
table on the slowest rank. Each stage doubles its input: output and gradients are checked. Stage 0
has tokens as its input: if a schedule splits backward, torch sleeps for both halves in the second.
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
    check_schedule,
    compute_table,
    ranks_of,
)
from torchtitan.tools.plan.schedule import Costs, simulate

WIDTH = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    names = list(SCHEDULES)
    parser.add_argument("--schedules", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--microbatches", type=int, default=4, metavar="N", help="per step")
    parser.add_argument("--sleep_ms", type=float, default=50.0, metavar="N", help="per forward")


def measure(args: argparse.Namespace) -> Report:
    """Run a step of each schedule per pair; the first is not counted.

    Raises:
        UserError: A schedule does not support the numbers of ranks and microbatches.
    """
    shape = {name: _shape(name, args) for name in args.schedules}
    for name in args.schedules:
        check_schedule(name, **shape[name])
    settings = {"shapes": shape, "sleep_ms": args.sleep_ms, "steps": args.pairs + 1}
    found = run_ranks(run_schedules, settings, ranks=args.ranks)
    comparisons, notes = [], []
    bubbles: dict[str, Any] = {}
    for name in args.schedules:
        table = compute_table(name, **shape[name])
        seconds, naps = found[name]["seconds"][1:], found[name]["naps"][1:]
        lines = [
            simulate(
                table,
                costs=Costs(forward=nap, backward=2 * nap, backward_input=nap, backward_weight=nap),
            )
            for nap in naps
        ]
        bubble, ideal = lines[0].total_bubble, [line.makespan for line in lines]
        idle = [
            taken / least * (1 + bubble) - 1 for taken, least in zip(seconds, ideal, strict=True)
        ]
        bubbles[name] = {"computed": bubble, "measured": idle}
        notes.append(f"{name}: idle {median(idle):.1%} of the compute time, computed {bubble:.1%}")
        comparisons.append(Comparison(name, "at most 1.15", seconds, ideal))
        num_stages = args.ranks * shape[name]["stages_per_rank"]
        output = 2.0**num_stages * WIDTH * args.microbatches
        check_close(
            f"output and gradients of {name}",
            [found[name]["output"], found[name]["gradient"]],
            [output, output / 2 * num_stages],  # each weight of 2 has the gradient output / 2
            tolerance=1e-6,
        )
    about = {"ranks": args.ranks, "microbatches": args.microbatches, "sleep_ms": args.sleep_ms}
    return Report(
        about=about | {"torch": torch.__version__},
        comparisons=comparisons,
        notes=notes,
        more={"bubbles": bubbles},
    )


def _shape(name: str, args: argparse.Namespace) -> dict[str, int]:
    stages = 2 if SCHEDULES[name].multi_stage else 1
    return {"pp": args.ranks, "stages_per_rank": stages, "num_microbatches": args.microbatches}


class _Sleep(torch.autograd.Function):
    """Identity that sleeps in backward.

    The gradients of input and weight are separate nodes, because schedules that split backward run
    one node at a time.
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
    """A stage with a weight of one element, which sleeps for a known time."""

    def __init__(self, *, seconds: float, first: bool, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))
        self._seconds, self._first, self._last = seconds, first, last
        self.naps: list[float] = []

    def nap(self) -> None:
        """Sleep, and record the actual time, which is longer on a busy machine."""
        started = time.perf_counter()
        time.sleep(self._seconds)
        self.naps.append(time.perf_counter() - started)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        """Return 2 x, or its sum on the last stage."""
        self.nap()
        if self._first:
            # tokens have no gradient: as the output of an embedding
            x = torch.ones((*x.shape, WIDTH), requires_grad=True)
        weight = _Sleep.apply(self.weight, self.nap)
        out: Tensor = _Sleep.apply(x, self.nap) * weight
        return out.sum() if self._last else out


def run_schedules(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run all schedules; return the times and results of each."""
    return {name: _run(name, launch.rank, settings) for name in settings["shapes"]}


def _run(name: str, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    shape = settings["shapes"][name]
    table = compute_table(name, **shape)
    ranks = ranks_of(table)
    # equal work per rank for any number of stages
    seconds = settings["sleep_ms"] / 1e3 / shape["stages_per_rank"]
    stages = {
        stage: SleepingStage(seconds=seconds, first=stage == 0, last=stage == len(ranks) - 1)
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
    batches = [Batch(tokens=one, labels=one, positions=one[0])] * shape["num_microbatches"]
    times, naps = [], []
    for _ in range(settings["steps"]):
        total = torch.zeros(())
        for stage in stages.values():
            stage.weight.grad = None
            stage.naps.clear()
        dist.barrier()
        started = time.perf_counter()
        runtime.run(batches)
        times.append(_over_ranks(time.perf_counter() - started, dist.ReduceOp.MAX))
        own = mean(nap for stage in stages.values() for nap in stage.naps)
        naps.append(_over_ranks(own, dist.ReduceOp.SUM) / dist.get_world_size())
    grads = [stage.weight.grad for stage in stages.values()]
    results = torch.stack([total, torch.stack([g.sum() for g in grads if g is not None]).sum()])
    dist.all_reduce(results)
    output, gradient = results.tolist()
    return {"seconds": times, "naps": naps, "output": output, "gradient": gradient}


def _over_ranks(value: float, reduction: Any) -> float:
    reduced = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(reduced, reduction)
    return float(reduced)
