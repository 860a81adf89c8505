"""Check a job and print it resolved: `python -m torchtitan config --job.config_file F`.

It builds no process group and needs no GPU, so a job can be checked on the laptop where it is
written. What the settings alone can tell comes first, and needs no torch; then what the model's
sizes and the number of ranks can: `--world_size N`, else the fewest ranks that the degrees allow.
What only the machines of the job can tell, as whether their GPUs have float8, is no mistake here
but a remark. This file alone of its folder stands above `build.py`: it is a command.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from math import gcd, lcm
from pathlib import Path

from torchtitan.base.errors import ConfigError, Mistakes, UserError
from torchtitan.config.sources import to_toml
from torchtitan.job import Config, load_job
from torchtitan.mesh.settings import ParallelismConfig

logger = logging.getLogger(__name__)
HELP = (
    "python -m torchtitan config [--world_size N] [--section.key VALUE ...] checks a job and "
    "prints it; --world_size is the number of ranks it is for.\n\n"
)


def main(argv: Sequence[str]) -> int:
    """Print the job as TOML and return 0, or one line for each mistake and return 2."""
    words, given = _split(argv)
    if {"-h", "--help"} & {*words}:
        sys.stdout.write(HELP)
    try:
        mistakes = Mistakes()
        world_size = mistakes.of(lambda: _read_world_size(given))
        job = mistakes.of(lambda: load_job(words))
        mistakes.report()
        assert job is not None
        with job.wording():
            config = check_job(job.config, world_size=world_size)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(to_toml(config))
    return 0


def check_job(config: Config, *, world_size: int | None) -> Config:
    """Check what the start of a job would, but for files and devices; log what is worth a remark.

    Returns the settings with the model that they mean.

    `world_size`: None stands for the fewest ranks that the degrees allow. What holds for these
    holds for every number of ranks with which the job would start.

    Raises:
        UserError: Says all that does not fit together, or that a tokenizer is damaged.
    """
    # here: mistakes in the settings alone are told without the seconds that torch takes
    from torchtitan.base.device import device_type
    from torchtitan.checkpoint.partial import warn_of_unmatched
    from torchtitan.data.tokenizer import check_vocabulary, find_tokenizer
    from torchtitan.finetune.lora import warn_of_random_base
    from torchtitan.hf.model import warn_beyond_positions
    from torchtitan.hf.names import CONFIG
    from torchtitan.layout import find_layout
    from torchtitan.models.positions import warn_beyond_rope
    from torchtitan.parallel.layout import check_device
    from torchtitan.resume_rules import resolve_model

    config = resolve_model(config)
    layout = find_layout(config, world_size=world_size or fewest_ranks(config.parallelism))
    tokenizer = find_tokenizer(config.model.tokenizer_path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model_vocab_size=layout.architecture.vocab_size)
    checkpoint, scaling = config.checkpoint, layout.architecture.rope_scaling
    if scaling is not None:
        warn_beyond_rope(scaling, lengths=config.sequence_lengths)
    folder = Path(checkpoint.initial_load_path or "")
    if checkpoint.initial_load_in_hf and (folder / CONFIG).is_file():
        warn_beyond_positions(folder, scaling=scaling, lengths=config.sequence_lengths)
    if checkpoint.exclude_from_loading:
        model = layout.spec.build_meta(layout.architecture)
        if layout.adapt is not None:
            layout.adapt(model)
        warn_of_unmatched(checkpoint.exclude_from_loading, model=model)
    if checkpoint.initial_load_path is None:
        warn_of_random_base(config.lora)
    try:
        check_device(config.compile, float8=layout.float8, device_type=device_type())
    except ConfigError as error:
        for mistake in error.mistakes:
            logger.warning("On this machine the job would not start: %s", mistake)
    return config


def fewest_ranks(settings: ParallelismConfig) -> int:
    """Return the smallest number of ranks that the degrees allow. Others are multiples of it."""
    cp, dp_shard = settings.context_parallel_degree, settings.data_parallel_shard_degree
    if dp_shard == -1:
        asked = settings.fsdp_reshard_after_forward
        # groups of this many ranks gather weights, so it divides the ranks that share them
        together = int(asked) if asked.isdecimal() and int(asked) else 1
        dp_shard = together // gcd(together, cp)
        inner = cp * settings.tensor_parallel_degree
        ep = settings.expert_parallel_degree
        dp_shard = lcm(dp_shard, ep // gcd(ep, inner))
    return (
        settings.pipeline_parallel_degree
        * settings.data_parallel_replicate_degree
        * dp_shard
        * cp
        * settings.tensor_parallel_degree
    )


def _split(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Take the one option out that is no setting."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world_size", nargs="?", const="")
    found, words = parser.parse_known_args(list(argv))
    return words, found.world_size


def _read_world_size(given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and 0 < len(given.lstrip("0")) < 10):
        raise ConfigError(
            f"command line: --world_size must be the number of ranks, 1 or more, got "
            f"'{given[:60]}'; "
            "leave it out to check for the fewest that the degrees allow"
        )
    return int(given)
