"""What a step of FSDP does, counted: the same on every machine.

    ours           the trainer's own step, rehearsed by `torchtitan plan`
    transformers   its model, loss and checkpointing with FSDP2 on each block and on the whole, a
                   clipped norm and fused AdamW, recorded by the same tape
    least          by formula: what no program can do without that shards in this way

Both are one rank's step on fake tensors in worlds that do not exist, all layers of them. Per step:
bytes gathered and reduced; per layer and token: bytes kept for backward; the most that lives at
once; operators launched, apart those that multiply (products) and those that only move memory
(passes: what they read and write, views and allocations left out); and, counted in real steps of a
tiny model, how often the host waits for the device.

The least gathers all weights for forward, and again for backward but for the ends of the model and
the last block, and launches nothing but products. It keeps of each block without recomputation
what the gradients are made of (the inputs of products and norms, queries, keys, values and output
of attention, both factors of SwiGLU), with it the input alone, and lives with that, weights,
optimizer and one gathered block; or, once all is reduced, with gradients.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from scripts.benchmarks.pairs import Report
from scripts.benchmarks.ranks import run_ranks
from scripts.benchmarks.rehearsed import rehearse_theirs
from scripts.benchmarks.turns import OURS, THEIRS
from scripts.benchmarks.waits import SETTINGS, count_waits
from torchtitan.base.device import GIB
from torchtitan.models.families import find_model
from torchtitan.models.settings import ModelConfig
from torchtitan.models.sizes import DecoderConfig
from torchtitan.tools.plan.account import classify, replay
from torchtitan.tools.plan.devices import find_device
from torchtitan.tools.plan.job import plan_job
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.tools.plan.tape import Record

SUMMARY = "what a step moves, keeps and launches, beside transformers and the least possible"
LEAST = "least"
LOW, FULL = 2, 4
"""Bytes of what is computed with, and of weights, gradients and each moment of the optimizer."""
MODES = {
    "none": ("none", "1"),
    "full": ("full", "1"),
    "op": ("selective", "op"),
}
"""Recomputation: `activation_checkpoint.mode` and `selective_ac_option`. "op" is ours alone."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One rank's optimizer step; None: there is no formula."""

    gathered: float
    reduced: float
    """Bytes of whole tensors."""
    kept: float | None
    """Bytes of a block's forward that wait for its backward, per token."""
    peak: float | None
    """The most bytes that live at once."""
    reserved: float | None
    """What torch's allocator takes for that."""
    products: int
    passes: int | None
    """Operators."""
    passed: float | None
    """Bytes that passes read and write."""


ROWS: Mapping[str, tuple[str, float, str]] = {
    "gathered": ("gathered, GiB", GIB, ",.2f"),
    "reduced": ("reduced, GiB", GIB, ",.2f"),
    "kept": ("kept per layer and token, bytes", 1, ",.0f"),
    "peak": ("peak of live memory, GiB", GIB, ",.2f"),
    "reserved": ("reserved by torch, GiB", GIB, ",.2f"),
    "products": ("products launched", 1, ",.0f"),
    "passes": ("passes launched", 1, ",.0f"),
    "passed": ("read and written by passes, GiB", GIB, ",.1f"),
}
OF_A_WORLD = ("peak", "reserved", "passed")
"""Counts that depend on the number of ranks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--flavor", default="8B", metavar="NAME", help="size of llama3")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512], metavar="N")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples per rank")
    parser.add_argument("--seq_len", type=int, default=8192, metavar="N", help="tokens of a sample")
    parser.add_argument("--recompute", nargs="+", choices=list(MODES), default=list(MODES))


def measure(args: argparse.Namespace) -> Report:
    """Count all that is asked for.

    Raises:
        UserError: A setting is refused.
    """
    spec, sizes = find_model(ModelConfig(name="llama3", flavor=args.flavor))
    has_theirs = importlib.util.find_spec("transformers") is not None
    found: dict[str, dict[int, dict[str, Counts]]] = {}
    for mode in args.recompute:
        found[mode] = {}
        for world in args.worlds:
            shape = {"world_size": world, "batch": args.batch, "seq_len": args.seq_len}
            tokens = args.batch * args.seq_len
            record = rehearse_ours(args.flavor, mode=mode, **shape)
            found[mode][world] = {OURS: count(record, tokens=tokens)}
            if mode == "op":
                continue
            if has_theirs:
                record = rehearse_theirs(sizes, spec=spec, recomputes=mode == "full", **shape)
                found[mode][world][THEIRS] = count(record, tokens=tokens)
            found[mode][world][LEAST] = least(sizes, world=world, tokens=tokens, mode=mode)
    loops = [OURS, THEIRS] if has_theirs else [OURS]
    waits = {name: run_ranks(count_waits, SETTINGS | {"loop": name}, ranks=1) for name in loops}
    notes = [
        f"{name}: in a step the host waits {each['step']['waits']} times for the device, in one "
        f"that is reported {each['reported']['waits']}; {each['step']['read later']} numbers are "
        "copied to it and read later"
        for name, each in waits.items()
    ]
    if not has_theirs:
        notes.append("transformers is left out: not installed (pip install -e '.[bench]')")
    counts = {
        mode: {str(world): {n: asdict(c) for n, c in by.items()} for world, by in worlds.items()}
        for mode, worlds in found.items()
    }
    names = ("flavor", "worlds", "batch", "seq_len")
    return Report(
        about={name: getattr(args, name) for name in names} | {"torch": torch.__version__},
        comparisons=[],
        tables={f"recomputation {mode}": _table(worlds) for mode, worlds in found.items()},
        notes=notes,
        more={"counts": counts, "waits": waits},
    )


def _table(worlds: Mapping[int, Mapping[str, Counts]]) -> list[list[str]]:
    first = next(iter(worlds))
    rows = [["", *worlds[first]]]
    for name, (title, unit, form) in ROWS.items():
        for world in worlds if name in OF_A_WORLD else [first]:
            values = [getattr(counts, name) for counts in worlds[world].values()]
            shown = ["" if value is None else format(value / unit, form) for value in values]
            rows.append([f"{title}, {world} ranks" if name in OF_A_WORLD else title, *shown])
    return rows


def rehearse_ours(flavor: str, *, mode: str, world_size: int, batch: int, seq_len: int) -> Record:
    """Record a step of rank 0 of the trainer."""
    recompute, option = MODES[mode]
    settings = {
        "model.flavor": flavor,
        "model.tokenizer_path": "byte",
        "training.dataset": "synthetic",
        "training.seq_len": seq_len,
        "training.local_batch_size": batch,
        "training.mixed_precision_param": "bfloat16",
        "activation_checkpoint.mode": recompute,
        "activation_checkpoint.selective_ac_option": option,
    }
    logging.disable(logging.WARNING)  # of a job that is never run
    try:
        planned = plan_job(
            [f"--{name}={value}" for name, value in settings.items()],
            world_size=world_size,
            device=find_device("H100", memory_gib=None),
            gpus_per_node=8,
        )
    finally:
        logging.disable(logging.NOTSET)
    return rehearse_rank(planned, 0)


def count(record: Record, *, tokens: int) -> Counts:
    """Count a record; `tokens`: of the rank."""
    num: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for entry in record.entries:
        what: str = entry.what
        if what == "message":
            what = "gather" if "gather" in entry.where[1] else entry.where[1]
        num[what] += 1
        size[what] += entry.size
    account = replay(record, expandable=True)
    return Counts(
        gathered=size["gather"],
        reduced=size["reduce_scatter_base"],
        kept=_kept(record, block=1) / tokens,
        peak=sum(account.by_kind.values()),
        reserved=account.reserved,
        products=num["product"],
        passes=num["pass"],
        passed=size["pass"],
    )


def _kept(record: Record, *, block: int) -> int:
    """Return the bytes that a block's forward leaves to its backward."""
    kinds = classify(record)
    return sum(
        record.entries[index].size
        for piece, end in record.bounds()
        if (piece.phase, piece.block) == ("forward", block)
        for index in range(piece.start, end)
        if record.entries[index].what == "birth" and kinds[index] == "activations"
    )


def least(sizes: DecoderConfig, *, world: int, tokens: int, mode: str) -> Counts:
    """Return what a step needs at least."""
    width, kv = sizes.dim, _kv_width(sizes)
    matrices = 2 * width * width + 2 * width * kv + 3 * width * sizes.hidden_dim
    block, end, layers = matrices + 2 * width, sizes.vocab_size * width, sizes.num_layers
    parameters = layers * block + 2 * end + width
    saved = _saved(sizes)
    kept = LOW * width if mode == "full" else saved
    # the input is there already
    again = tokens * (saved - kept)
    state = 3 * FULL * parameters / world
    backward = state + layers * tokens * kept + again + LOW * block
    # of a block 7 products and attention, in backward twice as many and attention; the head's 3;
    # recomputed, the block's last product is not needed again
    products = layers * (7 + 1 + 2 * 7 + 1 + (7 if mode == "full" else 0)) + 3
    return Counts(
        gathered=LOW * (parameters + (layers - 1) * block),
        reduced=FULL * parameters,
        kept=kept,
        peak=max(backward, state + FULL * parameters / world),
        reserved=None,
        products=products,
        passes=None,
        passed=None,
    )


def _saved(sizes: DecoderConfig) -> int:
    """Return the bytes per token of what a block's gradients are made of."""
    # inputs of both norms and what these return, q and the output of attention; k, v; both factors
    # of SwiGLU and their product
    numbers = 6 * sizes.dim + 2 * _kv_width(sizes) + 3 * sizes.hidden_dim
    in_full = sizes.num_heads + 2  # log-sum-exp of attention, 1 / rms of both norms
    return LOW * numbers + FULL * in_full


def _kv_width(sizes: DecoderConfig) -> int:
    return sizes.dim * sizes.num_kv_heads // sizes.num_heads
