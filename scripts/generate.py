"""Continue a text with a trained model, on one device.

    python scripts/generate.py --checkpoint outputs --prompt "def main(" --temperature 0.8

The checkpoint is a run's folder or its checkpoint folder (the newest step is taken), or one step's
folder. A step knows the settings it was saved under, so it can be copied anywhere by itself; a
tokenizer that is a file must still lie where model.tokenizer_path says. An empty prompt begins a
new document.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.assemble import CONFIG_FILE, find_model
from torchtitan.base.device import local_device
from torchtitan.base.errors import CheckpointError, UserError
from torchtitan.checkpoint import storage
from torchtitan.config.load import load_config
from torchtitan.config.schema import ModelConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from torchtitan.models.decoder import Decoder
from torchtitan.models.generate import generate


def main(argv: Sequence[str]) -> int:
    """Write the prompt and its continuation; 2 with one message for what the user can mend."""
    args = _parser().parse_args(argv)
    try:
        model, tokenizer = load(find_step(args.checkpoint))
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
    return parser


def find_step(path: Path) -> Path:
    """Return the folder of the step that `path` means.

    Raises:
        CheckpointError: There is no whole checkpoint.
    """
    if (path / storage.MANIFEST).is_file():
        return path
    folder = path
    if (path / CONFIG_FILE).is_file():
        config = load_config(["--job.config_file", str(path / CONFIG_FILE)])
        folder = path / config.checkpoint.folder
    steps = storage.find_steps(folder)
    if not steps:
        raise CheckpointError(
            f"--checkpoint must be a run's folder, its checkpoint folder or a step-N folder with a "
            f"whole checkpoint, got {path}; train with --checkpoint.enable to make one"
        )
    return folder / f"step-{steps[-1]}"


def load(step: Path) -> tuple[Decoder, Tokenizer]:
    """Build the model that a checkpoint holds, with its weights, and its tokenizer.

    Raises:
        UserError: The checkpoint is damaged, or its tokenizer is not there.
    """
    settings, dtype = read_settings(step)
    spec, architecture = find_model(settings.name, flavor=settings.flavor)
    tokenizer = build_tokenizer(settings.tokenizer_path)
    check_vocabulary(tokenizer, model_vocab_size=architecture.vocab_size)
    with torch.device("meta"):
        model = spec.build(architecture).to(dtype)
    assert isinstance(model, Decoder)
    model.to_empty(device=local_device(0))
    with warnings.catch_warnings():
        # one process is what is meant here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        storage.read_tensors(step, "model", into=model.state_dict(), group=None)
    return model, tokenizer


def read_settings(step: Path) -> tuple[ModelConfig, torch.dtype]:
    """Return what a checkpoint's manifest says of its model, and the type of its weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG_FILE
        path.write_text(storage.read_manifest(step)["config"], encoding="utf-8")
        config = load_config(["--job.config_file", str(path)])
    return config.model, getattr(torch, config.training.dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
