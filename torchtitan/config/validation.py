"""The settings of what a run is measured on while it trains: the [validation] section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.training import DataLoaderConfig
from torchtitan.config.types import STRICT, Share, Strings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationConfig:
    """The loss on data that are not trained on; what is not said here is as in [training]."""

    enable: bool = False
    """Measure the loss on held-out data; it changes no number of the training."""
    dataset: (
        Literal[
            "python_stdlib",
            "synthetic",
            "synthetic_masked",
            "files",
            "examples",
            "synthetic_examples",
        ]
        | None
    ) = None
    """Kind of data, as training.dataset, which it is if not given; of the generated ones a part
    that is never trained on."""
    dataset_path: Strings = ()
    """Files to measure the loss on, of the kinds that training.dataset_path takes."""
    split: Share | None = None
    """Part of the training's documents to hold out of the training and measure the loss on, chosen
    by a hash of their content; instead of dataset. They are held out while enable is false too."""
    local_batch_size: PositiveInt | None = None
    """Samples of one forward pass on one data-parallel rank; training's if not given."""
    seq_len: PositiveInt | None = None
    """Tokens of a sample; training's if not given."""
    freq: PositiveInt = 10
    """Validate every this many steps; the first and the last step are always validated."""
    steps: int = -1
    """Batches of one validation, always the same; -1: all samples, each once."""
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)
    """Workers and prefetch, started anew for each validation."""
