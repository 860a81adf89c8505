"""Tensor parallelism: the ranks of one axis split each layer's matrices.

The first matrices of a layer are split by columns (of their output), the last one by rows, so that
everything between them, heads and hidden channels, stays on its rank; the parts of the result are
summed. With sequence parallelism the sum is scattered along the sequence and gathered again before
the next matrices (arXiv:2205.05198): norms and the residual stream, which every rank would
otherwise hold in full, are split too, for the same traffic. Embedding and head are split along the
vocabulary.

What a module does is data: its role, in the model's `tensor_plan`. Modules pass plain local tensors
to each other, (B, S / tp, C) under sequence parallelism, so that pipeline stages and recomputed
blocks need not know. Parameters are DTensors on the tp axis, as are activations from a gather to
the matrices after it.

Shapes: B batch, S sequence, C = dim, V vocabulary.

Modules whose weights are copies on every rank of tensor parallelism.

A matrix that makes a narrow latent is not worth splitting: each rank multiplies its own part of the
sequence, and the latents are gathered, which are narrower than the stream. The gradients of such
weights are each rank's own terms of a sum, unless every rank has the whole sequence.

Shapes: B batch, S sequence, C, D widths, T = B S tokens.

The embedding under tensor parallelism: each rank looks up the tokens whose rows it holds.

The table is split by rows of the vocabulary. A rank looks up its own rows, gives zeros for all
other tokens, and the sum over the ranks is the lookup. DTensor can do the same (`RowwiseParallel`),
but its backward makes the gradient of the whole table on every rank and then cuts out that rank's
rows. Here the lookup and its gradient are local: V / tp rows on each rank. With a vocabulary of
128,256 and 16,384 channels on 8 ranks, a float32 gradient takes 1 GiB instead of 7.8.

Shapes: B batch, S sequence, C = dim, V vocabulary, R = V / tp rows of a rank.

Adapters under tensor parallelism: they are split along with the matrix beside them.

Where the matrix is split by columns of its output, B is split the same way and A is a copy; where
it is split by rows of its input, A is split and B is a copy. So each rank multiplies its own part,
and the result lies over the ranks as the matrix's own product does: in parts, or as terms of a sum
that is computed anyway. Forward sends nothing for the adapters (DTensor by itself would sum the
R-wide product between them); in backward the ranks' gradients of a copy are summed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from math import gcd
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.base.patterns import matches
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import (
    GroupedExperts,
    HeadLoss,
    LanguageModel,
    MoELayer,
    router_biases,
)
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import TensorRole


class SplitsItself:
    """A module that says itself how its parameters are split, in the role that the plan gives."""

    def parallel_style(self, role: TensorRole, *, stream: Placement) -> ParallelStyle:
        """Return how; `stream` is the placement of what modules hand on."""
        raise NotImplementedError


def check_tensor_parallel(
    model: LanguageModel,
    *,
    plan: Mapping[str, TensorRole],
    parallelism: ParallelismConfig,
) -> None:
    """Check that the plan covers a whole model, and that the degree divides its sizes."""
    tp, architecture = parallelism.tensor_parallel_degree, model.config
    if tp == 1:
        return
    rules = []
    if unplanned := find_unplanned(model, plan=plan):
        rules.append(f"must be 1, got {tp}: {unplanned}")
    if misfit := find_misfit(architecture, tp=tp):
        rules.append(
            f"must divide the model's heads, feed-forward width and vocabulary, got {misfit}; use "
            f"data_parallel_shard_degree for the other ranks"
        )
    elif uneven := _find_uneven(model, plan=plan, tp=tp):
        rules.append(f"must divide everything that is split, got {tp} for {uneven}")
    if rules:
        key = "parallelism.tensor_parallel_degree"
        raise ConfigError([Violation((key,), rule) for rule in rules])


def find_unplanned(model: nn.Module, *, plan: Mapping[str, TensorRole]) -> str:
    """Say which modules with parameters the plan leaves out; nothing where there are none."""
    places = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    if of_blocks := [p for p in sorted(places) if p.startswith("layers.") and p.count(".") == 1]:
        return (
            f"{of_blocks[0]} has parameters of its own, and a block cannot be split: put them into "
            f"a module of their own, with a role in the tensor_plan"
        )
    left = [p for p in sorted(places) if not any(_matches(p, pattern) for pattern in plan)]
    some = ", ".join(left[:4]) + (" ..." if len(left) > 4 else "")
    return f"the model's tensor_plan does not say how to split {some}" if left else ""


def _find_uneven(model: nn.Module, *, plan: Mapping[str, TensorRole], tp: int) -> str:
    """Name some matrices that a family has in other sizes than its config says, and do not fit."""
    columns: dict[TensorRole, int] = {"vocabulary": 0, "column": 0, "gathered_column": 0, "head": 0}
    split = {**columns, "row": 1}
    found = [
        f"{name} ({parameter.shape[split[role]]})"
        for name, parameter in model.named_parameters()
        for pattern, role in plan.items()
        if _matches(name.rpartition(".")[0], pattern) and role in split and parameter.ndim > 1
        if parameter.shape[split[role]] % tp
    ]
    return ", ".join(found[:4])


def find_misfit(architecture: DecoderConfig, *, tp: int) -> str:
    """Say which sizes `tp` does not divide and which degrees fit; nothing where it fits."""
    sizes = {
        "num_heads": architecture.num_heads,
        "num_kv_heads": architecture.num_kv_heads,
        "hidden_dim": architecture.hidden_dim,
        "vocab_size": architecture.vocab_size,
    }
    wrong = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % tp)
    common = gcd(*sizes.values())
    fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return f"{tp} for {wrong}; this model can be split by {fitting}" if wrong else ""


def apply_tensor_parallel(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    plan: Mapping[str, TensorRole],
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Split the modules of `model` that the plan names over the ranks of `mesh`, in place.

    Given labels, the model takes its loss from its own rank's part of the vocabulary with
    `loss_parallel`, else each rank by itself from all of it. Without labels it returns all logits.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    for pattern, role in plan.items():
        common = _style(role, stream=stream, loss_parallel=loss_parallel)
        for name, module in list(model.named_modules()):
            if _matches(name, pattern) and common is not None:
                splits_itself = isinstance(module, SplitsItself)
                style = module.parallel_style(role, stream=stream) if splits_itself else common
                # None: parameters are on the meta device, there is nothing to send
                parallelize_module(module, mesh, style, src_data_rank=None)
    elsewhere = {*router_biases(model), *_of_experts(model)}
    left = [
        name
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) and p not in elsewhere
    ]
    assert not left, f"the tensor plan does not place {', '.join(left)} on the tp axis"
    # every local part of a DTensor is a view, and FSDP fears that it might be changed in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def _matches(name: str, pattern: str) -> bool:
    """Compare part by part: a star stands for one part of a name."""
    return name.count(".") == pattern.count(".") and matches(name, [pattern])


def _style(role: TensorRole, *, stream: Placement, loss_parallel: bool) -> ParallelStyle | None:
    """Translate a role to torch; `stream` is the placement of what modules hand on.

    None: the module is left as it is.
    """
    match role:
        case "vocabulary":
            return Lookup(stream)
        case "norm":
            return _Norm(stream)
        case "head_norm":
            return _Norm(Shard(2))  # heads stay where the matrices before them were cut
        case "gather":
            return _Gather(stream)
        case "column":
            return ColwiseParallel()
        case "gathered_column":
            return ColwiseParallel(input_layouts=stream)
        case "copied":
            return Copied(stream)
        case "shared":
            return Shared(stream)
        case "row":
            return RowwiseParallel(output_layouts=stream)
        case "head":
            return _SplitHead(stream, loss_parallel=loss_parallel)
        case "route":
            return _Route(stream)
        case "gate":
            return _Gate()
        case "experts":
            return None


class _Norm(ParallelStyle):
    """A module whose weights are copies; it works on its input as that lies over the ranks."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        copy_parameters(module, device_mesh)
        module.register_forward_pre_hook(
            lambda _, inputs: wrapped(inputs[0], device_mesh, self.stream)
        )
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class _Gather(ParallelStyle):
    """A module with several matrices behind one gathered input.

    The gradients from all its matrices are summed before they are scattered. Further arguments, as
    the rotation and the cache, pass as they are.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
            x, *others = inputs
            assert isinstance(x, Tensor)
            x_BSC = wrapped(x, device_mesh, self.stream)
            return x_BSC.redistribute(placements=[Replicate()]), *others

        module.register_forward_pre_hook(gather)
        return module


class _Gate(ParallelStyle):
    """A matrix whose weights are copies, multiplied by the rank's own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        copy_parameters(module, device_mesh)
        module.product = partial(_local_product, product=module.product)
        return module


def _local_product(
    x_BSC: Tensor, weight: DTensor, *, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    # as a DTensor the tokens, which may be unequally many, would have to be an even cut of all
    return product(x_BSC, weight.to_local(grad_placements=[Partial()]))


class _Route(ParallelStyle):
    """A module that sends each rank's own part of the sequence to experts."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.is_split = stream == Shard(1)
        self._dealing: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MoELayer)
        if not self.is_split:
            route = type(module).route
            # one for all layers: the compiler's graphs of blocks hold for that alone
            dealing = self._dealing.setdefault(route, _deal_out(route, device_mesh))
            module.route = MethodType(dealing, module)
        return module


def _deal_out(route: Callable[..., Tensor], mesh: DeviceMesh) -> Callable[..., Tensor]:
    """Deal out a sequence that all ranks have, and gather what `route` makes of the parts."""

    def of_part(module: nn.Module, x_BSC: Tensor) -> Tensor:
        part = wrapped(x_BSC, mesh, Replicate()).redistribute(placements=[Shard(1)])
        out = route(module, part.to_local())
        stride = torch.empty(x_BSC.shape, device="meta").stride()
        whole = DTensor.from_local(
            out, mesh, [Shard(1)], run_check=False, shape=x_BSC.shape, stride=stride
        )  # the length need not divide by the ranks
        return whole.redistribute(placements=[Replicate()]).to_local()

    return of_part


def _of_experts(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that tensor parallelism leaves to expert parallelism."""
    found = (m.parameters() for m in model.modules() if isinstance(m, GroupedExperts))
    return [parameter for parameters in found for parameter in parameters]


class _SplitHead(_Gather):
    """The matrix from the stream to the vocabulary, its own or the embedding's, and the loss."""

    def __init__(self, stream: Placement, *, loss_parallel: bool) -> None:
        super().__init__(stream)
        self.loss_parallel = loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            # nothing is sent: parameters are on the meta device
            split = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split))
        super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, inputs, output: _whole(output))
        module.loss = partial(_local_loss, loss=module.loss, whole=not self.loss_parallel)
        return module


def _local_loss(
    x_BSC: DTensor, weight_VC: DTensor, labels_BS: Tensor, *, loss: HeadLoss, whole: bool
) -> Tensor:
    """Take the loss on local tensors: those of this rank's part of the vocabulary, or of all."""
    if whole:
        # each rank computes the same, whole gradients included
        return loss(x_BSC.to_local(), weight_VC.full_tensor(), labels_BS)
    # the other parts of the vocabulary have their share in the gradient of x
    x = x_BSC.to_local(grad_placements=[Partial()])
    return loss(x, weight_VC.to_local(), labels_BS)


def _whole(output: Tensor) -> Tensor:
    """Gather logits; the loss is a plain tensor already."""
    return output.full_tensor() if isinstance(output, DTensor) else output


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


class Lookup(ParallelStyle):
    """A table split by rows; `stream` is the placement of what it hands on.

    An embedding that does more than look up rows is left to DTensor.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not _only_looks_up(module):
            general = RowwiseParallel(input_layouts=Replicate(), output_layouts=self.stream)
            general.src_data_rank = None
            return general._apply(module, device_mesh)
        # nothing is sent: parameters are on the meta device
        split = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(split))
        module.forward = partial(_look_up, module, mesh=device_mesh, stream=self.stream)
        return module


def _only_looks_up(module: nn.Module) -> bool:
    """Tell whether rows are all that a module returns, and their sums all its gradient."""
    assert isinstance(module, nn.Embedding)
    return (
        type(module).forward is nn.Embedding.forward
        and module.padding_idx is None
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def _look_up(
    module: nn.Module, tokens_BS: Tensor, *, mesh: DeviceMesh, stream: Placement
) -> Tensor:
    """Return the rows of all tokens, placed as `stream`."""
    weight = module.weight  # read now: FSDP puts the gathered one in its place
    assert isinstance(weight, DTensor)
    rows_RC = weight.to_local()
    places_BS = tokens_BS - mesh.get_local_rank() * len(rows_RC)
    elsewhere_BS = (places_BS < 0) | (places_BS >= len(rows_RC))
    x_BSC = F.embedding(places_BS.masked_fill_(elsewhere_BS, 0), rows_RC)
    # backward, too, gives zeros to the row that stands for those of other ranks
    x_BSC = x_BSC.masked_fill_(elsewhere_BS.unsqueeze(-1), 0)
    summed = wrapped(x_BSC, mesh, Partial()).redistribute(placements=[stream], async_op=True)
    return summed.to_local()


def low_rank(x: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """Return B A x."""
    return F.linear(F.linear(x, a_RI), b_OR)


def adapter_style(role: TensorRole, *, stream: Placement) -> ParallelStyle:
    """Return how a linear layer with an adapter is split; `stream`: where a row's result goes."""
    if role in ("column", "gathered_column"):
        return _Column(input_layouts=stream if role == "gathered_column" else None)
    if role == "copied":
        return Copied(stream)
    assert role == "row", f"a linear layer is split by columns or rows, not as a {role}"
    return _Row(output_layouts=stream)


class _Column(ColwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        placements |= {"lora_a": Replicate(), "lora_b": Shard(0)}
        _distribute(module, device_mesh, placements, result=Shard(-1))


class _Row(RowwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
        placements |= {"lora_a": Shard(1), "lora_b": Replicate()}
        _distribute(module, device_mesh, placements, result=Partial())


def _distribute(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], *, result: Placement
) -> None:
    own = dict(module.named_parameters(recurse=False))  # a bias only where there is one
    for name, placement in placements.items():
        if name not in own:
            continue
        # None: parameters are on the meta device, there is nothing to send
        split = distribute_tensor(own[name], mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split))
    module.low_rank = partial(_own_part, result=result)


def _own_part(x: DTensor, a_RI: DTensor, b_OR: DTensor, *, result: Placement) -> DTensor:
    """Multiply this rank's part."""
    product = low_rank(*map(_local, (x, a_RI, b_OR)))
    return DTensor.from_local(product, x.device_mesh, [result], run_check=False)


def _local(tensor: DTensor) -> Tensor:
    """Return this rank's part; of a copy, each rank has one term of the gradient."""
    [placement] = tensor.placements
    gradient = Partial() if placement.is_replicate() else placement
    return tensor.to_local(grad_placements=[gradient])
