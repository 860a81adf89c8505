"""What context parallelism costs beside attention over the whole sequence on one rank.

    ours    a rank's part of causal attention, forward and backward, keys and values by ring,
            all-gather or ulysses (headtail balance)
    whole   scaled_dot_product_attention over all of the sequence, on each rank by itself

Both run on all --ranks at the same time, so both share the processors alike; a rank has a 1/N of
the work, so the ratio of times would be 1/N if nothing were lost. Output and gradients must agree
with those of the whole. The bytes are what a rank sends, forward and backward together.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.pairs import (
    Comparison,
    DisagreementError,
    Report,
    alternate,
    timed,
)
from scripts.benchmarks.ranks import run_ranks
from torchtitan.base.device import device_name, local_device
from torchtitan.base.errors import ConfigError
from torchtitan.mesh.ranks import RankInfo
from torchtitan.parallel.context.attention import Method, Ranks, build_attention
from torchtitan.parallel.context.layout import SequenceLayout

SUMMARY = "context parallelism, against attention over the whole sequence"
METHODS: tuple[Method, ...] = ("ring", "allgather", "ulysses")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--seq_len", type=int, default=4096, metavar="N", help="of the sequence")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="of queries")
    parser.add_argument("--kv_heads", type=int, default=4, metavar="N", help="of keys and values")
    parser.add_argument("--head_dim", type=int, default=64, metavar="N", help="width of a head")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="of all")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes")


def measure(args: argparse.Namespace) -> Report:
    """Measure each way, after checking what it computes.

    Raises:
        UserError: The sizes cannot be split, or results differ.
    """
    chunks = 2 * args.ranks
    if args.seq_len % chunks:
        raise ConfigError(
            f"--seq_len must be a multiple of {chunks} (2 for each rank), got {args.seq_len}; try "
            f"{max(1, args.seq_len // chunks) * chunks}"
        )
    if args.kv_heads % args.ranks or args.heads % args.kv_heads:
        raise ConfigError(
            f"--kv_heads must be a multiple of the {args.ranks} ranks and divide --heads, got "
            f"{args.kv_heads} and {args.heads}; try --heads {4 * args.ranks} --kv_heads "
            f"{2 * args.ranks}"
        )
    names = ("seq_len", "heads", "kv_heads", "head_dim", "dtype", "ranks")
    about = {name: getattr(args, name) for name in names}
    found = run_ranks(compare_methods, about | {"pairs": args.pairs}, ranks=args.ranks)
    target = f"{1 / args.ranks:.2f} is ideal"
    return Report(
        about=about | {"device": found["device"], "torch": torch.__version__},
        comparisons=[
            Comparison(f"{method} / whole", target, each["ours_s"], each["whole_s"])
            for method, each in found["methods"].items()
        ],
        notes=[
            f"{method}: a rank sends {each['bytes'] / 2**20:.2f} MiB; output and gradients agree "
            f"to {each['gap']:.1e}, {TOLERANCES[args.dtype]:g} is allowed"
            for method, each in found["methods"].items()
        ],
        more={"methods": found["methods"]},
    )


def compare_methods(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Time every method beside the whole sequence; rank 0's times are those of the slowest."""
    device = local_device(launch.local_rank)
    dtype, seq_len = getattr(torch, settings["dtype"]), settings["seq_len"]
    layout = SequenceLayout(degree=launch.world_size, balancer="headtail")
    assert dist.group.WORLD is not None
    ranks = Ranks(group=dist.group.WORLD, layout=layout)
    generator = torch.Generator().manual_seed(0)
    heads = (settings["heads"], settings["kv_heads"], settings["kv_heads"], settings["heads"])
    q, k, v, grad = (
        torch.randn((1, n, seq_len, settings["head_dim"]), generator=generator).to(device, dtype)
        for n in heads
    )
    positions = layout.positions(launch.rank, seq_len=seq_len).to(device)
    whole = _Work(_whole, [q, k, v], grad)
    methods = {}
    for method in METHODS:
        parts = [x.index_select(2, positions) for x in (q, k, v, grad)]
        ours = _Work(build_attention(method, ranks=ranks), parts[:3], parts[3])
        whole.run()
        ours.run()
        gap = _largest_gap(ours, whole, positions=positions)
        if not gap <= TOLERANCES[settings["dtype"]]:
            raise DisagreementError(
                f"{method} must agree with the whole sequence within "
                f"{TOLERANCES[settings['dtype']]:g} of the largest value, got {gap:g}; the two did "
                f"not compute the same, so no ratio is given"
            )
        times = alternate(method, "", ours.time, whole.time, num_pairs=settings["pairs"])
        methods[method] = {
            "ours_s": times.ours_s,
            "whole_s": times.other_s,
            "gap": gap,
            "bytes": sent_bytes(method, settings, element_size=q.element_size()),
        }
    return {"methods": methods, "device": device_name(device)}


def sent_bytes(method: str, settings: dict[str, Any], *, element_size: int) -> int:
    """Return what a rank sends in forward and backward of one layer, of one sequence.

    Ring and all-gather send a rank's keys and values to all others, in both passes, and their
    gradients once, in float32. Ulysses keeps 1/N of its part and sends the rest of queries, keys,
    values and output, forward and backward.
    """
    ranks, others = settings["ranks"], settings["ranks"] - 1
    per_head = settings["seq_len"] // ranks * settings["head_dim"]
    kv = 2 * settings["kv_heads"] * per_head
    if method == "ulysses":
        return 2 * (kv + 2 * settings["heads"] * per_head) * others // ranks * element_size
    gradient_hops = ranks if method == "ring" else others
    return kv * (2 * others * element_size + gradient_hops * 4)


class _Work:
    """Attention and its backward, on inputs of its own."""

    def __init__(self, attend: Any, inputs: list[Tensor], grad: Tensor) -> None:
        self._attend, self._grad = attend, grad
        self._inputs = [x.clone().requires_grad_() for x in inputs]
        self._out = grad

    def run(self) -> None:
        for x in self._inputs:
            x.grad = None
        self._out = self._attend(*self._inputs)
        self._out.backward(self._grad)

    def time(self) -> float:
        """Return the seconds of the slowest rank."""
        dist.barrier()
        seconds = torch.tensor(timed(self.run), dtype=torch.float64, device=self._grad.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def results(self) -> list[Tensor]:
        """Return output and gradients."""
        grads = [x.grad for x in self._inputs if x.grad is not None]
        return [self._out.detach(), *grads]


def _whole(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=True)


def _largest_gap(ours: _Work, whole: _Work, *, positions: Tensor) -> float:
    """Return the largest gap over all ranks, as a part of the largest value."""
    gaps = [
        (mine.float() - all_of.index_select(2, positions).float()).abs().max() / all_of.abs().max()
        for mine, all_of in zip(ours.results(), whole.results(), strict=True)
    ]
    gap = torch.stack(gaps).max()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    return float(gap)
