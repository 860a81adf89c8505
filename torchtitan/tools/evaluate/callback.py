"""A callback that measures the perplexity of held-out domains at each validation.

    [[training.callbacks]]
    path = "torchtitan.tools.evaluate.callback:Perplexity"
    domains = ["web=held_out/web/*.jsonl", "code=held_out/code/*.py"]

The run's own validator measures a domain, so this works in any layout. The figures are added to the
validation's row, for all sinks: `loss_web`, `perplexity_web`. The code of the command would need
the full model on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchtitan.base.errors import ConfigError
from torchtitan.data.dataset import PadToBatch
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.mesh.settings import CommConfig
from torchtitan.tools.evaluate.command import parse_domains
from torchtitan.tools.evaluate.perplexity import open_domain
from torchtitan.trainer import Run
from torchtitan.validate import Validator, load_once

KEY = "training.callbacks"
PATH = "torchtitan.tools.evaluate.callback:Perplexity"


class Perplexity:
    """Measure each domain at each validation.

    `domains` has NAME=FILES of each, as in --perplexity of `torchtitan evaluate`.
    """

    def __init__(self, domains: Sequence[str], tokenizer_path: str = "bpe_2048") -> None:
        self._files = parse_domains(domains, key=KEY)
        self._tokenizer_path = tokenizer_path
        self._validators: dict[str, Validator] = {}

    def on_start(self, run: Run) -> None:
        """Open the domains; text is cut as in the training."""
        tokenizer = build_tokenizer(self._tokenizer_path, key=KEY)
        if tokenizer.fingerprint != run.loader.dataset.fingerprint["tokenizer"]:
            rule = f"must be the tokenizer of model.tokenizer_path, got {self._tokenizer_path!r}"
            raise ConfigError.at(KEY, rule)
        if run.validator is None:
            raise ConfigError.at("validation.enable", f"must be true for {PATH}")
        if run.training.loss != "cross_entropy":
            rule = f"must be cross_entropy for a perplexity, got '{run.training.loss}'"
            raise ConfigError.at("training.loss", rule)
        cut, size = replace(run.training, dataset_weights=()), run.training.local_batch_size
        seconds = run.train_timeout_seconds
        for name, files in self._files.items():
            samples = open_domain(name, files, cut=cut, tokenizer=tokenizer, of=KEY)
            padded = PadToBatch(samples, batch=size * run.mesh.dims.dp)
            loader = load_once(padded, local_batch_size=size, mesh=run.mesh)
            self._validators[name] = Validator(
                samples=samples,
                loader=loader,
                execution=run.execution,
                shard=run.sequence_shard,
                model=run.model,
                mesh=run.mesh,
                device=run.device,
                data=name,
                freq=1,
                before_saves=False,
                # the run's own validation was before this, and has compiled the model
                comm=CommConfig(init_timeout_seconds=seconds, train_timeout_seconds=seconds),
            )

    def on_validation(self, step: int, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the loss and perplexity of each domain."""
        figures = {}
        for name, validator in self._validators.items():
            measured = validator.measure(step)
            for figure in ("loss", "perplexity"):
                figures[f"{figure}_{name}"] = float(measured[f"validation_{figure}"])
        return figures
