"""torch.compile per block: each block's many small operators become a few fused ones.

Blocks with the same `forward` are compiled once: the method's function is compiled, and every block
calls it with itself as the first argument. Blocks of another class, or whose `forward` was
replaced, are compiled separately. (With one graph for the full model the time to compile would grow
with the number of layers, and the graph would contain FSDP, which gathers one block's weights at a
time.) Modules stay the same objects, so parameters keep their names. Embedding and last norm are
not compiled. The loss compiles its own passes over the logits (`optim/loss.py`).

A block is one graph, and a graph break is an error. The exceptions are attention that communicates
with other ranks or depends on the lengths of documents, and routers with their experts, which each
receive a different number of tokens. They run uncompiled, between the graphs before and after them.

Recomputation wraps the compiled block instead of being compiled into it. So blocks with and without
recomputation share one graph, and a recomputed block keeps only its input. Recomputation by
operator (`selective_ac_option = "op"`) has to see the operators, and is compiled into the block.
Alternatively the compiler gets a memory budget, and chooses by itself what to recompute.

A graph is valid for one shape. Another batch size or sequence length, or a forward without
gradients, as in evaluation, compiles one more. A job has two or three of them. Beyond eight torch
assumes a mistake and raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.models.interface import AttentionModule, MoELayer, has_window
from torchtitan.parallel.activation import OperatorPolicy
from torchtitan.parallel.settings import BY_OPERATOR, ActivationCheckpointConfig, CompileConfig


def check_compile(settings: CompileConfig) -> None:
    """Raise ConfigError unless this machine has the backend."""
    backends = torch.compiler.list_backends(exclude_tags=None)
    if settings.backend not in backends:
        guess = did_you_mean(settings.backend, backends)
        rule = f"must be an installed backend ({', '.join(backends)})"
        raise ConfigError.at("compile.backend", f"{rule}, got '{settings.backend}'{guess}")


def has_opaque_attention(model: nn.Module, *, cp: int, attn_mask_type: str) -> bool:
    """Return whether attention communicates with other ranks, or depends on lengths or windows."""
    return cp > 1 or attn_mask_type == "block_causal" or has_window(model)


def check_recomputation(
    model: nn.Module, settings: ActivationCheckpointConfig, *, cp: int, attn_mask_type: str
) -> None:
    """Raise ConfigError unless blocks that are recomputed by operator are compiled completely."""
    if (settings.mode, settings.selective_ac_option) != ("selective", BY_OPERATOR):
        return
    parts = {
        "attention": has_opaque_attention(model, cp=cp, attn_mask_type=attn_mask_type),
        "the routing to experts": any(isinstance(module, MoELayer) for module in model.modules()),
    }
    if uncompiled := [part for part, is_uncompiled in parts.items() if is_uncompiled]:
        raise ConfigError.at(
            ("activation_checkpoint.selective_ac_option", "compile.enable"),
            f'"op" selects operators of completely compiled blocks, and '
            f"{' and '.join(uncompiled)} of this job is not",
        )


def apply_compile(
    model: nn.Module,
    *,
    backend: str,
    memory_budget: float,
    opaque_attention: bool,
    sequence_comes_async: bool,
    keeps_operators: bool = False,
) -> None:
    """Compile the blocks of `model` in place. Compilation takes place in the first forward.

    A graph may save the fraction `memory_budget` of the activations for backward.
    `opaque_attention` leaves attention uncompiled. With `sequence_comes_async` the embedding's
    output may still be in transit from other ranks. `keeps_operators` recomputes blocks except
    their most expensive operators.
    """
    has_experts = _exclude_routes(model)
    compiled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
    for block in model.layers.values():
        forward = block.forward
        is_own_method = isinstance(forward, MethodType) and forward.__self__ is block
        shared = forward.__func__ if is_own_method else forward
        if shared not in compiled:
            graphs: Any = torch.compile(
                _recompute_by_operator(shared) if keeps_operators else shared,
                backend=backend,
                fullgraph=not (opaque_attention or has_experts),
                dynamic=False,
            )
            budgeted = graphs if memory_budget == 1.0 else _with_budget(memory_budget, graphs)
            compiled[shared] = budgeted
        block.forward = MethodType(compiled[shared], block) if is_own_method else compiled[shared]
    for module in model.modules():
        if isinstance(module, AttentionModule) and opaque_attention:
            module.attend = torch.compiler.disable(
                module.attend, reason="it communicates, or depends on lengths"
            )
    if sequence_comes_async and model.tok_embeddings is not None:
        # a compiled block would wait for such an input, but drop its autograd history
        # its copy is a plain tensor that keeps it
        model.tok_embeddings.register_forward_hook(lambda _, inputs, output: output.clone())


def _recompute_by_operator(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `forward` with the recomputation that a compiler splits into its two graphs."""

    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts)

    return recomputed


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(OperatorPolicy())


def _exclude_routes(model: nn.Module) -> bool:
    """Exclude routers and experts from compiled graphs, in place. Return whether any exist."""
    disabled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
    for module in model.modules():
        if isinstance(module, MoELayer):
            assert isinstance(module.route, MethodType)
            shared = module.route.__func__
            if shared not in disabled:  # one for all layers, so that their blocks share a graph
                disabled[shared] = torch.compiler.disable(
                    shared, reason="the number of tokens differs per expert"
                )
            module.route = MethodType(disabled[shared], module)
    return bool(disabled)


def _with_budget(memory_budget: float, compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Set the memory budget while `compiled` runs. It is read when a graph is compiled."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return compiled(*args, **kwargs)

    return forward
