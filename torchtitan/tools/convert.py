"""Convert weights between this library's checkpoints and folders of Hugging Face.

    python -m torchtitan convert to-hf outputs model --dtype bfloat16
    python -m torchtitan convert from-hf model weights

`to-hf` reads a run's folder or its checkpoint folder (the newest step is taken), or one step's
folder. It is what checkpoint.last_save_in_hf does at the end of a run, and reads one tensor at a
time; to a URL it uploads a folder that it makes on this disk first. `from-hf` writes a torch DCP
folder of the weights alone, which checkpoint.initial_load_path takes, and holds the whole model in
memory meanwhile; a run reads such a folder of Hugging Face without it, by
checkpoint.initial_load_in_hf. What is there already is never written over.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import CheckpointError, ConfigError, DataError, UserError
from torchtitan.base.urls import is_plain_url, is_url, local_path
from torchtitan.build import describe_export
from torchtitan.checkpoint.objects import ObjectStore
from torchtitan.checkpoint.remote import WHOLE_EXPORT
from torchtitan.config.schema import literal, values_of
from torchtitan.generate.generator import DTYPES
from torchtitan.hf.export import export
from torchtitan.hf.folder import to_dcp
from torchtitan.models.families import MODELS, to_settings
from torchtitan.models.settings import ModelSection
from torchtitan.resume_rules import find_run_step, read_settings
from torchtitan.tools.verbs import build_parser

SECONDS_OF_PATIENCE = 600


def to_hf(
    checkpoint: Path,
    out: Path | str,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    lora: Literal["merged", "adapter"] | None = None,
    verify: bool = True,
) -> str:
    """Write a step's weights as a folder of Hugging Face; return a line about it."""
    if is_url(str(out)):
        return _to_url(
            checkpoint, str(out), dtype=dtype, tokenizer=tokenizer, lora=lora, verify=verify
        )
    out = Path(out)
    _check_absent(out)
    step = find_run_step(checkpoint, verify=verify)
    config = read_settings(step)
    if tokenizer is not None:
        config = replace(config, model=replace(config.model, tokenizer_path=tokenizer))
    if lora is not None:
        if not config.lora.rank:
            raise CheckpointError(f"{step} holds no LoRA adapter: remove --lora")
        config = replace(config, lora=replace(config.lora, export_format=lora))
    stored_as = None if dtype is None else getattr(torch, dtype)
    try:
        settings = describe_export(config, dtype=stored_as)
    except DataError as error:
        if error.key != "model.tokenizer_path":
            raise
        raise DataError(f"{error}; name the tokenizer of these weights by --tokenizer") from error
    export(step, out, settings=settings, group=None)
    if not config.lora.rank:
        return f"{out}: the weights of {step}"
    if config.lora.export_format == "adapter":
        return f"{out}: the LoRA adapter of {step}, without the weights of its base"
    return f"{out}: the weights of {step}, merged with its LoRA adapter"


def _to_url(checkpoint: Path, url: str, **how: Any) -> str:
    """Write the folder to this disk, and upload it; `how`: as for `to_hf`."""
    if not is_plain_url(url):
        raise ConfigError(
            "OUT must be a URL of a folder without credentials or options; give these to the "
            "store's client, by its environment variables or its own files"
        )
    store = ObjectStore(url, key="OUT", patience_seconds=SECONDS_OF_PATIENCE, check="checksum")
    if any(store.size(name) is not None for name in WHOLE_EXPORT):
        raise CheckpointError(f"{url} is there already; name a folder that is not")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "folder"
        said = to_hf(checkpoint, folder, **how)
        store.put_folder(folder, "", last=WHOLE_EXPORT)
        return said.replace(str(folder), url)


def from_hf(folder: Path, out: Path, *, dtype: str) -> str:
    """Write the weights of a folder of Hugging Face as a DCP folder; return a line about it."""
    _check_absent(out)
    with warnings.catch_warnings():
        # one process is what is meant here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        spec, architecture = to_dcp(folder, out, dtype=getattr(torch, dtype), models=MODELS)
    default, model = values_of(ModelSection()), values_of(to_settings(spec, architecture))
    settings = {".".join(path): value for path, value in model.items() if value != default[path]}
    lines = [f"model.{key} = {literal(value)}" for key, value in settings.items()]
    return f"{out}: {dtype} weights; a job of them sets\n" + "\n".join(lines)


def _check_absent(out: Path) -> None:
    if out.exists():
        raise CheckpointError(f"{out} is there already; name a folder that is not")


def main(argv: Sequence[str]) -> int:
    """Read the command line and convert; 2 with one message for what the user can mend."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        if args.direction == "to-hf":
            with trusting_stored(args.trust_code):
                line = to_hf(
                    args.checkpoint,
                    args.out,
                    dtype=args.dtype,
                    tokenizer=args.tokenizer,
                    lora=args.lora,
                    verify=not args.skip_verify,
                )
        else:
            line = from_hf(args.folder, args.out, dtype=args.dtype)
    except (UserError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return UserError.exit_code
    sys.stdout.write(f"{line}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("convert", __doc__)
    ways = parser.add_subparsers(dest="direction", required=True)
    to = ways.add_parser("to-hf", help="from a checkpoint to a folder of Hugging Face")
    to.add_argument("checkpoint", type=Path, help="folder of a run or a step")
    to.add_argument("out", help="folder to make, or a URL, as s3://bucket/model")
    to.add_argument("--dtype", choices=DTYPES, help="type of the weights; as stored if not given")
    to.add_argument("--tokenizer", metavar="PATH", help="in place of model.tokenizer_path")
    to.add_argument(
        "--lora",
        choices=("merged", "adapter"),
        help="add the LoRA adapter to the weights, or write it alone (default: lora.export_format)",
    )
    to.add_argument("--skip_verify", action="store_true", help="do not verify checksums")
    add_trust_code(to)
    back = ways.add_parser("from-hf", help="from a folder of Hugging Face to a DCP folder")
    back.add_argument("folder", type=Path, help="with config.json and safetensors files")
    back.add_argument("out", type=local_path, help="folder to make")
    back.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="the training.dtype of the job to come",
    )
    return parser
