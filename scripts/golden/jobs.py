"""The jobs whose numbers are recorded, and the text that they train on.

Every job is a change of one base job, so that a difference points at one feature. The base trains
on examples in padded samples: each rank and each microbatch has another number of valid labels, so
that a wrong divisor shows. The text is written here, since anything installed may change.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BASE = """
[model]
flavor = "tiny"
tokenizer_path = "byte"
[training]
dataset = "examples"
dataset_path = ["examples.jsonl"]
dataset_cache = "cache"
seq_len = 32
local_batch_size = 4
global_batch_size = 8
steps = 4
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 2
total_steps = 6
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 100
"""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One start of a run: on so many ranks, with options of the trainer."""

    options: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True)
class Job:
    """A run of one leg, or of several; each resumes the checkpoint of the previous one."""

    legs: tuple[Leg, ...]


def _options(text: str) -> tuple[str, ...]:
    return tuple(f"--{word}" for word in text.split())


def _run(text: str = "", *, ranks: int = 1) -> Leg:
    return Leg(options=_options(text), ranks=ranks)


def _job(text: str = "", *, ranks: int = 1) -> Job:
    return Job((_run(text, ranks=ranks),))


def _degree(axis: str) -> str:
    return f"parallelism.{axis}_parallel_degree=2"


PP, CP = _degree("pipeline"), _degree("context")
EVEN = "model.vocab_size=264"
TP = f"{_degree('tensor')} {EVEN}"
ZERO_BUBBLE = (
    "model.flavor=tiny8 parallelism.pipeline_parallel_schedule=ZBVZeroBubble "
    "activation_checkpoint.mode=none"
)
REPLICATE = "parallelism.data_parallel_replicate_degree=2"
WITHIN = "training.attn_mask_type=block_causal"
FILES = "training.dataset=files training.dataset_path=documents.jsonl"
LORA = "lora.rank=4 lora.alpha=8.0 optimizer.lr=0.02"
SMALLEST = "model.flavor=smallest"
SIZES = (
    "model.dim=8 model.num_heads=2 model.num_kv_heads=1 model.hidden_dim=16 model.vocab_size=258 "
    "model.num_layers={}"
)
DENSE = (
    f"{SIZES.format(1)} {FILES} "
    "validation.enable=true validation.holdout_fraction=0.2 validation.freq=3 validation.steps=2"
)
NOISY = "training.loss=tests.fixtures.own_loss:noisy"
SHARDED = SIZES.format(1)
ADAPTERS = f"{SIZES.format(1)} {LORA} {WITHIN} training.packing=packed"
EXPERTS = (
    "model.name=deepseek_v3 model.dim=4 model.num_heads=2 model.num_kv_heads=2 "
    "model.q_lora_rank=8 model.kv_lora_rank=8 model.hidden_dim=8 model.expert_hidden_dim=4 "
    "model.vocab_size=258 model.num_layers=2 "
    "router.bias_update_rate=0.01 router.sequence_loss_weight=0.01 "
    f"{FILES} {WITHIN} training.reset_positions=true"
)
THREE, SIX = "training.steps=3", "training.steps=6"

JOBS: Mapping[str, Job] = {
    "single": _job("training.local_batch_size=8"),
    "accumulation": _job("training.local_batch_size=2"),
    "fsdp2": _job(SIX, ranks=2),
    "ddp2": _job(f"{REPLICATE} parallelism.data_parallel_shard_degree=1", ranks=2),
    "hsdp2x2": _job(f"{REPLICATE} training.local_batch_size=2", ranks=4),
    "tp2": _job(TP, ranks=2),
    "cp2": _job(CP, ranks=2),
    "cp2_ring": _job(f"{CP} parallelism.context_parallel_rotate_method=ring", ranks=2),
    "pp2": _job(PP, ranks=2),
    "pp2_zero_bubble": _job(f"{PP} {ZERO_BUBBLE}", ranks=2),
    "tp2_fsdp2": _job(TP, ranks=4),
    "tp2_pp2": _job(f"{TP} {PP}", ranks=4),
    "packed_examples": _job(f"{WITHIN} training.packing=packed", ranks=2),
    "documents_within": _job(f"{WITHIN} {FILES} training.reset_positions=true", ranks=2),
    "lora": _job(LORA, ranks=2),
    "bfloat16": _job("training.mixed_precision_param=bfloat16", ranks=2),
    "validation": _job(
        f"{FILES} validation.enable=true validation.holdout_fraction=0.2 validation.freq=2", ranks=2
    ),
    "qwen3": _job("model.name=qwen3 model.flavor=tiny8", ranks=2),
    "sgd": _job("optimizer.name=SGD optimizer.momentum=0.9 training.loss_chunks=3"),
    "resume_fsdp2": Job((_run(THREE, ranks=2), _run(SIX, ranks=2))),
    "resume_fsdp2_as_tp2": Job((_run(f"{THREE} {EVEN}", ranks=2), _run(f"{SIX} {TP}", ranks=2))),
    "resume_pp2_as_single": Job((_run(f"{THREE} {PP}", ranks=2), _run(SIX))),
    "smallest_single": _job(f"{SMALLEST} {SIX}"),
    "smallest_fsdp2": _job(f"{SMALLEST} {SIX}", ranks=2),
    "smallest_lora": _job(f"{SMALLEST} {LORA} {SIX}"),
    "whole_dense": _job(f"{DENSE} {NOISY} {SIX}"),
    "whole_fsdp2": _job(f"{SHARDED} {SIX}", ranks=2),
    "whole_lora": _job(f"{ADAPTERS} {SIX}"),
    "whole_experts": _job(f"{EXPERTS} {SIX}"),
}

WORDS = ("red", "blue", "stone", "river", "nine", "bird", "over", "slow")


def write_data(folder: Path) -> None:
    """Write the TOML of the base job and its text."""
    (folder / "base.toml").write_text(BASE, encoding="utf-8")
    for name, lines in (("examples", _examples()), ("documents", _documents())):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _examples() -> Iterator[dict[str, str]]:
    for number in range(60):
        rest = " ".join(_words(number, 1 + number * number % 5))
        yield {"prompt": f"{number} ", "completion": rest}


def _documents() -> Iterator[dict[str, str]]:
    for number in range(120):
        yield {"text": " ".join(_words(1000 + number, 2 + number * number % 11))}


def _words(seed: int, count: int) -> list[str]:
    # of all generators in `random`, Python promises only the values of random()
    draw = random.Random(seed).random
    return [WORDS[int(draw() * len(WORDS))] for _ in range(count)]
