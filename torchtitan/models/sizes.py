"""The sizes of a decoder. A job may override each of them: they are keys of [model].

No torch here: settings are read without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from torchtitan.base.errors import Violation
from torchtitan.models.rope_scaling import RopeScaling

OF_FAMILY = {"of_family": True}
"""Marks what the family says and no job: another module, with other parameters."""
SCORES = ("softmax", "sigmoid")
"""Ways in which a router scores experts."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder-only transformer with GQA, RoPE, SwiGLU and RMSNorm."""

    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Transformer blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    hidden_dim: int
    """Width of the feed-forward layer."""
    vocab_size: int
    """Rows of the embedding and of the output head."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretch of the rotary wavelengths; None: as theta gives them."""
    tie_embeddings: bool = False
    """The output head is the embedding matrix: no parameter of its own."""
    head_dim: int | None = None
    """Width of one attention head; dim / num_heads if there is none."""
    qk_norm: bool = field(default=False, metadata=OF_FAMILY)
    """Each query and key is normed, head by head, before it is rotated."""
    qkv_bias: bool = field(default=False, metadata=OF_FAMILY)
    """The matrices that make queries, keys and values add a bias."""
    window: int | None = None
    """Tokens that a token attends to, itself the last; all up to itself if there is none."""

    def given(self, *, of_family: bool) -> dict[str, Any]:
        """Return what is not None: that which the family says, or the sizes that a job may set."""
        return {
            one.name: value
            for one in fields(self)
            if one.metadata.get("of_family", False) == of_family
            and one.name != "rope_scaling"
            and (value := getattr(self, one.name)) is not None
        }

    @classmethod
    def missing(cls, sizes: Mapping[str, Any]) -> list[str]:
        """Return the sizes without a default that are not among these."""
        return [one.name for one in fields(cls) if one.default is MISSING and one.name not in sizes]

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def has(self, name: str) -> bool:
        """Tell whether a model of these sizes has a parameter of the family's."""
        return not (self.tie_embeddings and name == "output.weight")

    def violations(self) -> Iterator[Violation]:
        """Yield what keeps these sizes from being a model, by key, with what would fit."""
        yield from self._wrong_heads()
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            yield Violation(
                ("num_kv_heads", "num_heads"),
                f"num_kv_heads must divide num_heads, got {kv_heads} and {heads}; write "
                f"num_kv_heads = {heads}, or one of {', '.join(fitting[:-1][-6:]) or heads}",
            )

    def _wrong_heads(self) -> Iterator[Violation]:
        dim, heads = self.dim, self.num_heads
        if self.head_dim is None and dim % heads:
            below = dim // heads * heads
            yield Violation(
                ("dim", "num_heads"),
                f"dim must be a multiple of num_heads, got {dim} and {heads}; write dim = "
                f"{' or '.join(str(n) for n in (below, below + heads) if n)}, or set head_dim",
            )
        elif self.head_width % 2:
            given = "" if self.head_dim is not None else f" (dim {dim} / num_heads {heads})"
            yield Violation(
                ("head_dim", "num_heads", "dim"),
                f"head_dim must be even, since channels turn in pairs, got "
                f"{self.head_width}{given}; write head_dim = {self.head_width + 1}",
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Sizes of a decoder with a mixture of experts: in most layers a token takes few of many
    feed-forwards, the experts."""

    num_experts: int
    """Experts of a layer."""
    num_experts_per_token: int
    """Experts that a token is sent to."""
    expert_hidden_dim: int
    """Width of an expert; hidden_dim is that of the layers without experts."""
    norm_expert_weights: bool = True
    """The weights of the experts that a token is sent to are divided by their sum."""
    num_dense_layers: int | None = None
    """First layers, which have one feed-forward instead of experts; none if not given."""
    num_shared_experts: int | None = None
    """Experts that every token is sent to, beside those that it chooses; none if not given."""
    num_expert_groups: int | None = None
    """Groups of experts, of which a token chooses num_limited_groups first; one if not given."""
    num_limited_groups: int | None = None
    """Groups whose experts a token may choose; all if not given."""
    expert_bias: bool = False
    """Each expert has a bias, added to its score in choosing alone, that balances the load."""
    expert_score: str = "softmax"
    """How the router scores experts: softmax, over all of them, or sigmoid, each by itself."""
    expert_weight_scale: float = 1.0
    """The weights of experts are multiplied by this at last."""

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer has experts."""
        return layer >= (self.num_dense_layers or 0)

    def has(self, name: str) -> bool:
        """Tell whether a model of these sizes has a parameter of the family's."""
        match name.split("."):
            case ["layers", layer, "feed_forward", *_]:
                return not self.has_experts(int(layer))
            case ["layers", layer, "moe", part, *_]:
                lacks = part == "expert_bias" and not self.expert_bias
                lacks = lacks or (part == "shared_experts" and not self.num_shared_experts)
                return self.has_experts(int(layer)) and not lacks
        return super().has(name)

    def violations(self) -> Iterator[Violation]:
        """Yield what keeps these sizes from being a model, by key, with what would fit."""
        yield from super().violations()
        if self.expert_score not in SCORES:
            yield Violation(
                ("expert_score",), f"must be {' or '.join(SCORES)}, got '{self.expert_score}'"
            )
        if self.num_experts_per_token > self.num_experts:
            yield Violation(
                ("num_experts_per_token", "num_experts"),
                f"a token is sent to different experts, got {self.num_experts_per_token} of "
                f"{self.num_experts}; write num_experts_per_token = {self.num_experts} or fewer",
            )
        groups, kept = self.num_expert_groups or 1, self.num_limited_groups or 1
        if self.num_experts % groups:
            yield Violation(
                ("num_expert_groups", "num_experts"),
                f"must divide num_experts, got {groups} for {self.num_experts}",
            )
        elif groups > 1 and self.num_limited_groups is None:
            yield Violation(
                ("num_expert_groups", "num_limited_groups"),
                f"groups alone limit nothing, got {groups}; write num_limited_groups, of how many "
                f"a token may choose experts, or leave both out",
            )
        elif kept > groups:
            yield Violation(
                ("num_limited_groups", "num_expert_groups"),
                f"must be at most num_expert_groups, got {kept} of {groups}",
            )
        elif self.num_limited_groups and kept * self.num_experts // groups < (
            chosen := self.num_experts_per_token
        ):
            yield Violation(
                ("num_limited_groups", "num_experts_per_token"),
                f"leaves {kept * self.num_experts // groups} experts to a token that is sent to "
                f"{chosen}; raise it, or lower num_experts_per_token",
            )
        if not self.has_experts(self.num_layers - 1):
            yield Violation(
                ("num_dense_layers", "num_layers"),
                f"a layer must be left to have experts, got num_dense_layers "
                f"{self.num_dense_layers} of {self.num_layers}; write fewer, or take a dense model",
            )


@dataclass(frozen=True, kw_only=True)
class MLAConfig(MoEConfig):
    """Sizes of a decoder with multi-head latent attention and experts: DeepSeek's.

    A head of queries and keys is qk_nope_head_dim + qk_rope_head_dim wide, one of values
    v_head_dim; there are as many of each, so num_kv_heads is num_heads.
    """

    q_lora_rank: int | None = None
    """Width of the latent that queries are made of; made of the stream itself if not given."""
    kv_lora_rank: int
    """Width of the latent that keys and values are made of."""
    qk_nope_head_dim: int
    """Channels of a query's or key's head that are not rotated."""
    qk_rope_head_dim: int
    """Those that are; a key's are the same in all heads."""
    v_head_dim: int
    """Width of a head of values."""

    @property
    def head_width(self) -> int:
        """Width of what is rotated of a head."""
        return self.qk_rope_head_dim

    def has(self, name: str) -> bool:
        """Tell whether a model of these sizes has a parameter of the family's."""
        match name.split("."):
            case ["layers", _, "attention", "wq", *_]:
                return self.q_lora_rank is None
            case ["layers", _, "attention", "wq_a" | "q_norm" | "wq_b", *_]:
                return self.q_lora_rank is not None
        return super().has(name)

    def _wrong_heads(self) -> Iterator[Violation]:
        if self.head_dim is not None:
            yield Violation(
                ("head_dim",),
                f"latent attention has heads of qk_nope_head_dim + qk_rope_head_dim, and of "
                f"v_head_dim, got head_dim {self.head_dim}; remove it, and set those",
            )
        if self.qk_rope_head_dim % 2:
            yield Violation(
                ("qk_rope_head_dim",),
                f"must be even, since channels turn in pairs, got {self.qk_rope_head_dim}; write "
                f"{self.qk_rope_head_dim + 1}",
            )
        if self.num_kv_heads != self.num_heads:
            yield Violation(
                ("num_kv_heads", "num_heads"),
                f"latent attention has a head of keys and values for each of queries, got "
                f"{self.num_kv_heads} and {self.num_heads}; write num_kv_heads = {self.num_heads}",
            )
