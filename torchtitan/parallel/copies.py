"""Modules whose weights are copies on every rank of tensor parallelism.

A matrix that makes a narrow latent is not worth splitting: each rank multiplies its own part of the
sequence, and the latents are gathered, which are narrower than the stream. The gradients of such
weights are each rank's own terms of a sum, unless every rank has the whole sequence.

Shapes: B batch, S sequence, C, D widths, T = B S tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle


def wrapped(local: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return what the ranks hold as one tensor."""
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def copy_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank all of a module's own parameters.

    Each rank's gradient is that of its own tokens or heads, Partial over tp: FSDP2 sums it to the
    parameter's Replicate before its own reduction.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        copied = wrapped(parameter, mesh, Replicate())
        module.register_parameter(name, nn.Parameter(copied))


class Copied(ParallelStyle):
    """A linear layer whose weights are copies, for the tokens that the stream has here."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.tokens = Shard(0) if stream == Shard(1) else stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        copy_parameters(module, device_mesh)
        module.forward = partial(
            _on_flat_tokens, forward=module.forward, mesh=device_mesh, placement=self.tokens
        )
        return module


def _on_flat_tokens(
    x_BSC: Tensor, *, forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, placement: Placement
) -> Tensor:
    # flat: a product of sequences that are cut would gather them first
    out_TD = forward(wrapped(x_BSC.flatten(0, 1), mesh, placement))
    assert isinstance(out_TD, DTensor)
    return out_TD.to_local().unflatten(0, x_BSC.shape[:2])


class Shared(ParallelStyle):
    """A module without weights, whose result all heads use: the whole sequence, on every rank.

    Its gradient is then the sum over the ranks, each of which has that of its own heads.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: object, x_BSD: Tensor) -> Tensor:
            whole = wrapped(x_BSD, device_mesh, self.stream).redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()])

        module.register_forward_hook(gather)
        return module
