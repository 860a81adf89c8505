"""What the head's loss costs in chunks of tokens, side by side with whole logits.

    ours   torchtitan.optim.loss, from the head's input and weight
    other  F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")

both forward and backward, to the gradients of input and weight, which are compared first. Time is
that of the wall clock and, which other jobs on the machine disturb less, that of the processor.

Memory is the peak of a process of its own: the most that was resident (VmHWM, which misses nothing
between two samples) above what was resident before with input, weight and labels in place. The
weight's gradient is taken off, since every way has it in the end. So this needs Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.pairs import Comparison, Report, check_close
from torchtitan.base.errors import ConfigError
from torchtitan.optim.loss import IGNORE_INDEX, build_loss, chunk_size

SUMMARY = "the head's loss and gradients in chunks of tokens: time and memory"
CLOCKS = {"time": time.perf_counter, "processor time": time.process_time}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7}
"""How far apart gradients may be, relative; two roundings of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one comparison."""

    seq_len: int
    vocab_size: int
    width: int
    dtype: str
    num_chunks: int
    threads: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the head's input, its weight and labels, one in eight of them masked."""
        dtype = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(0)
        x_BSC = torch.empty(1, self.seq_len, self.width, dtype=dtype).normal_(generator=generator)
        weight_VC = torch.empty(self.vocab_size, self.width, dtype=dtype)
        weight_VC.normal_(std=self.width**-0.5, generator=generator)
        labels_BS = torch.randint(self.vocab_size, (1, self.seq_len), generator=generator)
        labels_BS[:, ::8] = IGNORE_INDEX
        return x_BSC.requires_grad_(), weight_VC.requires_grad_(), labels_BS

    def loss(self, *, is_ours: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return one of the two ways."""
        return build_loss(None, num_chunks=self.num_chunks) if is_ours else _of_whole_logits


def _of_whole_logits(x_BSC: Tensor, weight_VC: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(
        F.linear(x_BSC, weight_VC).flatten(0, 1).float(), labels_BS.flatten(), reduction="sum"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--seq_len", type=int, default=8192, metavar="S", help="tokens")
    parser.add_argument("--vocab_size", type=int, default=128256, metavar="V")
    parser.add_argument("--width", type=int, default=512, metavar="C")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="of x and weight")
    parser.add_argument(
        "--chunks", type=int, default=0, metavar="N", help="0: as training.loss_chunks does"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")


def measure(args: argparse.Namespace) -> Report:
    """Compare results, time and memory.

    Raises:
        UserError: The results differ, or the system does not tell a process's peak.
    """
    case = Case(
        seq_len=args.seq_len,
        vocab_size=args.vocab_size,
        width=args.width,
        dtype=args.dtype,
        num_chunks=args.chunks,
        threads=args.threads,
    )
    if not Path("/proc/self/status").exists():
        raise ConfigError("the peak of memory is read from /proc, which this system lacks")
    torch.set_num_threads(case.threads)
    size = chunk_size(case.seq_len, case.vocab_size, width=case.width, num_chunks=case.num_chunks)
    logits = 4 * case.seq_len * case.vocab_size
    peaks = {name: _peak_apart(case, is_ours=name == "ours") for name in ("ours", "other")}
    comparisons, gaps = _compare(case, num_pairs=args.pairs)
    notes = [
        f"peak memory, {name}: {peak / 2**30:.3f} GiB, {peak / logits:.1%} of the logits in "
        f"float32 ({logits / 2**30:.2f} GiB)"
        for name, peak in peaks.items()
    ]
    notes.append("apart: " + ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items()))
    return Report(
        about={**vars(case), "chunk_size": size, "torch": torch.__version__},
        comparisons=comparisons,
        notes=notes,
        more={"logits_bytes": logits, "peak_bytes": peaks, "gaps": gaps},
    )


def _compare(case: Case, *, num_pairs: int) -> tuple[list[Comparison], dict[str, float]]:
    """Time both ways in turns, by both clocks at once; tell how far apart their results are."""
    tensors = case.inputs()
    seconds: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    found: dict[bool, list[Tensor]] = {}
    for pair in range(num_pairs + 1):
        for is_ours, taken in seconds.items():
            for tensor in tensors[:2]:
                tensor.grad = None
            before = [clock() for clock in CLOCKS.values()]
            loss = _step(case, tensors, is_ours=is_ours)
            after = [clock() for clock in CLOCKS.values()]
            if pair == 0:  # it finds no memory, so it is compared and not counted
                found[is_ours] = [loss, *(end.grad for end in tensors[:2] if end.grad is not None)]
            else:
                taken.append(tuple(b - a for a, b in zip(before, after, strict=True)))
        if pair == 0:
            gaps = _gaps(found.pop(True), found.pop(False))
            for name, gap in gaps.items():
                check_close(name, [1.0 + gap], [1.0], tolerance=TOLERANCE[case.dtype])
    ours, other = (list(zip(*taken, strict=True)) for taken in seconds.values())
    comparisons = [
        Comparison(name, "at most 1.10", list(ours[i]), list(other[i]))
        for i, name in enumerate(CLOCKS)
    ]
    return comparisons, gaps


def _step(case: Case, tensors: tuple[Tensor, Tensor, Tensor], *, is_ours: bool) -> Tensor:
    loss = case.loss(is_ours=is_ours)(*tensors)
    (loss / case.seq_len).backward()
    return loss.detach()


def _gaps(ours: Sequence[Tensor], other: Sequence[Tensor]) -> dict[str, float]:
    """Return how far the results of the two ways are apart, relative."""
    return {
        name: ((a.float() - b.float()).norm() / b.float().norm()).item()
        for name, a, b in zip(("loss", "dx", "dweight"), ours, other, strict=True)
    }


def _peak_apart(case: Case, *, is_ours: bool) -> int:
    """Measure in a new process, so that nothing that was freed before is there to be reused."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(1) as pool:
        return pool.apply(_peak, (case,), {"is_ours": is_ours})


def _peak(case: Case, *, is_ours: bool) -> int:
    """Return bytes above the inputs and the weight's gradient."""
    torch.set_num_threads(case.threads)
    small = Case(**{**vars(case), "seq_len": 8, "vocab_size": 64})
    _step(small, small.inputs(), is_ours=is_ours)  # loads what torch loads at first use
    tensors = case.inputs()
    before = _status("VmRSS")
    _step(case, tensors, is_ours=is_ours)
    return _status("VmHWM") - before - tensors[1].nbytes


def _status(key: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024
