"""From a command to the first finished step.

    ours   python -m torchtitan.train with one step
    bare   a script that imports torch, builds the same model and optimizer, and takes one step

Each start is a new process, files in the page cache, text tokenised by an earlier start. Both print
the loss of that step, which must agree. The time of a process on a busy machine is mostly waiting,
so processor seconds, of the process and what it starts, are compared as well.
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
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.benchmarks.pairs import Comparison, DisagreementError, Report, check_close
from torchtitan.data.dataset import build_dataset
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import load_config
from torchtitan.metrics.rows import read_rows
from torchtitan.models.families import find_model
from torchtitan.models.init import initialize
from torchtitan.models.settings import ModelConfig

SUMMARY = "from the command to the first finished step"
ROOT = Path(__file__).parents[2]
TARGET = "at most 1.30"
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
os._exit(0)  # the library does not wait for destructors either
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--flavor", default="tiny", metavar="NAME", help="size of llama3")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="samples of the step")
    parser.add_argument("--seq_len", type=int, default=64, metavar="N", help="tokens of a sample")


def measure(args: argparse.Namespace) -> Report:
    """Start both in turn.

    Raises:
        UserError: A setting is refused, a start fails, or the losses differ.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = _job(args, folder=folder)
        bare = _prepare(args, job=job, folder=folder)
        ours = [sys.executable, "-m", "torchtitan.train", *job]
        pairs = []
        for _ in range(args.pairs + 1):
            shutil.rmtree(folder / "job", ignore_errors=True)
            first = _start(ours)
            [row] = read_rows(folder / "job" / "metrics.jsonl")
            second = _start(bare)
            loss = json.loads(second.output)
            gap = check_close("loss of the first step", [row["loss"]], [loss], tolerance=TOLERANCE)
            pairs.append((first, second))
    counted = pairs[1:]
    return Report(
        about={"flavor": args.flavor, "batch": args.batch, "seq_len": args.seq_len}
        | {"torch": torch.__version__},
        comparisons=[
            Comparison(
                f"start / bare script, {what}",
                TARGET,
                [getattr(a, name) for a, _ in counted],
                [getattr(b, name) for _, b in counted],
            )
            for what, name in (("elapsed", "seconds"), ("processor", "processor_seconds"))
        ],
        notes=[f"losses of the first step agree to {gap:.1e}, {TOLERANCE:g} is allowed"],
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
    """Write down the first batch and the initial weights; return the bare script's command."""
    config = load_config(job)
    spec, architecture = find_model(ModelConfig(flavor=args.flavor))
    model = spec.build(architecture)
    initialize(model, seed=config.debug.seed)
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    dataset = build_dataset(config.training, tokenizer=tokenizer, seed=config.debug.seed)
    samples = [dataset[k] for k in range(args.batch)]
    rows, weights, script = folder / "rows.pt", folder / "weights.pt", folder / "bare.py"
    batch = [torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels")]
    torch.save(batch, rows)
    torch.save(model.state_dict(), weights)
    script.write_text(BARE, encoding="utf-8")
    return [sys.executable, str(script), args.flavor, str(rows), str(weights)]


@dataclass(frozen=True)
class _Start:
    output: str
    seconds: float
    processor_seconds: float


def _start(command: Sequence[str]) -> _Start:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    spent, began = processor_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise DisagreementError(f"a start failed, so there is nothing to compare:\n{done.stderr}")
    return _Start(done.stdout, seconds, processor_seconds() - spent)


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def processor_seconds() -> float:
    """Return what processes that have ended, started by this one, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
