"""Runs of the real loader with the real sample log, and what explain says about them.

Tokens are bytes here: each part that is said to come from a row or a file is compared with the
bytes there.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np

from examples.sample_log import append
from torchtitan.config.settings import to_toml
from torchtitan.data.loader import Loader
from torchtitan.data.sampler import SkippedSamples
from torchtitan.data.store import TokenStore, open_writer
from torchtitan.job import load_config
from torchtitan.mesh.dims import resolve_dims
from torchtitan.metrics.events import EventLog, Hardware
from torchtitan.tools.explain.command import explain_step
from torchtitan.tools.explain.documents import RunData, Span
from torchtitan.tools.explain.steps import Stretch, read_history

LOCAL_BATCH = 2
SETTINGS: dict[str, tuple[str, ...]] = {
    "mixed": (
        "--training.dataset=files",
        '--training.dataset_path=["a.jsonl", "texts/*", "store.idx", "b.json"]',
        "--training.dataset_weights=[0.5, 0.3, 0.15, 0.05]",
        "--training.attn_mask_type=block_causal",
    ),
    "split": (
        "--training.dataset=files",
        '--training.dataset_path=["a.jsonl", "texts/*"]',
        "--validation.holdout_fraction=0.3",
    ),
    "packed": (
        "--training.dataset=examples",
        '--training.dataset_path=["sft.jsonl"]',
        "--training.packing=packed",
        "--training.attn_mask_type=block_causal",
    ),
    "gaps": (
        "--training.dataset=files",
        '--training.dataset_path=["a.jsonl"]',
        "--training.skip_samples",
        "3-21",
        "40-40",
    ),
    "padded": ("--training.dataset=examples", '--training.dataset_path=["sft.jsonl"]'),
}
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device": (1, ()),
    "dp 2": (2, ()),
    "cp 2": (2, ("--parallelism.context_parallel_degree=2",)),
    "dp 2, cp 2": (4, ("--parallelism.context_parallel_degree=2",)),
    "pp 2, dp 2": (4, ("--parallelism.pipeline_parallel_degree=2",)),
}
SMALL = (
    "--model.flavor=tiny",
    "--model.tokenizer_path=byte",
    "--training.seq_len=32",
    f"--training.local_batch_size={LOCAL_BATCH}",
    "--training.global_batch_size=8",
    "--training.callbacks=examples.sample_log:SampleLog",
    "--lr_scheduler.warmup_steps=2",
)


def write_data(folder: Path) -> None:
    """Write files of every kind, with blank lines, empty texts and documents of any length."""
    draw = random.Random(7)

    def text(most: int) -> str:
        return " ".join(f"word{draw.randrange(9999)}" for _ in range(draw.randrange(1, most)))

    rows = [{"text": text(40) if n % 9 else ""} for n in range(60)]
    lines = [json.dumps(row) + "\n" * (1 + (n % 7 == 0)) for n, row in enumerate(rows)]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.json").write_text(json.dumps([{"text": text(20)} for _ in range(20)]))
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text(text(900))
    with gzip.open(folder / "texts" / "two.txt.gz", "wt") as file:
        file.write(text(600))
    with open_writer(folder / "store", vocab_size=300) as writer:
        for n in range(30):
            ids = np.frombuffer(text(30 if n % 5 else 2).encode(), np.uint8).astype(np.int64)
            writer.add(ids, ends_document=True)
            if n == 12:
                writer.add(ids[:0], ends_document=True)
    examples = [
        {"prompt": text(2 if n % 5 else 9), "completion": text(4) if n % 8 else ""}
        for n in range(200)
    ]
    (folder / "sft.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))


def drive(run: Path, arguments: list[str], *, world: int, steps: int) -> None:
    """Draw the samples of all steps as each rank would, and log them."""
    given = [*SMALL, *arguments, f"--training.steps={steps}", f"--job.dump_folder={run}"]
    config = load_config(given)
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(config))
    record = Hardware(resumed_from=0, world_size=world, ranks_per_machine=world, device="cpu")
    EventLog(run).write("start", step=0, **asdict(record))
    dims, dataset = resolve_dims(config.parallelism, world_size=world), RunData(config).dataset
    local = config.training.local_batch_size
    for rank in range(world // dims.pp):
        dp_rank, others = divmod(rank, dims.cp * dims.tp)
        done = 0
        file = run / "samples" / f"rank_{rank}.jsonl"
        file.parent.mkdir(exist_ok=True)
        loader = Loader(
            dataset,
            local_batch_size=local,
            accumulation=config.training.global_batch_size // (local * dims.dp),
            dp_rank=dp_rank,
            dp_degree=dims.dp,
            settings=config.training.dataloader,
            skipped=SkippedSamples(config.training.skip_samples),
        )
        if others == 0:
            loader.on_sample = lambda number, tokens: append(
                file,  # noqa: B023 - called in this turn of the loop
                step=done + 1,  # noqa: B023
                number=number,
                tokens=tokens,
            )
        while done < steps:
            next(loader)
            done += 1


def read_log(run: Path) -> dict[int, list[tuple[int, str, int, int]]]:
    """Return number, hash, rank and microbatch of each sample, by step; a rank logs a step's
    microbatches one after another."""
    logged = defaultdict(list)
    for path in (run / "samples").glob("rank_*.jsonl"):
        rank = int(path.stem.removeprefix("rank_"))
        num_drawn: Counter[int] = Counter()
        for row in map(json.loads, path.read_text().splitlines()):
            step, microbatch = row["step"], num_drawn[row["step"]] // LOCAL_BATCH
            num_drawn[step] += 1
            logged[step].append((row["index"], row["hash"], rank, microbatch))
    return logged


def contents(where: str) -> bytes:
    """Read what `where` names, by nothing of the library but the store."""
    file, _, number = where.rpartition(" ")
    file, _, kind = file.rpartition(" ")
    if kind == "line":
        row = json.loads(Path(file).read_text().splitlines()[int(number) - 1])
        return (row["text"] if "text" in row else row["prompt"] + row["completion"]).encode()
    if kind == "item":
        return json.loads(Path(file).read_text())[int(number) - 1]["text"].encode()
    if kind == "document":
        return bytes(TokenStore(file).document(int(number)).tolist())
    raw = Path(where).read_bytes()
    return gzip.decompress(raw) if where.endswith(".gz") else raw


def stretch_of(run: Path, step: int) -> Stretch:
    """Return the steps with the same batch and layout as a step."""
    return next(s for s in read_history(run) if s.first_step <= step <= s.last_step)


def compare(run: Path) -> tuple[int, int]:
    """Compare all logged steps with what is explained; return the numbers of samples and parts."""
    data = RunData(read_history(run)[-1].config)
    num_samples = num_parts = 0
    for step, rows in sorted(read_log(run).items()):
        stretch, said = stretch_of(run, step), []
        for k, parts in explain_step(stretch, step, data=data).items():
            ranks, microbatch = stretch.reader_of(k)
            said.append((k, data.hash(k), ranks[0], microbatch))
            check_parts(data.tokens(k).tolist(), parts, eos_id=data.tokenizer.eos_id)
            num_parts += len(parts)
        assert said == sorted(rows), f"step {step}: explained {said}, logged {sorted(rows)}"
        num_samples += len(said)
    return num_samples, num_parts


def check_parts(tokens: list[int], parts: list[tuple[str, Span]], *, eos_id: int) -> None:
    """Compare each part of a sample with the bytes of the document that it is said to be of."""
    at = 0
    for name, span in parts:
        assert span.at == at
        at += span.num_tokens
        # behind the last byte stands the end token; a store of the user's own may have none
        whole = [*contents(name), eos_id]
        assert tokens[span.at : at] == whole[span.first : span.first + span.num_tokens], name
    assert at == len(tokens) or "sft.jsonl line" in parts[-1][0]
