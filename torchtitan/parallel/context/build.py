"""Context parallelism: ranks share each sequence, so that memory falls with their number.

Everything but attention works on each token by itself, so a rank computes its part of the sequence
as if it were the whole, with the right positions (`SequenceShard`); only attention looks further
(`attention.py`). Parameters are sharded over these ranks as over those of FSDP, whose sum of
gradients is the sum over the sequence too.
"""

from __future__ import annotations

from torch import nn

from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import AttentionModule, LanguageModel, has_window
from torchtitan.parallel.context.attention import Ranks, build_attention
from torchtitan.parallel.context.layout import SequenceLayout, SequenceShard


def check_attention(model: LanguageModel, *, parallelism: ParallelismConfig) -> None:
    """Check that the model's attention can be split over ranks.

    Raises:
        ConfigError: A block has no `AttentionModule`, or a window, which only Ulysses supports, or
            the ranks of Ulysses times those of tensor parallelism do not divide the heads.
    """
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if cp == 1:
        return
    for name, block in model.layers.items():
        if not any(isinstance(module, AttentionModule) for module in block.modules()):
            raise ConfigError.at(
                "parallelism.context_parallel_degree",
                f"must be 1 for a model whose blocks attend in their own way, got {cp}: "
                f"layers.{name} holds no AttentionModule (torchtitan.models.interface)",
            )
    if parallelism.context_parallel_rotate_method != "ulysses":
        if has_window(model):
            raise ConfigError.at(
                "parallelism.context_parallel_rotate_method",
                f'must be "ulysses" for a model that attends to a window of tokens, got '
                f'"{parallelism.context_parallel_rotate_method}": the others attend to all tokens; '
                "or set parallelism.context_parallel_degree = 1",
            )
        return
    architecture = model.config
    for what, count in (
        ("query", architecture.num_heads),
        ("key/value", architecture.num_kv_heads),
    ):
        if count % (cp * tp):
            raise ConfigError.at(
                (
                    "parallelism.context_parallel_rotate_method",
                    "parallelism.context_parallel_degree",
                    "parallelism.tensor_parallel_degree",
                ),
                f"ulysses splits heads: the model's {count} {what} heads must be a multiple of "
                f"{cp * tp} (context_parallel_degree {cp} x tensor_parallel_degree {tp}); lower a "
                f'degree, or write "ring" or "allgather", which need no heads',
            )


def build_layout(parallelism: ParallelismConfig) -> SequenceLayout:
    """Return who holds which part of a sequence; one rank holds all of it."""
    return SequenceLayout(
        degree=parallelism.context_parallel_degree,
        balancer=parallelism.context_parallel_load_balancer,
    )


def build_shard(
    parallelism: ParallelismConfig, *, training: TrainingConfig, mesh: Mesh
) -> SequenceShard:
    """Build what takes this rank's part out of a batch."""
    return SequenceShard(
        build_layout(parallelism),
        rank=mesh.data.get_local_rank("cp"),
        attn_mask_type=training.attn_mask_type,
        reset_positions=training.reset_positions,
    )


def apply_context_parallel(
    model: nn.Module, *, mesh: Mesh, parallelism: ParallelismConfig, as_one_operator: bool = False
) -> None:
    """Let the blocks of `model` attend to what other ranks hold, in place.

    `as_one_operator`: recomputation by operator then keeps what attention returns.
    """
    if mesh.dims.cp == 1:
        return
    ranks = Ranks(group=mesh.data.get_group("cp"), layout=build_layout(parallelism))
    for module in model.modules():
        if isinstance(module, AttentionModule):
            module.attend = build_attention(
                parallelism.context_parallel_rotate_method,
                ranks=ranks,
                whole=as_one_operator,
                of_heads=module.attend,
            )
