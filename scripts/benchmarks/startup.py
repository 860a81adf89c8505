"""The time from a command to the first finished step.

    train  python -m torchtitan.train with one step
    bare   a script that imports torch, builds the same model and optimizer, and takes one step

Each start is a new process; files are in the page cache and the text is already tokenized. Both
print the loss of the step, which must agree. The processor time of a process and its children is
compared as well, because load from other processes affects only the elapsed time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.benchmarks.pairs import (
    ELAPSED,
    PROCESSOR,
    DisagreementError,
    Report,
    Spent,
    alternate,
    check_close,
)
from torchtitan.data.documents import build_text
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import load_config
from torchtitan.metrics.rows import read_rows
from torchtitan.models.families import find_model
from torchtitan.models.init import initialize
from torchtitan.models.settings import ModelConfig

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5

BARE = """
import json, os, sys
import torch
import torch.nn.functional as F
from torchtitan.models.decoder import Decoder
from torchtitan.models.llama3 import FLAVORS

flavor, rows, weights = sys.argv[1:]
tokens, labels = torch.load(rows)
model = Decoder(FLAVORS[flavor])
model.load_state_dict(torch.load(weights))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(json.dumps(loss.item()), flush=True)
os._exit(0)  # without waiting for destructors, as the library
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--flavor", default="tiny", metavar="NAME", help="size of llama3")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="samples of the step")
    parser.add_argument("--seq_len", type=int, default=64, metavar="N", help="tokens per sample")


def measure(args: argparse.Namespace) -> Report:
    """Start both in turn.

    Raises:
        UserError: A setting is refused, a start fails, or the losses differ.
    """
    losses: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = _job(args, folder=folder)
        bare = _prepare(args, job=job, folder=folder)

        def start_ours() -> Spent:
            shutil.rmtree(folder / "job", ignore_errors=True)
            _, spent = _start([sys.executable, "-m", "torchtitan.train", *job])
            [row] = read_rows(folder / "job" / "metrics.jsonl")
            losses[0].append(row["loss"])
            return spent

        def start_bare() -> Spent:
            output, spent = _start(bare)
            losses[1].append(json.loads(output))
            return spent

        comparisons = alternate(
            "start / bare script", "at most 1.30", start_ours, start_bare, num_pairs=args.pairs
        )
    gap = check_close("loss of the first step", *losses, tolerance=TOLERANCE)
    about = {"flavor": args.flavor, "batch": args.batch, "seq_len": args.seq_len}
    return Report(
        about=about | {"torch": torch.__version__},
        comparisons=comparisons,
        notes=[f"losses of the first step agree to {gap:.1e}, tolerance {TOLERANCE:g}"],
    )


def _job(args: argparse.Namespace, *, folder: Path) -> list[str]:
    _, architecture = find_model(ModelConfig(flavor=args.flavor))
    tokenizer = "bpe_2048" if architecture.vocab_size >= 2048 else "byte"
    return [
        f"--job.dump_folder={folder / 'job'}",
        f"--model.flavor={args.flavor}",
        f"--model.tokenizer_path={tokenizer}",
        "--training.steps=1",
        f"--training.seq_len={args.seq_len}",
        f"--training.local_batch_size={args.batch}",
        "--training.dataset=synthetic",
        "--training.mixed_precision_param=float32",
        "--activation_checkpoint.mode=none",
    ]


def _prepare(args: argparse.Namespace, *, job: Sequence[str], folder: Path) -> list[str]:
    """Write the first batch and the initial weights; return the bare script's command."""
    config = load_config(job)
    spec, architecture = find_model(ModelConfig(flavor=args.flavor))
    model = spec.build(architecture)
    initialize(model, seed=config.debug.seed)
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    dataset = build_text(config.training, tokenizer=tokenizer, seed=config.debug.seed)
    samples = [dataset[k] for k in range(args.batch)]
    rows, weights, script = folder / "rows.pt", folder / "weights.pt", folder / "bare.py"
    batch = [torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels")]
    torch.save(batch, rows)
    torch.save(model.state_dict(), weights)
    script.write_text(BARE, encoding="utf-8")
    return [sys.executable, str(script), args.flavor, str(rows), str(weights)]


def _start(command: Sequence[str]) -> tuple[str, Spent]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    used, started = _processor_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    elapsed = time.perf_counter() - started
    if done.returncode:
        raise DisagreementError(f"a start failed with code {done.returncode}:\n{done.stderr}")
    return done.stdout, {ELAPSED: elapsed, PROCESSOR: _processor_seconds() - used}


def _processor_seconds() -> float:
    """Return the processor time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
