"""The settings of the update: [optimizer], [lr_scheduler], [router] and [spikes]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.base.errors import Violation
from torchtitan.config.settings import (
    IMPORT_PATH,
    UNSET,
    FiniteNonNegative,
    FinitePositive,
    Fraction,
    ImportPath,
    NonNegativeInt,
    Options,
    PositiveInt,
    Range,
    Requires,
    Text,
)

# docs/optimizer.md explains why torch's other classes are missing
OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)

WITH_BETAS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Muon")
"""Optimizers that use beta1, beta2 and eps."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Parameters with a learning rate or weight decay of their own."""

    params: tuple[Text, ...]
    """Parameter names (shell patterns); a parameter belongs to the first group that matches it."""
    lr: FinitePositive | None = None
    """Peak learning rate; optimizer.lr if not given."""
    weight_decay: FiniteNonNegative | None = None
    """Weight decay, except of no_decay_params; optimizer.weight_decay if not given."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its constants."""

    name: Annotated[Text, ImportPath(*OPTIMIZERS)] = "AdamW"
    """Update rule: Muon for matrices with AdamW for the rest, one of torch.optim's, or a
    torch.optim.Optimizer of your own, which gets its arguments from options."""
    lr: FinitePositive = 8e-4
    """Peak learning rate; the schedule multiplies it."""
    beta1: Annotated[float, Range(ge=0, lt=1), Requires("name", WITH_BETAS)] = 0.9
    """Decay of the first moment; Muon's AdamW has it too."""
    beta2: Annotated[float, Range(ge=0, lt=1), Requires("name", WITH_BETAS)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[
        FinitePositive,
        Requires("name", WITH_BETAS, "write optimizer.options.eps (SGD has none), or remove this"),
    ] = 1e-8
    """Added to the denominator."""
    momentum: Annotated[
        float, Range(ge=0, lt=1), Requires("name", "SGD", "use beta1, or remove this")
    ] = 0.0
    """Momentum."""
    muon_momentum: Annotated[float, Range(ge=0, lt=1), Requires("name", "Muon")] = 0.95
    """Momentum of matrices."""
    muon_excluded_params: Annotated[tuple[Text, ...], Requires("name", "Muon")] = (
        "tok_embeddings.*",
        "output.*",
        "*.lora_?",
        "*.experts.b?",
    )
    """Matrices (shell patterns) that AdamW updates, as it does vectors."""
    options: Options = field(default_factory=dict)
    """More arguments of the optimizer's class, as amsgrad = true."""
    weight_decay: FiniteNonNegative = 0.1
    """Weight decay of every parameter that no_decay_params does not match."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with a learning rate or weight decay of their own, one table for each group."""
    no_decay_params: tuple[Text, ...] = ("*norm*", "*.bias")
    """Parameter names (shell patterns) that are never decayed."""
    frozen_params: tuple[Text, ...] = ()
    """Parameter names (shell patterns) that are not trained: no gradient, no optimizer state."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the update runs: one kernel (fused; only Adam and AdamW, else foreach), one kernel per
    operation (foreach), or a loop over parameters."""

    def violations(self) -> Iterator[Violation]:
        """Yield a violation for each group without patterns or without values."""
        for number, group in enumerate(self.groups, start=1):
            if not group.params:
                yield Violation(("groups",), f"table {number} needs a pattern in params; add one")
            if group.lr is None and group.weight_decay is None:
                rule = f"table {number} changes nothing; give it lr or weight_decay, or remove it"
                yield Violation(("groups",), rule)


DEFAULT_WARMUP_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """Warmup, stable, decay: the learning rate as a pure function of the step."""

    warmup_steps: NonNegativeInt | None = None
    """Steps over which the rate grows linearly from near 0 to optimizer.lr; 200 if warmup_ratio is
    not given either."""
    warmup_ratio: Annotated[Fraction | None, Requires("warmup_steps", UNSET)] = None
    """The same as a part of total_steps, in place of warmup_steps."""
    total_steps: PositiveInt | None = None
    """Length of the schedule; if not given the steps of the run: training.steps, or those of
    training.num_epochs if these are fewer. Pin it to be free to change them."""
    decay_ratio: Fraction | None = None
    """Part of total_steps spent in decay; if not given the decay starts right after the warmup."""
    decay_type: Annotated[Text, ImportPath("linear", "sqrt", "cosine")] = "linear"
    """Shape of the decay; or a function of your own, from the part of the decay that is done, 0 to
    1, to the part of the rate that is left."""
    decay_options: Annotated[Options, Requires("decay_type", IMPORT_PATH)] = field(
        default_factory=dict
    )
    """Keyword arguments of a custom decay_type."""
    decay_end: Literal["after_last_step", "last_step"] = "after_last_step"
    """Where the decay reaches min_lr_factor. after_last_step: the step after total_steps would, so
    that every step trains; last_step: the last one does."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this multiple of optimizer.lr."""

    def __post_init__(self) -> None:
        """Fill in the default, so that resolved settings state the length of the warmup."""
        if self.warmup_steps is None and self.warmup_ratio is None:
            object.__setattr__(self, "warmup_steps", DEFAULT_WARMUP_STEPS)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the length of the warmup of a schedule of `total_steps`."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * total_steps)
        assert self.warmup_steps is not None
        return self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Load balancing of experts; all off by default."""

    bias_update_rate: Annotated[FiniteNonNegative, Requires("lora.rank", 0)] = 0.0
    """After each step the bias of an expert with fewer tokens than the mean grows by this, and the
    bias of one with more falls; 0: biases stay. Needs a model with expert_bias."""
    sequence_loss_weight: FiniteNonNegative = 0.0
    """Weight of the loss that balances the experts within each sequence; 0: no such loss."""
    global_loss_weight: FiniteNonNegative = 0.0
    """Weight of the loss that balances the experts over the global batch; 0: no such loss."""
    z_loss_weight: FiniteNonNegative = 0.0
    """Weight of the loss that keeps the router's logits small; 0: no such loss."""
    log_layers: bool = False
    """Report the load of each layer too, and in metrics.jsonl the tokens of each expert."""


ACTS = Requires("action", ("skip", "clip"))


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """Handling of steps whose loss or gradient norm jumps."""

    action: Literal["none", "skip", "clip"] = "none"
    """skip: weights and optimizer stay as they were; clip: the gradients are scaled down to the
    median norm of the last steps; none: no detection."""
    window: Annotated[int, Range(ge=4, le=100_000), ACTS] = 128
    """Number of last steps that define a normal loss and gradient norm; the first ones of a run
    never spike."""
    deviations: Annotated[FinitePositive, ACTS] = 8.0
    """A figure spikes if it is this number of standard deviations above the median; the standard
    deviation is estimated by the median absolute deviation, at least a hundredth of the median."""
