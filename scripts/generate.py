"""Continue a text with a trained model, on one device.

    python scripts/generate.py --checkpoint outputs --prompt "def main(" --temperature 0.8

The checkpoint is a run's folder or its checkpoint folder (the newest step is taken), or one step's
folder. Its checksums are verified first: a damaged step that you named is an error, else the newest
whole one is taken. A step knows the settings it was saved under, so it can be copied anywhere by
itself; a tokenizer that is a file must still lie where model.tokenizer_path says. An empty prompt
begins a new document.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.assemble import CONFIG_FILE, find_model
from torchtitan.base.device import local_device
from torchtitan.base.errors import CheckpointError, ConfigError, UserError
from torchtitan.checkpoint import storage
from torchtitan.config.load import load_config
from torchtitan.config.schema import LoRAConfig, ModelConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from torchtitan.models.decoder import Decoder
from torchtitan.models.generate import generate
from torchtitan.models.lora import apply_lora


def main(argv: Sequence[str]) -> int:
    """Write the prompt and its continuation; 2 with one message for what the user can mend."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # names the damaged steps
    try:
        _check_seed(args.seed)
        model, tokenizer = load(find_step(args.checkpoint, verify=not args.skip_verify))
        prompt_ids = tokenizer.encode(args.prompt) or [tokenizer.eos_id]
        new_ids = generate(
            model,
            prompt_ids,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
            eos_id=tokenizer.eos_id,
        )
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    # decoded together: a character may have begun in the prompt's last token
    print(tokenizer.decode([i for i in prompt_ids + new_ids if i != tokenizer.eos_id]))
    return 0


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="folder of a run or a step"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to go on from")
    parser.add_argument("--max_new_tokens", type=int, default=200, metavar="N", help="at most")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token"
    )
    parser.add_argument("--top_k", type=int, metavar="K", help="draw from the K likeliest alone")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws")
    parser.add_argument("--skip_verify", action="store_true", help="do not verify checksums")
    return parser


def _check_seed(seed: int) -> None:
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(
            f"--seed must fit into 64 bits, -2**63 to 2**64 - 1, got {seed}; take a smaller number"
        )


def find_step(path: Path, *, verify: bool) -> Path:
    """Return the folder of the step that `path` means.

    Raises:
        CheckpointError: There is no whole checkpoint, or the step that was named is damaged.
    """
    if (path / storage.MANIFEST).is_file():
        mistakes = storage.verify(path, group=None) if verify else []
        if mistakes:
            raise CheckpointError(
                f"{path} is damaged: {storage.summary(mistakes)}; name another step, or read it as "
                f"it is with --skip_verify"
            )
        return path
    folders = [path]
    if (path / CONFIG_FILE).is_file():
        config = load_config(["--job.config_file", str(path / CONFIG_FILE)])
        folders.append(path / config.checkpoint.folder)
    for folder in folders:
        step = storage.newest_whole(folder, group=None, verify=verify)
        if step is not None:
            return folder / f"step-{step}"
    raise CheckpointError(
        f"a checkpoint must be a run's folder, its checkpoint folder or a step-N folder, got "
        f"{path}, which {_found_instead(path)}"
    )


def _found_instead(path: Path) -> str:
    if not path.is_dir():
        return "does not exist" if not path.exists() else "is a file"
    runs = sorted(str(config.parent) for config in path.glob(f"*/{CONFIG_FILE}"))
    if runs and not (path / CONFIG_FILE).is_file():
        return f"holds runs; name one of them: {', '.join(runs[:8])}"
    return "holds no whole checkpoint; train with --checkpoint.enable to make one"


def load(step: Path) -> tuple[Decoder, Tokenizer]:
    """Build the model that a checkpoint holds, with its weights, and its tokenizer.

    Raises:
        UserError: The checkpoint is damaged, or its tokenizer is not there.
    """
    settings, lora, dtype = read_settings(step)
    spec, architecture = find_model(settings)
    tokenizer = build_tokenizer(settings.tokenizer_path)
    check_vocabulary(tokenizer, model_vocab_size=architecture.vocab_size)
    with torch.device("meta"):
        model = spec.build(architecture).to(dtype)
    assert isinstance(model, Decoder)
    if lora.rank:
        apply_lora(model, rank=lora.rank, alpha=lora.alpha, patterns=lora.modules)
    model.to_empty(device=local_device(0))
    with warnings.catch_warnings():
        # one process is what is meant here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        storage.read_tensors(step, "model", into=model.state_dict(), group=None)
    return model, tokenizer


def read_settings(step: Path) -> tuple[ModelConfig, LoRAConfig, torch.dtype]:
    """Return what a checkpoint's manifest says of its model, its low-rank factors, and the type of
    its weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG_FILE
        path.write_text(storage.read_manifest(step)["config"], encoding="utf-8")
        config = load_config(["--job.config_file", str(path)])
    return config.model, config.lora, getattr(torch, config.training.dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
