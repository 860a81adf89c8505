"""The sizes of a decoder. A job may override each of them: they are keys of [model].

Settings are read without torch, so nothing here imports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from torchtitan.base.errors import Violation
from torchtitan.config.settings import SET, FinitePositive, PositiveInt, Range, Requires, finite

OF_FAMILY = {"of_family": True}
"""Marks a field that the family sets and no job can change, because it changes the module."""
OF_FILES = {"of_files": True}
"""Marks a field that a family with Hugging Face files has only if its config.json has it."""
LAYER_TYPES = "LGN"
"""L: attends to the last `window` tokens, G: to all of them, N: to all, without positions."""
EXPERT_SCORES = ("softmax", "sigmoid")


ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
}
"""Types of scaling, and the keys that each type uses."""
DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
DEFAULTS["truncate"] = True


def _types_using(key: str) -> tuple[str, ...]:
    return tuple(name for name, keys in ROPE_KEYS.items() if key in keys)


WITH_FACTOR, WITH_ORIGINAL = _types_using("factor"), _types_using("original_max_position")
LLAMA3, YARN = _types_using("low_freq_factor"), _types_using("beta_fast")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Growth of the rotary wavelengths, for contexts longer than in pretraining."""

    # a key that the type does not use is refused, so a key that is not given is None
    type: Annotated[
        Literal["flavor", "none", "linear", "llama3", "yarn"],
        Requires("factor", SET, "set it", of=WITH_FACTOR),
        Requires("original_max_position", SET, "set it", of=WITH_ORIGINAL),
    ] = "flavor"
    """flavor: as in model.flavor, but none with another dim; none: no scaling; linear: all
    wavelengths grow (position interpolation, arXiv:2306.15595); llama3: only long wavelengths grow,
    as in Llama 3.1; yarn: the same by YaRN's rule, and attention is sharpened
    (arXiv:2309.00071)."""
    factor: Annotated[float | None, finite, Range(ge=1), Requires("type", WITH_FACTOR)] = None
    """Long wavelengths grow by this factor: the new context length over the original one."""
    original_max_position: Annotated[PositiveInt | None, Requires("type", WITH_ORIGINAL)] = None
    """Context length of pretraining, in tokens."""
    low_freq_factor: Annotated[FinitePositive | None, Requires("type", LLAMA3)] = None
    """Wavelengths with fewer turns than this in original_max_position grow by the full factor.
    Default: 1."""
    high_freq_factor: Annotated[FinitePositive | None, Requires("type", LLAMA3)] = None
    """Wavelengths with more turns than this stay. Default: 4."""
    beta_fast: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """Wavelengths with more turns than this in original_max_position stay. Default: 32."""
    beta_slow: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """Wavelengths with fewer turns than this grow by the full factor. Default: 1."""
    truncate: Annotated[bool | None, Requires("type", YARN)] = None
    """The ramp between them starts and ends at full pairs. Default: true."""
    attention_factor: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """Queries and keys are multiplied by this. Default: 0.1 ln(factor) + 1, unless mscale and
    mscale_all_dim are given."""
    mscale: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """DeepSeek's: with mscale_all_dim, rotated channels are multiplied by g(mscale) /
    g(mscale_all_dim), where g(m) = 0.1 m ln(factor) + 1."""
    mscale_all_dim: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """DeepSeek's: the scores of latent attention are multiplied by the square of
    g(mscale_all_dim)."""

    @property
    def used(self) -> dict[str, Any]:
        """Values of the keys that the type uses."""
        values = {key: getattr(self, key) for key in ROPE_KEYS[self.type]}
        return {key: DEFAULTS.get(key) if v is None else v for key, v in values.items()}

    @property
    def temperature(self) -> float:
        """Factor on rotated queries and keys: sqrt(1/t) in YaRN's paper."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_growth(self) -> float:
        """Factor on the scores of latent attention."""
        return self._growth(self.mscale_all_dim or 0.0) ** 2

    def _growth(self, scale: float) -> float:
        assert self.factor is not None
        return 0.1 * scale * math.log(self.factor) + 1.0

    def violations(self) -> Iterator[Violation]:
        """Yield a violation if the bounds of long and short wavelengths are in the wrong order."""
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low_value = getattr(self, low) or DEFAULTS[low]
            high_value = getattr(self, high) or DEFAULTS[high]
            if low_value >= high_value:
                yield Violation(
                    (high, low),
                    f"{high} must be greater than {low}, got {high_value:g} and {low_value:g}",
                )


C = TypeVar("C", bound="DecoderConfig")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder-only transformer with GQA, RoPE, a gated feed-forward and RMSNorm.

    Layers may differ: `layer_type` is a layer's letter, `of_layer_type` are its sizes.
    """

    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Number of transformer blocks."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads. Each serves num_heads / num_kv_heads query heads."""
    hidden_dim: int
    """Width of the feed-forward layer."""
    vocab_size: int
    """Rows of the embedding and of the output head."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Growth of the rotary wavelengths. None: they follow from rope_theta."""
    tie_embeddings: bool = False
    """The output head multiplies by the embedding and has no parameter of its own."""
    head_dim: int | None = None
    """Width of an attention head. Default: dim / num_heads."""
    qk_norm: bool = field(default=False, metadata=OF_FAMILY)
    """Each query and key head is normalized before it is rotated."""
    qkv_bias: bool = field(default=False, metadata=OF_FAMILY)
    """The projections to queries, keys and values have a bias."""
    wo_bias: bool = field(default=False, metadata=OF_FAMILY)
    """The last projection of attention has a bias."""
    window: int | None = field(default=None, metadata=OF_FILES)
    """Number of tokens that a token attends to, itself included. Default: all up to itself."""
    layer_pattern: str | None = field(default=None, metadata=OF_FILES)
    """The type of each layer, repeated over the layers: L attends to the last `window` tokens, G to
    all, N to all and without positions. Default: all layers are alike, with the window if any."""
    local_rope_theta: float | None = field(default=None, metadata=OF_FILES)
    """Base of the rotary wavelengths in the L layers of a pattern, which then are not scaled.
    Default: the wavelengths of the other layers."""
    partial_rotary_factor: float | None = field(default=None, metadata=OF_FILES)
    """Share of a head's channels that are rotated: its first ones. Default: 1."""
    embedding_scale: float | None = field(default=None, metadata=OF_FILES)
    """The embedded tokens are multiplied by this. Default: 1."""
    residual_scale: float | None = field(default=None, metadata=OF_FILES)
    """The outputs of attention and feed-forward are multiplied by this. Default: 1."""
    attention_scale: float | None = field(default=None, metadata=OF_FILES)
    """The products of queries and keys are multiplied by this. Default: 1 / sqrt(head width)."""
    logits_divisor: float | None = field(default=None, metadata=OF_FILES)
    """The logits are divided by this. Default: 1."""
    scales_embedding: bool = field(default=False, metadata=OF_FAMILY)
    """The embedded tokens are multiplied by sqrt(dim)."""
    norm_placement: Literal["pre", "post", "both"] = field(default="pre", metadata=OF_FAMILY)
    """Attention and feed-forward have a norm before them, after them, or both."""
    norm_offset: bool = field(default=False, metadata=OF_FAMILY)
    """Norms multiply by 1 + weight."""
    joint_qk_norm: bool = field(default=False, metadata=OF_FAMILY)
    """The queries of all heads are normalized as one vector before they are rotated, keys too."""
    has_sinks: bool = field(default=False, metadata=OF_FAMILY)
    """Each head has a learned score in its softmax beside the keys' scores, with the value 0."""
    activation: Literal["silu", "gelu"] = field(default="silu", metadata=OF_FAMILY)
    """Activation of the feed-forward's gate. gelu is its tanh approximation."""

    @property
    def embedding_factor(self) -> float:
        """Factor on the embedded tokens."""
        return (self.embedding_scale or 1.0) * (self.dim**0.5 if self.scales_embedding else 1.0)

    def layer_type(self, layer: int) -> str:
        """Return the letter of a layer, one of `LAYER_TYPES`."""
        pattern = self.layer_pattern or ("G" if self.window is None else "L")
        return pattern[layer % len(pattern)]

    def of_layer_type(self: C, layer_type: str) -> C:
        """Return the sizes of a layer of this type, without a pattern."""
        if self.layer_pattern is None:
            return self
        is_local, theta = layer_type == "L", self.local_rope_theta
        return replace(
            self,
            layer_pattern=None,
            window=self.window if is_local else None,
            rope_theta=self.rope_theta if theta is None or not is_local else theta,
            rope_scaling=None if (is_local and theta) or layer_type == "N" else self.rope_scaling,
        )

    def given(self, *, of_family: bool) -> dict[str, Any]:
        """Return the fields that are not None, set by the family or by a job."""
        return {
            size.name: value
            for size in fields(self)
            if size.metadata.get("of_family", False) == of_family
            and size.name != "rope_scaling"
            and (value := getattr(self, size.name)) is not None
        }

    @classmethod
    def missing(cls, sizes: Mapping[str, Any]) -> list[str]:
        """Return the required fields that are not in `sizes`."""
        return [
            size.name for size in fields(cls) if size.default is MISSING and size.name not in sizes
        ]

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that are rotated."""
        share = self.partial_rotary_factor
        return self.head_width if share is None else int(self.head_width * share)

    def has_parameter(self, name: str) -> bool:
        """Return whether a model of these sizes has one of the family's parameters."""
        return not (self.tie_embeddings and name == "output.weight")

    def violations(self) -> Iterator[Violation]:
        """Yield each rule that these sizes break, with keys as in [model]."""
        yield from self._head_violations()
        yield from self._pattern_violations()
        if self.num_heads % self.num_kv_heads:
            yield Violation(
                ("num_kv_heads", "num_heads"),
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}",
            )

    def _pattern_violations(self) -> Iterator[Violation]:
        for key in ("rope_theta", "local_rope_theta"):
            if (theta := getattr(self, key)) is not None and theta <= 1:
                yield Violation((key,), f"must be greater than 1, got {theta:g}")
        pattern, keys = self.layer_pattern, ("layer_pattern", "num_layers", "window")
        if pattern is None:
            return
        if not 1 <= len(pattern) <= self.num_layers or not set(pattern) <= set(LAYER_TYPES):
            rule = f"must be 1 to {self.num_layers} letters of {LAYER_TYPES}"
            yield Violation(keys, f"{rule}, got '{pattern}'")
        elif ("L" in pattern) != (self.window is not None):
            rule = "must have an L if there is a window, and only then"
            yield Violation(keys, f"{rule}, got '{pattern}' and {self.window}")

    def _head_violations(self) -> Iterator[Violation]:
        if self.head_dim is None and self.dim % self.num_heads:
            yield Violation(
                ("dim", "num_heads"),
                f"dim must be a multiple of num_heads unless head_dim is given, got {self.dim} and "
                f"{self.num_heads}",
            )
        elif self.head_width % 2:
            yield Violation(
                ("head_dim", "num_heads", "dim"),
                f"head_dim (default: dim / num_heads) must be even, because channels are rotated "
                f"in pairs, got {self.head_width}",
            )
        elif self.rotary_dim not in range(2, self.head_width + 1, 2):
            yield Violation(
                ("partial_rotary_factor", "head_dim"),
                f"partial_rotary_factor times head_dim must be an even number of channels from 2 "
                f"to {self.head_width}, got {self.rotary_dim} by {self.partial_rotary_factor}",
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Sizes of a decoder with a mixture of experts: in most layers each token is sent to a few of
    many feed-forwards."""

    num_experts: int
    """Number of experts per layer."""
    num_experts_per_token: int
    """Number of experts that a token is sent to."""
    expert_hidden_dim: int | None = None
    """Width of an expert. hidden_dim is the width of layers without experts. Default: the same."""
    norm_expert_weights: bool = True
    """The weights of a token's experts are divided by their sum."""
    num_dense_layers: int | None = None
    """Number of first layers that have one feed-forward instead of experts. Default: 0."""
    num_shared_experts: int | None = None
    """Number of experts that every token is sent to in addition. Default: 0."""
    num_expert_groups: int | None = None
    """Number of groups of experts. A token first chooses num_limited_groups of them. Default: 1."""
    num_limited_groups: int | None = None
    """Number of groups whose experts a token may choose. Default: all."""
    expert_bias: bool = False
    """Each expert has a bias that is added to its score for the choice, to balance the load."""
    expert_score: str = "softmax"
    """How the router scores experts: softmax over all experts, or sigmoid for each expert."""
    expert_weight_scale: float = 1.0
    """The weights of experts are multiplied by this after all else."""

    @property
    def expert_width(self) -> int:
        """Width of an expert."""
        return self.expert_hidden_dim or self.hidden_dim

    expert_biases: bool = field(default=False, metadata=OF_FAMILY)
    """The router and the experts have biases, and the SwiGLU of experts is clamped."""

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return layer >= (self.num_dense_layers or 0)

    def has_parameter(self, name: str) -> bool:
        """Return whether a model of these sizes has one of the family's parameters."""
        match name.split("."):
            case ["layers", layer, "feed_forward", *_]:
                return not self.has_experts(int(layer))
            case ["layers", layer, "moe", part, *_]:
                lacks = part == "expert_bias" and not self.expert_bias
                lacks = lacks or (part == "shared_experts" and not self.num_shared_experts)
                return self.has_experts(int(layer)) and not lacks
        return super().has_parameter(name)

    def violations(self) -> Iterator[Violation]:
        """Yield each rule that these sizes break, with keys as in [model]."""
        yield from super().violations()
        if self.expert_score not in EXPERT_SCORES:
            yield Violation(
                ("expert_score",),
                f"must be {' or '.join(EXPERT_SCORES)}, got '{self.expert_score}'",
            )
        if self.num_experts_per_token > self.num_experts:
            yield Violation(
                ("num_experts_per_token", "num_experts"),
                f"must be at most num_experts, got {self.num_experts_per_token} of "
                f"{self.num_experts}",
            )
        yield from self._group_violations()
        if not self.has_experts(self.num_layers - 1):
            yield Violation(
                ("num_dense_layers", "num_layers"),
                f"must leave a layer with experts, got {self.num_dense_layers} of "
                f"{self.num_layers} layers",
            )

    def _group_violations(self) -> Iterator[Violation]:
        groups, limit = self.num_expert_groups or 1, self.num_limited_groups or 1
        chosen, in_groups = self.num_experts_per_token, limit * self.num_experts // groups
        if self.num_experts % groups:
            yield Violation(
                ("num_expert_groups", "num_experts"),
                f"must divide num_experts, got {groups} for {self.num_experts}",
            )
        elif limit > groups or (groups > 1 and not self.num_limited_groups):
            yield Violation(
                ("num_limited_groups", "num_expert_groups"),
                f"must be from 1 to num_expert_groups, got {self.num_limited_groups} of {groups}",
            )
        elif self.num_limited_groups and in_groups < chosen:
            yield Violation(
                ("num_limited_groups", "num_experts_per_token"),
                f"leaves a token {in_groups} experts to choose {chosen} from",
            )


@dataclass(frozen=True, kw_only=True)
class GLMConfig(MoEConfig):
    """Sizes of a decoder with experts that may normalize heads: GLM-4.5's."""

    qk_norm: bool = False
    """Each query and key head is normalized before it is rotated."""

    def has_parameter(self, name: str) -> bool:
        """Return whether a model of these sizes has one of the family's parameters."""
        is_norm = name.endswith(("attention.q_norm.weight", "attention.k_norm.weight"))
        return super().has_parameter(name) and (self.qk_norm or not is_norm)


@dataclass(frozen=True, kw_only=True)
class MLAConfig(MoEConfig):
    """Sizes of a decoder with multi-head latent attention and experts: DeepSeek's.

    Query and key heads are qk_nope_head_dim + qk_rope_head_dim wide, value heads v_head_dim. There
    are equal numbers of each, so num_kv_heads is num_heads.
    """

    q_lora_rank: int | None = None
    """Width of the latent that queries are made of. Default: made of the residual stream itself."""
    kv_lora_rank: int
    """Width of the latent that keys and values are made of."""
    qk_nope_head_dim: int
    """Number of channels of a query or key head that are not rotated."""
    qk_rope_head_dim: int
    """Number of channels that are rotated. All heads of a key share them."""
    v_head_dim: int
    """Width of a value head."""

    @property
    def head_width(self) -> int:
        """Width of the rotated part of an attention head."""
        return self.qk_rope_head_dim

    def has_parameter(self, name: str) -> bool:
        """Return whether a model of these sizes has one of the family's parameters."""
        match name.split("."):
            case ["layers", _, "attention", "wq", *_]:
                return self.q_lora_rank is None
            case ["layers", _, "attention", "wq_a" | "q_norm" | "wq_b", *_]:
                return self.q_lora_rank is not None
        return super().has_parameter(name)

    def _head_violations(self) -> Iterator[Violation]:
        if self.head_dim is not None:
            yield Violation(
                ("head_dim",),
                f"has no effect on latent attention, got {self.head_dim}; remove it",
            )
        if self.qk_rope_head_dim % 2:
            yield Violation(
                ("qk_rope_head_dim",),
                f"must be even, because channels are rotated in pairs, got {self.qk_rope_head_dim}",
            )
        if self.num_kv_heads != self.num_heads:
            yield Violation(
                ("num_kv_heads", "num_heads"),
                f"must be num_heads with latent attention, got {self.num_kv_heads} and "
                f"{self.num_heads}",
            )
