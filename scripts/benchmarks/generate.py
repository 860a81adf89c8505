"""Greedy text of a Hugging Face folder beside transformers' `generate`.

Both continue the same prompts by --tokens tokens each, in one process, with stop tokens ignored and
keys and values cached. Prompts are random tokens, of lengths from --shortest to --longest; those of
transformers are padded on the left. The texts must be equal in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from scripts.benchmarks.pairs import CLOCKS, DisagreementError, Report, alternate, timed
from torchtitan.api import load_generator
from torchtitan.base.device import device_name, local_device
from torchtitan.generate.sampling import generate


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="of the model")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts")
    parser.add_argument("--shortest", type=int, default=16, metavar="N", help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=112, metavar="N", help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="new ones per prompt")


def measure(args: argparse.Namespace) -> Report:
    """Generate with both in turn.

    Raises:
        UserError: The folder holds no model, or the texts differ.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = local_device(0)
    model = load_generator(args.folder, device=device, dtype="float32").model
    theirs = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).to(device)
    theirs.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=args.tokens, eos_token_id=None, pad_token_id=0
    )
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.linspace(args.shortest, args.longest, args.batch).long().tolist()
    prompts = [
        torch.randint(model.config.vocab_size, (n,), generator=drawn).tolist() for n in lengths
    ]
    padded = [
        ([0] * (args.longest - n), prompt) for n, prompt in zip(lengths, prompts, strict=True)
    ]
    tokens = torch.tensor([zeros + prompt for zeros, prompt in padded], device=device)
    mask = torch.tensor([zeros + [1] * len(prompt) for zeros, prompt in padded], device=device)
    texts: dict[str, list[list[int]]] = {}

    def run_ours() -> None:
        texts["ours"] = generate(model, prompts, max_new_tokens=args.tokens, temperature=0)

    def run_theirs() -> None:
        with torch.no_grad():
            found = theirs.generate(tokens, attention_mask=mask)
        texts["theirs"] = found[:, args.longest :].tolist()

    comparisons = alternate(
        "generate / transformers",
        "at most 1.00",
        lambda: timed(run_ours),
        lambda: timed(run_theirs),
        num_pairs=args.pairs,
        clocks=CLOCKS if device.type == "cpu" else CLOCKS[:1],
        amount=args.batch * args.tokens,
        unit="tokens",
    )
    if texts["ours"] != texts["theirs"]:
        raise DisagreementError("texts must be equal, got others; no ratio is printed")
    about = {name: getattr(args, name) for name in ("batch", "shortest", "longest", "tokens")}
    about |= {"device": device_name(device), "torch": torch.__version__}
    return Report(about=about, comparisons=comparisons, notes=["all texts are equal"])
