"""Rules that tie several settings together, as far as the file alone can tell.

Each names the keys it ties, so that the message can point at the file that gave them, and so that a
rule stays silent while one of its keys is wrong in itself. What needs the number of ranks or the
model's sizes is checked at assembly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from math import prod

from torchtitan.config.block_rules import block_rules
from torchtitan.config.broken import Broken
from torchtitan.config.parallelism import CHUNKS_A_RANK
from torchtitan.config.rope import NEEDED, READ
from torchtitan.config.schema import CheckpointConfig, Config


def broken_rules(config: Config) -> Iterator[Broken]:
    """Check every rule."""
    yield from _job(config)
    yield from _profiling(config)
    yield from _rope(config)
    yield from _data(config)
    yield from _examples(config)
    yield from _batch(config)
    yield from _workers(config)
    yield from _optimization(config)
    yield from _degrees(config)
    yield from block_rules(config)
    yield from _pipeline(config)
    yield from _sequence(config)
    yield from _checkpoint(config)
    yield from _debug(config)


def _job(config: Config) -> Iterator[Broken]:
    name = config.job.save_config_file
    if name is not None and (_leads_outside(name) or os.path.normpath(name) == "."):
        yield Broken(
            ("job.save_config_file",),
            f'must be a file inside dump_folder, got "{name}"; write a name alone, as "job.toml"',
        )


def _profiling(config: Config) -> Iterator[Broken]:
    profiling = config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.profile_freq < needed:
        keys = ("profile_freq", "profiler_warmup", "profiler_active")
        yield Broken(
            tuple(f"profiling.{key}" for key in keys),
            f"must be at least profiler_warmup + profiler_active ({profiling.profiler_warmup} + "
            f"{profiling.profiler_active}), got {profiling.profile_freq}; try {needed}",
        )


def _rope(config: Config) -> Iterator[Broken]:
    scaling = config.model.rope_scaling
    section = "model.rope_scaling"
    reads = ", ".join(READ[scaling.type]) or "nothing else"
    for key, value in asdict(scaling).items():
        if key in NEEDED[scaling.type] and value is None:
            yield Broken((f"{section}.type", f"{section}.{key}"), f"needs {key}; it reads {reads}")
        elif key != "type" and key not in READ[scaling.type] and value is not None:
            readers = " or ".join(f'"{name}"' for name, keys in READ.items() if key in keys)
            yield Broken(
                (f"{section}.{key}", f"{section}.type"),
                f'is not read by type = "{scaling.type}", which reads {reads}; remove it, or write '
                f"type = {readers}",
            )


def _leads_outside(name: str) -> bool:
    # as text: the folder need not be there yet
    return os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == ".."


def _data(config: Config) -> Iterator[Broken]:
    training = config.training
    num_paths, num_weights = len(training.dataset_path), len(training.dataset_weights)
    keys = ("training.dataset_path", "training.dataset")
    reads = ("files", "examples")
    if training.dataset in reads and not num_paths:
        yield Broken(keys[::-1], "needs dataset_path, the files to read")
    if training.dataset not in reads and num_paths:
        yield Broken(
            keys,
            'is read only with dataset = "files" or "examples", '
            f'got "{training.dataset}"; change or remove',
        )
    if num_weights and training.dataset == "examples":
        yield Broken(
            ("training.dataset_weights", keys[1]),
            'is for dataset = "files"; examples are one source, in which each comes once an epoch',
        )
    elif num_weights and num_weights != num_paths:
        yield Broken(
            ("training.dataset_weights", keys[0]),
            f"must hold one weight for each dataset_path, got {num_weights} for {num_paths}",
        )


def _examples(config: Config) -> Iterator[Broken]:
    training = config.training
    given = {
        "chat_template": training.chat_template is not None,
        "packing": training.packing != "padded",
        "long_examples": training.long_examples != "truncate",
    }
    if training.dataset not in ("examples", "synthetic_examples"):
        for key in (key for key, differs in given.items() if differs):
            yield Broken(
                (f"training.{key}", "training.dataset"),
                'is read only with dataset = "examples" or "synthetic_examples", got '
                f'"{training.dataset}"; change or remove',
            )
    elif training.packing == "packed" and training.document_attention != "within":
        yield Broken(
            ("training.packing", "training.document_attention"),
            'needs document_attention = "within", which keeps the examples of a sample apart',
        )


def _batch(config: Config) -> Iterator[Broken]:
    whole, local = config.training.global_batch_size, config.training.local_batch_size
    if whole != -1 and (whole < 1 or whole % local):
        yield Broken(
            ("training.global_batch_size", "training.local_batch_size"),
            f"must be -1 or a positive multiple of local_batch_size ({local}), got {whole}; "
            f"try {max(whole // local, 1) * local}",
        )


def _workers(config: Config) -> Iterator[Broken]:
    loader = config.training.dataloader
    section = "training.dataloader"
    if loader.num_workers == 0:
        rule = "needs worker processes, got num_workers = 0; raise num_workers or remove this"
        if loader.persistent_workers:
            yield Broken((f"{section}.persistent_workers", f"{section}.num_workers"), rule)
        if loader.prefetch_factor is not None:
            yield Broken((f"{section}.prefetch_factor", f"{section}.num_workers"), rule)


def _optimization(config: Config) -> Iterator[Broken]:
    optimizer, schedule = config.optimizer, config.lr_scheduler
    if optimizer.momentum and optimizer.name != "SGD":
        yield Broken(
            ("optimizer.momentum", "optimizer.name"),
            f'is read by SGD alone, got name = "{optimizer.name}"; use beta1 or remove this',
        )
    # A warmup longer than the run is fine: the run then simply ends while warming up.
    total, decays_to_zero = schedule.total_steps, schedule.min_lr_factor == 0
    decays = schedule.decay_ratio is None or schedule.decay_ratio > 0
    if total is not None and total < config.training.steps and decays and decays_to_zero:
        yield Broken(
            ("lr_scheduler.total_steps", "training.steps", "lr_scheduler.min_lr_factor"),
            f"must be at least training.steps ({config.training.steps}), got {total}: the learning "
            "rate would be 0 from there on; raise it, or set min_lr_factor",
        )


def _degrees(config: Config) -> Iterator[Broken]:
    degree = config.parallelism.data_parallel_shard_degree
    if degree != -1 and degree < 1:
        yield Broken(
            ("parallelism.data_parallel_shard_degree",),
            f"must be -1 (all ranks left over) or at least 1, got {degree}",
        )


def _pipeline(config: Config) -> Iterator[Broken]:
    """Hold batch, microbatches and stages of a pipeline together, where there is one."""
    parallelism, local = config.parallelism, config.training.local_batch_size
    if parallelism.pipeline_parallel_degree == 1:
        return
    size = parallelism.pipeline_parallel_microbatch_size
    number = parallelism.pipeline_parallel_num_microbatches
    layers = parallelism.pipeline_parallel_layers_per_stage
    prefix = "parallelism.pipeline_parallel_"
    keys = (f"{prefix}num_microbatches", f"{prefix}microbatch_size")
    ties = ("training.local_batch_size", f"{prefix}degree")
    if number is not None and size not in (1, local // number):
        yield Broken(
            keys,
            f"is another way to say microbatch_size, but both are given: {number} microbatches of "
            f"local_batch_size {local}, and microbatch_size {size}; remove one of them",
        )
    elif number is not None and local % number:
        fits = [str(n) for n in range(1, local + 1) if local % n == 0]
        yield Broken(
            (keys[0], *ties),
            f"must divide local_batch_size ({local}), got {number}; try {', '.join(fits)}",
        )
    elif number is None and local % size:
        yield Broken(
            (keys[1], *ties),
            f"must divide local_batch_size ({local}), got {size}; try local_batch_size = "
            f"{local // size * size or size}, or set num_microbatches",
        )
    if parallelism.module_fqns_per_model_part and layers is not None:
        yield Broken(
            ("parallelism.module_fqns_per_model_part", f"{prefix}layers_per_stage"),
            f"lists the stages, but layers_per_stage = {layers} asks for others; remove one",
        )


def _sequence(config: Config) -> Iterator[Broken]:
    parallelism, seq_len = config.parallelism, config.training.seq_len
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if cp == 1:
        return
    factors = [(cp, f"context_parallel_degree {cp}")]
    balancer, method = (
        parallelism.context_parallel_load_balancer,
        parallelism.context_parallel_rotate_method,
    )
    if balancer == "balanced" and method == "ulysses":
        yield Broken(
            (
                "parallelism.context_parallel_load_balancer",
                "parallelism.context_parallel_rotate_method",
            ),
            'is for "ring" and "allgather": under "ulysses" every rank attends over the whole '
            'sequence with its own heads, so all work alike; write "headtail" or "none"',
        )
    if CHUNKS_A_RANK[balancer] > 1:
        chunks = CHUNKS_A_RANK[balancer]
        factors.append((chunks, f"{chunks} chunks a rank under {balancer}"))
    if tp > 1 and parallelism.enable_sequence_parallel:
        factors.append((tp, f"tensor_parallel_degree {tp} under sequence parallelism"))
    parts = prod(factor for factor, _ in factors)
    if seq_len % parts:
        product = " x ".join(name for _, name in factors)
        yield Broken(
            (
                "training.seq_len",
                "parallelism.context_parallel_degree",
                "parallelism.context_parallel_load_balancer",
                "parallelism.tensor_parallel_degree",
                "parallelism.enable_sequence_parallel",
            ),
            f"seq_len must be a multiple of {parts} ({product}), got {seq_len}; "
            f"try {max(seq_len // parts, 1) * parts}",
        )


def _checkpoint(config: Config) -> Iterator[Broken]:
    checkpoint = config.checkpoint
    if _leads_outside(checkpoint.folder):
        # dump_folder is what a run locks
        yield Broken(
            ("checkpoint.folder",),
            f'must be a folder inside dump_folder, got "{checkpoint.folder}"; write a name alone, '
            f'as "checkpoint", and choose the place by job.dump_folder',
        )
    if checkpoint.load_step < -1:
        yield Broken(
            ("checkpoint.load_step",),
            f"must be -1 (the newest) or a step, got {checkpoint.load_step}",
        )
    needs_loading = {
        "load_step": checkpoint.load_step > -1,
        "load_only": checkpoint.load_only,
        "mode": checkpoint.mode != "recover",
        "initial_load_path": checkpoint.initial_load_path is not None,
        "initial_load_in_hf": checkpoint.initial_load_in_hf,
        "exclude_from_loading": bool(checkpoint.exclude_from_loading),
    }
    for key, given in needs_loading.items():
        if given and not checkpoint.enable:
            yield Broken(
                (f"checkpoint.{key}", "checkpoint.enable"), "needs checkpoint.enable = true"
            )
    if checkpoint.save_before_seconds is not None and not checkpoint.enable:
        yield Broken(
            ("checkpoint.save_before_seconds", "checkpoint.enable"),
            "needs checkpoint.enable = true; there is nothing to save to without",
        )
    if checkpoint.enable:
        yield from _intention(checkpoint)
    yield from _hugging_face(checkpoint)


def _hugging_face(checkpoint: CheckpointConfig) -> Iterator[Broken]:
    """Hold together what is read from Hugging Face, and what is written for it."""
    reads, ties = "checkpoint.initial_load_in_hf", "checkpoint.initial_load_path"
    if checkpoint.enable and checkpoint.initial_load_in_hf:
        if checkpoint.initial_load_path is None:
            yield Broken((reads, ties), "needs initial_load_path, the folder to read")
        elif not checkpoint.initial_load_model_only:
            yield Broken(
                (reads, ties, "checkpoint.initial_load_model_only"),
                "finds weights alone there, but initial_load_model_only is false; remove that",
            )
    writes = ("checkpoint.last_save_in_hf", "checkpoint.enable")
    if checkpoint.last_save_in_hf and not checkpoint.enable:
        yield Broken(writes, "needs checkpoint.enable = true; it is made from the last checkpoint")
    if checkpoint.export_dtype != "float32" and not checkpoint.last_save_in_hf:
        yield Broken(
            ("checkpoint.export_dtype", writes[0]),
            f"is the type of what last_save_in_hf writes, which is off, got "
            f'"{checkpoint.export_dtype}"; the other checkpoints keep training.dtype; set '
            f"last_save_in_hf, or remove this",
        )


def _intention(checkpoint: CheckpointConfig) -> Iterator[Broken]:
    """Hold the mode, and what is to be loaded, together."""
    mode, excluded = checkpoint.mode, checkpoint.exclude_from_loading
    elsewhere, model_only = checkpoint.initial_load_path, checkpoint.initial_load_model_only
    ties = ("checkpoint.mode", "checkpoint.initial_load_path", "checkpoint.initial_load_model_only")
    if mode == "finetune" and elsewhere is None:
        yield Broken(ties[:2], "needs initial_load_path, whose weights it starts from")
    elif mode == "finetune" and not model_only:
        yield Broken(
            ties,
            "takes the weights alone, but initial_load_model_only is false; remove that, or write "
            'mode = "continue" to take the optimizer and the data position too',
        )
    elif mode == "continue" and elsewhere is not None and model_only:
        yield Broken(
            ties,
            "takes optimizer and data position too, but initial_load_model_only is true; set it "
            'false, or write mode = "finetune" for the weights alone',
        )
    weights_alone = elsewhere is not None and model_only
    keys = ("checkpoint.exclude_from_loading", *ties)
    if excluded and mode == "recover" and not weights_alone:
        yield Broken(
            keys,
            'leaves something out, but mode = "recover" loads everything; write mode = "continue", '
            'or mode = "finetune" with an initial_load_path',
        )
    elif "model" in excluded and weights_alone:
        yield Broken(
            keys, 'leaves nothing to load with "model" in it; remove it, or initial_load_path'
        )


def _debug(config: Config) -> Iterator[Broken]:
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        yield Broken(
            ("debug.deterministic_warn_only", "debug.deterministic"),
            "needs debug.deterministic = true; there is nothing to warn of without",
        )
