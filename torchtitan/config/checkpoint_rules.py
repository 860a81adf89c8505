"""Rules of what is saved, and of what a run starts from."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.checkpoint.settings import WEIGHT_FILES, CheckpointConfig
from torchtitan.config.broken import Broken, leads_outside
from torchtitan.job import Config


def checkpoint_rules(config: Config) -> Iterator[Broken]:
    """Check where checkpoints go, what is loaded, and what is exported."""
    checkpoint = config.checkpoint
    if leads_outside(checkpoint.folder):
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
    if not checkpoint.enable:
        yield from _without_checkpoints(checkpoint)
    if checkpoint.save_before_seconds is not None and not checkpoint.enable:
        yield Broken(
            ("checkpoint.save_before_seconds", "checkpoint.enable"),
            "needs checkpoint.enable = true; there is nothing to save to without",
        )
    if checkpoint.enable:
        yield from _intention(checkpoint)
    yield from _hugging_face(checkpoint)
    path = checkpoint.initial_load_path
    if checkpoint.enable and path is not None and path.endswith(WEIGHT_FILES):
        if checkpoint.initial_load_in_hf:
            yield Broken(
                ("checkpoint.initial_load_in_hf", "checkpoint.initial_load_path"),
                f'is for a folder, got the file "{path}", whose names tell what it is; remove this',
            )
        if not checkpoint.initial_load_model_only:
            yield Broken(
                ("checkpoint.initial_load_model_only", "checkpoint.initial_load_path"),
                f'asks for all of a run, and "{path}" is a file of weights alone; remove this',
            )


def _without_checkpoints(checkpoint: CheckpointConfig) -> Iterator[Broken]:
    """Refuse what chooses the weights to start from; tell of the rest, which has no effect."""
    chooses_weights = {
        "load_step": checkpoint.load_step > -1,
        "mode": checkpoint.mode != "recover",
        "initial_load_path": checkpoint.initial_load_path is not None,
        "grow_vocab": checkpoint.grow_vocab,
    }
    shapes = {
        "initial_load_in_hf": checkpoint.initial_load_in_hf,
        "initial_load_rope": checkpoint.initial_load_rope != "auto",
        "exclude_from_loading": bool(checkpoint.exclude_from_loading),
        "last_save_in_hf": checkpoint.last_save_in_hf,
    }
    for key, is_given in (chooses_weights | shapes).items():
        if is_given:
            yield Broken(
                (f"checkpoint.{key}", "checkpoint.enable"),
                f"{'has no effect: it ' if key in shapes else ''}needs checkpoint.enable = true",
                is_notice=key in shapes,
            )


def _hugging_face(checkpoint: CheckpointConfig) -> Iterator[Broken]:
    """Hold together what is read from Hugging Face, and what is written for it."""
    reads, ties = "checkpoint.initial_load_in_hf", "checkpoint.initial_load_path"
    if checkpoint.enable and checkpoint.initial_load_in_hf:
        if checkpoint.initial_load_path is None:
            yield Broken(
                (reads, ties),
                "needs initial_load_path, the folder to read (torchtitan 0.2 took hf_assets_path)",
            )
        elif not checkpoint.initial_load_model_only:
            yield Broken(
                (reads, ties, "checkpoint.initial_load_model_only"),
                "finds weights alone there, but initial_load_model_only is false; remove that",
            )
    rope, path = "checkpoint.initial_load_rope", checkpoint.initial_load_path
    if checkpoint.enable and checkpoint.initial_load_rope != "auto":
        if path is None:
            yield Broken((rope, ties), "needs initial_load_path, whose rows it tells the order of")
        elif checkpoint.initial_load_in_hf:
            yield Broken(
                (rope, reads),
                "is for weights by this library's names; the order of a folder of Hugging Face is "
                "known; remove this",
            )
    exports = checkpoint.enable and checkpoint.last_save_model_only
    if checkpoint.export_dtype != "float32" and not checkpoint.last_save_in_hf:
        yield Broken(
            ("checkpoint.export_dtype", "checkpoint.last_save_in_hf"),
            f"{'' if exports else 'has no effect: it '}is the type of what last_save_in_hf writes, "
            f'which is off, got "{checkpoint.export_dtype}"; the other checkpoints keep '
            f"training.dtype; set last_save_in_hf, or remove this",
            is_notice=not exports,
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
    if checkpoint.grow_vocab and not weights_alone:
        yield Broken(
            ("checkpoint.grow_vocab", *ties[1:]),
            "adds rows to the weights of an initial_load_path, taken alone: the optimizer's state "
            "has none for them; name one, with initial_load_model_only, or remove this",
        )
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
