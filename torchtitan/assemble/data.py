"""What a rank reads: the samples of the training, and this rank's share of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.errors import ConfigError, DataError, Violation
from torchtitan.base.log import amount
from torchtitan.base.own import is_import_path
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.state import Progress
from torchtitan.data.dataset import build_dataset
from torchtitan.data.files import Once, alone
from torchtitan.data.loader import Loader, MapSamples, num_steps
from torchtitan.data.sample_log import SampleLog
from torchtitan.data.sampler import SkippedSamples
from torchtitan.data.settings import SUPERVISED, TrainingConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from torchtitan.job import Config, own_sections
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.ranks import check_data_alike
from torchtitan.parallel.layout import Layout
from torchtitan.resume_rules import Job

logger = logging.getLogger(__name__)


def build_samples(
    source: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    seed: int,
    split: float | None,
    held_out: bool = False,
    of_validation: Collection[str] = ("holdout_fraction",),
    sections: Mapping[str, object],
    once: Once = alone,
) -> MapSamples:
    """Build the samples that `source` describes, tokenised first where that is not done yet.

    `split`: the fraction of documents that `held_out` selects. Without one `held_out` selects, of
    generated data, the part that is never trained on. `of_validation`: the settings that come from
    [validation], for errors; the others come from [training]. `sections`: of the user's own.
    `once`: what looks for files.
    """
    holdout = None
    if split is not None:
        from torchtitan.data.holdout import Holdout

        holdout, held_out = Holdout(split, held_out=held_out), False
    build: Callable[..., MapSamples] = build_dataset
    if source.dataset in SUPERVISED:
        # here: a run on text does not load Jinja
        from torchtitan.finetune.data import build_examples

        build = partial(build_examples, tokenizer_path=tokenizer_path)
    try:
        if is_import_path(source.dataset):
            from torchtitan.data.custom import build_custom

            return build_custom(
                source, tokenizer=tokenizer, seed=seed, held_out=held_out, sections=sections
            )
        return build(
            source, tokenizer=tokenizer, seed=seed, held_out=held_out, holdout=holdout, once=once
        )
    except DataError as error:
        section = "validation" if error.key in of_validation else "training"
        raise error.within(section) from error


def build_training_samples(config: Config, *, layout: Layout, once: Once) -> MapSamples:
    """Build the samples that the run trains on, tokenised first where that is not done yet. All
    ranks call it together.

    Raises:
        DataError: Data or tokenizer are missing or damaged, or not the same on all ranks.
    """
    training = config.training
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    check_vocabulary(tokenizer, model_vocab_size=layout.architecture.vocab_size)
    dataset = build_samples(
        training,
        tokenizer=tokenizer,
        tokenizer_path=config.model.tokenizer_path,
        seed=config.debug.seed,
        split=config.validation.holdout_fraction,
        sections=own_sections(config),
        once=once,
    )
    global_batch_size = layout.samples_per_step(training)
    if dataset.num_samples is not None and dataset.num_samples < global_batch_size:
        assert training.num_epochs is not None, "without it the data never end"
        # without accumulation the global batch is what the ranks read at once
        to_lower = ["local_batch_size"] if layout.accumulation == 1 else []
        if training.global_batch_size != -1:
            to_lower.append("global_batch_size")
        rule = (
            f"the data must fill a global batch of {global_batch_size} samples of "
            f"{training.seq_len} tokens, got {amount(dataset.num_samples, 'sample')} in "
            f"{amount(training.num_epochs, 'epoch')}; add data, or lower "
            f"{' and '.join(to_lower)}, or seq_len"
        )
        raise DataError(Violation((*to_lower, "seq_len"), rule).within("training"))
    check_data_alike(dataset.fingerprint)
    return dataset


def plan_steps(
    config: Config, *, dataset: MapSamples, layout: Layout, step: int, position: int
) -> Config:
    """Return the settings with training.steps as the step that the run ends with if it goes on from
    `step` and `position` in the data: of training.steps and the end of the data what comes first.
    """
    training = config.training
    if dataset.num_samples is None:
        return config
    last_step = step + num_steps(
        dataset.num_samples,
        position=position,
        skipped=SkippedSamples(training.skip_samples),
        global_batch=layout.samples_per_step(training),
    )
    if training.steps != -1:
        last_step = min(last_step, training.steps)
    return replace(config, training=replace(training, steps=last_step))


def plan_job(
    config: Config,
    at: Checkpoint | None,
    *,
    then: Job,
    layout: Layout,
    samples: Callable[[], MapSamples],
) -> Job:
    """Return this job with the number of steps that it takes if it goes on from a step of the job
    `then`, or from nothing. In other data, which are refused elsewhere, that is the stored one."""
    dp = layout.dims.dp
    if config.training.num_epochs is None:
        return Job(config=config, dp=dp)
    dataset, step, position = samples(), 0, 0
    if at is not None and "dataloader" in at.manifest["components"]:
        state = at.state("dataloader", types={"position": int, "fingerprint": dict})
        step, position = at.manifest["step"], state["position"]
        if state["fingerprint"] != dataset.fingerprint:
            training = replace(config.training, steps=then.config.training.steps)
            return Job(config=replace(config, training=training), dp=dp)
    planned = plan_steps(config, dataset=dataset, layout=layout, step=step, position=position)
    return Job(config=planned, dp=dp)


def check_plan(planned: Config, *, dataset: MapSamples, layout: Layout) -> None:
    """Log the steps of a run that ends with its data, and check its schedule over them.

    Raises:
        ConfigError: The schedule ends before the run.
    """
    training = planned.training
    if training.num_epochs is None:
        return
    assert dataset.num_samples is not None, "the data end with their epochs"
    logger.info(
        "%s, %d samples in all, %d per step: the run ends with step %d",
        amount(training.num_epochs, "epoch"),
        SkippedSamples(training.skip_samples).place(dataset.num_samples),
        layout.samples_per_step(training),
        training.steps,
    )
    for wrong in planned.schedule_violations():
        if not wrong.is_notice:
            raise ConfigError(wrong)
        logger.warning("%s", wrong)


def build_loader(
    config: Config, *, dataset: MapSamples, layout: Layout, mesh: Mesh, progress: Progress
) -> Loader:
    """Build this rank's share of the samples."""
    training = config.training
    return Loader(
        dataset,
        local_batch_size=training.local_batch_size,
        accumulation=layout.accumulation,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dims.dp,
        settings=training.dataloader,
        skipped=SkippedSamples(training.skip_samples),
        on_sample=build_sample_log(config, mesh, progress)
        if config.debug.log_sample_hashes
        else None,
    )


def build_sample_log(config: Config, mesh: Mesh, progress: Progress) -> SampleLog:
    """Build what writes down the samples that this rank draws."""
    return SampleLog(
        Path(config.job.dump_folder) / "samples",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        writes=mesh.is_first_of_dp_rank,
        # samples are drawn for the step after the last one that is done
        step=lambda: progress.step + 1,
    )
