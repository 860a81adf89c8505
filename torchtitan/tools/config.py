"""Check a job and print its resolved settings.

    torchtitan config JOB [--world_size N] [--section.key VALUE ...]

The check needs no process group and no GPU, so a job can be checked on a laptop. Rules of the
settings are checked first, without torch, then rules of the model's sizes and of the number of
ranks. A rule of the job's machines, such as whether their GPUs support float8, gives a warning.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from math import gcd, lcm
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.base.errors import ConfigError
from torchtitan.config.settings import literal, to_toml
from torchtitan.job import Config, load_job
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.settings import ModelConfig
from torchtitan.tools.verbs import Parser, at_least, report_errors

if TYPE_CHECKING:
    from torchtitan.parallel.layout import Layout

logger = logging.getLogger(__name__)
HELP = (
    "torchtitan config [--world_size N] [--section.key VALUE ...] checks a job and "
    "prints it; --world_size is its number of ranks (default: the fewest that the degrees "
    "allow).\n\n"
)


@report_errors
def main(argv: Sequence[str]) -> int:
    """Print the job as TOML and return 0, or print one line per mistake and return 2."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world_size", type=at_least(1))
    if {"-h", "--help"} & {*argv}:
        sys.stdout.write(HELP)
    options, words = parser.parse_known_args(argv)
    job = load_job(words)
    with job.wording():
        config, layout = check_job(job.config, world_size=options.world_size)
    sys.stdout.write(f"{to_toml(config)}\n{describe_sizes(config.model, layout)}\n")
    return 0


def describe_sizes(model: ModelConfig, layout: Layout) -> str:
    """Return comments with all sizes of the model, set or from its flavor."""
    architecture = layout.architecture
    sizes = {k: literal(v) for k, v in architecture.given(of_family=False).items()}
    if (scaling := architecture.rope_scaling) is not None:
        sizes["rope_scaling"] = scaling.type
    first = f"{model.name} {model.flavor}: {layout.counts.num_parameters:,} parameters"
    return "\n".join(f"# {line}" for line in [first, *(f"{k} = {v}" for k, v in sizes.items())])


def check_job(config: Config, *, world_size: int | None) -> tuple[Config, Layout]:
    """Check what the trainer checks at its start, except files and devices.

    `world_size` None: the fewest ranks that the degrees allow; every other possible number passes
    the same checks.

    Returns:
        The settings with the resolved model, and the layout.

    Raises UserError that lists all conflicting settings, or the tokenizer is damaged.
    """
    # not at the top: mistakes in the settings are reported before torch is imported
    from torchtitan.base.device import device_type
    from torchtitan.data.tokenizer import BUILT_IN, build_tokenizer, check_vocabulary
    from torchtitan.layout import find_layout
    from torchtitan.parallel.layout import check_device
    from torchtitan.resume_rules import resolve_model

    config = resolve_model(config)
    layout = find_layout(config, world_size=world_size or fewest_ranks(config.parallelism))
    path = config.model.tokenizer_path
    # other files may exist only on the machines of the run
    if path == "byte" or BUILT_IN.get(path, Path(path).expanduser()).exists():
        tokenizer = build_tokenizer(path)
        check_vocabulary(tokenizer, model_vocab_size=layout.architecture.vocab_size)
    try:
        check_device(config.compile, float8=layout.float8, device_type=device_type())
    except ConfigError as error:
        for mistake in error.mistakes:
            logger.warning("The job cannot start on this machine: %s", mistake)
    return config, layout


def fewest_ranks(settings: ParallelismConfig) -> int:
    """Return the smallest number of ranks that the degrees allow. It divides all possible ones."""
    cp, dp_shard = settings.context_parallel_degree, settings.data_parallel_shard_degree
    if dp_shard == -1:
        asked = settings.fsdp_reshard_after_forward
        # groups of this size gather weights, so it divides the number of ranks that share them
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
