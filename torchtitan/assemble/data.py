"""What a rank reads: the samples of the training, and this rank's share of each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.errors import DataError, Violation
from torchtitan.base.log import amount
from torchtitan.base.own import is_import_path
from torchtitan.checkpoint.state import Progress
from torchtitan.data.dataset import build_dataset
from torchtitan.data.files import Once, alone
from torchtitan.data.gaps import Gaps
from torchtitan.data.loader import Loader, Numbered
from torchtitan.data.own import build_own
from torchtitan.data.sample_log import SampleLog
from torchtitan.data.settings import SUPERVISED, TrainingConfig
from torchtitan.data.split import Side
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from torchtitan.job import Config
from torchtitan.mesh.alike import check_data_alike
from torchtitan.mesh.dims import Mesh
from torchtitan.own import own_sections
from torchtitan.parallel.layout import Layout


def build_samples(
    source: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    seed: int,
    split: float | None,
    held_out: bool = False,
    of_validation: Collection[str] = ("split",),
    sections: Mapping[str, object],
    once: Once = alone,
) -> Numbered:
    """Build the samples that `source` describes, tokenised first where that is not done yet.

    `split`: the fraction of documents that `held_out` selects. Without one `held_out` selects, of
    generated data, the part that is never trained on. `of_validation`: the settings that come from
    [validation], for errors; the others come from [training]. `sections`: of the user's own.
    `once`: what looks for files.
    """
    side = None if split is None else Side(split, held_out=held_out)
    held_out = held_out and side is None
    build: Callable[..., Numbered] = build_dataset
    if source.dataset in SUPERVISED:
        # here: a run on text does not load Jinja
        from torchtitan.sft.finetune import build_examples

        build = partial(build_examples, tokenizer_path=tokenizer_path)
    try:
        if is_import_path(source.dataset):
            return build_own(
                source, tokenizer=tokenizer, seed=seed, held_out=held_out, sections=sections
            )
        return build(
            source, tokenizer=tokenizer, seed=seed, held_out=held_out, side=side, once=once
        )
    except DataError as error:
        section = "validation" if error.key in of_validation else "training"
        raise error.within(section) from error


def build_loader(
    config: Config, *, layout: Layout, mesh: Mesh, progress: Progress, once: Once
) -> Loader:
    """Build this rank's share of the data, tokenised first where that is not done yet.

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
        split=config.validation.split,
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
    return Loader(
        dataset,
        local_batch_size=training.local_batch_size,
        accumulation=layout.accumulation,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dims.dp,
        settings=training.dataloader,
        gaps=Gaps(training.skip_samples),
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
