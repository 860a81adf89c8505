"""Time and memory of the head's loss in chunks of tokens, beside the loss of unchunked logits.

    chunks torchtitan.optim.loss, from the head's input and weight
    logits F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")

Both run forward and backward; loss and gradients are compared first. Memory is the peak resident
set (VmHWM) of a separate process, minus that before with input, weight and labels in place, and
minus the weight's gradient, which every way has in the end. This needs Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.pairs import Report, alternate, check_close, timed
from torchtitan.base.errors import ConfigError
from torchtitan.optim.loss import IGNORE_INDEX, build_loss, chunk_size

TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7}
"""Relative difference of results; two roundings of bfloat16."""
SIZES = ("seq_len", "vocab_size", "width", "dtype", "chunks", "threads")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one comparison."""

    seq_len: int
    vocab_size: int
    width: int
    dtype: str
    chunks: int
    threads: int

    def inputs(self) -> list[Tensor]:
        """Return the head's input, its weight and labels, an eighth of them masked."""
        dtype = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(0)
        x_BSC = torch.empty(1, self.seq_len, self.width, dtype=dtype).normal_(generator=generator)
        weight_VC = torch.empty(self.vocab_size, self.width, dtype=dtype)
        weight_VC.normal_(std=self.width**-0.5, generator=generator)
        labels_BS = torch.randint(self.vocab_size, (1, self.seq_len), generator=generator)
        labels_BS[:, ::8] = IGNORE_INDEX
        return [x_BSC.requires_grad_(), weight_VC.requires_grad_(), labels_BS]

    def loss(self, *, is_ours: bool) -> Callable[..., Tensor]:
        """Return one of the two losses."""
        return build_loss(None, num_chunks=self.chunks) if is_ours else _loss_of_logits


def _loss_of_logits(x_BSC: Tensor, weight_VC: Tensor, labels_BS: Tensor) -> Tensor:
    logits_NV = F.linear(x_BSC, weight_VC).flatten(0, 1).float()
    return F.cross_entropy(logits_NV, labels_BS.flatten(), reduction="sum")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--seq_len", type=int, default=8192, metavar="S", help="tokens")
    parser.add_argument("--vocab_size", type=int, default=128256, metavar="V")
    parser.add_argument("--width", type=int, default=512, metavar="C")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="of x and weight")
    parser.add_argument(
        "--chunks", type=int, default=0, metavar="N", help="as training.loss_chunks (0: automatic)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")


def measure(args: argparse.Namespace) -> Report:
    """Compare results, time and memory.

    Raises:
        UserError: The results differ, or /proc is missing.
    """
    case = Case(**{name: getattr(args, name) for name in SIZES})
    if not Path("/proc/self/status").exists():
        raise ConfigError("the peak memory is read from /proc, which this system lacks")
    torch.set_num_threads(case.threads)
    size = chunk_size(case.seq_len, case.vocab_size, width=case.width, num_chunks=case.chunks)
    logits = 4 * case.seq_len * case.vocab_size
    peaks = {name: _peak_apart(case, is_ours=name == "ours") for name in ("ours", "other")}
    tensors = case.inputs()
    ours, other = (partial(_step, case, tensors, is_ours=is_ours) for is_ours in (True, False))
    gaps = {}
    for name, a, b in zip(("loss", "dx", "dweight"), ours(), other(), strict=True):
        gaps[name] = ((a.float() - b.float()).norm() / b.float().norm()).item()
        check_close(name, [1.0 + gaps[name]], [1.0], tolerance=TOLERANCE[case.dtype])
    notes = [
        f"peak memory, {name}: {peak / 2**30:.3f} GiB, {peak / logits:.1%} of the logits in "
        f"float32 ({logits / 2**30:.2f} GiB)"
        for name, peak in peaks.items()
    ]
    return Report(
        about={**vars(case), "chunk_size": size, "torch": torch.__version__},
        comparisons=alternate(
            "chunks / logits",
            "at most 1.10",
            lambda: timed(ours),
            lambda: timed(other),
            num_pairs=args.pairs,
        ),
        notes=[*notes, "differences: " + ", ".join(f"{n} {gap:.1e}" for n, gap in gaps.items())],
        more={"logits_bytes": logits, "peak_bytes": peaks, "gaps": gaps},
    )


def _step(case: Case, tensors: list[Tensor], *, is_ours: bool) -> list[Tensor]:
    """Return the loss and the gradients of input and weight."""
    x_BSC, weight_VC, _ = tensors
    x_BSC.grad = weight_VC.grad = None
    loss = case.loss(is_ours=is_ours)(*tensors)
    (loss / case.seq_len).backward()
    return [loss.detach(), *(end.grad for end in (x_BSC, weight_VC) if end.grad is not None)]


def _peak_apart(case: Case, *, is_ours: bool) -> int:
    """Measure in a new process, which has no freed memory to reuse."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(1) as pool:
        return pool.apply(_peak, (case,), {"is_ours": is_ours})


def _peak(case: Case, *, is_ours: bool) -> int:
    """Return the peak in bytes above the inputs and the weight's gradient."""
    torch.set_num_threads(case.threads)
    small = replace(case, seq_len=8, vocab_size=64)
    _step(small, small.inputs(), is_ours=is_ours)  # loads libraries that torch loads lazily
    tensors = case.inputs()
    before = _status("VmRSS")
    _step(case, tensors, is_ours=is_ours)
    return _status("VmHWM") - before - tensors[1].nbytes


def _status(key: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024
