"""Convert weights between torchtitan's checkpoints and Hugging Face folders.

    torchtitan convert to-hf outputs model --dtype bfloat16
    torchtitan convert from-hf model weights
    torchtitan convert from-torch consolidated.00.pth weights
    torchtitan convert average outputs mean --steps 100,200,300

`to-hf` reads the newest step of a run, or one step, one tensor at a time. `from-hf` and
`from-torch` write a torch DCP folder of the weights, for checkpoint.initial_load_path, and hold the
full model in memory. `average` writes a checkpoint of weights. No file is overwritten.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import CheckpointError, ConfigError, DataError
from torchtitan.base.urls import local_path
from torchtitan.tools.verbs import DTYPES, at_least, build_parser, report_errors


@report_errors
def main(argv: Sequence[str]) -> int:
    """Convert and return 0; return 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("torchtitan").setLevel(logging.INFO)  # large models take minutes
    options = vars(args)
    module, name = options.pop("convert")
    if options["out"].exists():
        raise ConfigError(f"{options['out']} exists; name a new folder")
    convert = getattr(import_module(module), name)
    with warnings.catch_warnings(), trusting_stored(options.pop("trust_code", False)):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        sys.stdout.write(f"{convert(**options)}\n")
    return 0


def to_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    lora: Literal["merged", "adapter"] | None = None,
    add_tokens: int = 0,
    verify: bool = True,
) -> str:
    """Write a step's weights as a Hugging Face folder; return a line about it.

    `checkpoint` is the folder of a run or a step, `out` a folder to create. None: weights in
    their stored `dtype`, model.tokenizer_path, lora.export_format. `add_tokens` rows are appended
    to embedding and output head, near the mean row. Raises UserError if the step is
    damaged or has no Hugging Face form.
    """
    import torch

    from torchtitan.build import describe_export
    from torchtitan.hf.export import export
    from torchtitan.resume_rules import find_run_step, read_settings

    step = find_run_step(checkpoint, verify=verify)
    config = read_settings(step)
    if tokenizer is not None:
        config = replace(config, model=replace(config.model, tokenizer_path=tokenizer))
    if lora is not None:
        if not config.lora.rank:
            raise CheckpointError(f"{step} has no LoRA adapter: remove --lora")
        config = replace(config, lora=replace(config.lora, export_format=lora))
    try:
        settings = describe_export(config, dtype=None if dtype is None else getattr(torch, dtype))
    except DataError as error:
        if error.key != "model.tokenizer_path":
            raise
        raise DataError(f"{error}; name the tokenizer of these weights by --tokenizer") from error
    if add_tokens:
        architecture = settings.names.architecture
        architecture = replace(architecture, vocab_size=architecture.vocab_size + add_tokens)
        names = replace(settings.names, architecture=architecture)
        settings = replace(settings, names=names, add_tokens=add_tokens)
    if not (step / "train_state").is_dir():  # only weights: a card would have no figures
        settings = replace(settings, card=None)
    export(step, out, settings=settings, group=None)
    parts = "weights"
    if config.lora.rank:
        is_alone = config.lora.export_format == "adapter"
        parts = "LoRA adapter" if is_alone else "weights, merged with the LoRA adapter,"
    return f"{out}: the {parts} of {step}"


def numbers(text: str) -> list[int]:
    """Return the value of an option: integers with commas between them."""
    return [int(number) for number in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("convert", __doc__)
    directions = parser.add_subparsers(required=True)
    to = directions.add_parser("to-hf", help="from a checkpoint to a Hugging Face folder")
    to.add_argument("checkpoint", type=Path, help="folder of a run or a step")
    to.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as stored")
    to.add_argument("--tokenizer", metavar="PATH", help="instead of model.tokenizer_path")
    text = "merge the adapter into the weights, or write it by itself; as lora.export_format"
    to.add_argument("--lora", choices=("merged", "adapter"), help=text)
    back = directions.add_parser("from-hf", help="from a Hugging Face folder to a DCP folder")
    back.add_argument("folder", type=Path, help="with config.json and safetensors files")
    text = "the training.dtype of the job that reads it"
    back.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=text)
    torch_file = directions.add_parser("from-torch", help="from a .pt or .pth file to a DCP folder")
    torch_file.add_argument("file", type=Path, help="a state dict, by torch.save")
    mean = directions.add_parser("average", help="from a run's checkpoints to one of weights")
    mean.add_argument("checkpoint", type=local_path, help="folder of a run, or of checkpoints")
    for direction in (to, back, torch_file, mean):
        direction.add_argument("out", type=local_path, help="folder to create")
    mean.add_argument("--steps", type=numbers, help="such as 100,200,300; default: all")
    text = "of a moving average, per checkpoint: m_i = D m_(i-1) + (1 - D) w_i; default: the mean"
    mean.add_argument("--decay", type=float, metavar="D", help=text)
    text = "append N rows to embedding and output head, near the mean row"
    for direction in (to, back):
        direction.add_argument("--add_tokens", type=at_least(0), default=0, metavar="N", help=text)
    text = "do not verify checksums"
    for direction in (to, mean):
        direction.add_argument("--skip_verify", dest="verify", action="store_false", help=text)
        add_trust_code(direction)
    to.set_defaults(convert=(__name__, "to_hf"))
    back.set_defaults(convert=("torchtitan.tools.dcp_folder", "from_hf"))
    torch_file.set_defaults(convert=("torchtitan.tools.dcp_folder", "from_torch"))
    mean.set_defaults(convert=("torchtitan.tools.average", "average"))
    return parser
