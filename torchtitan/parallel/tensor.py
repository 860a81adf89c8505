"""Tensor parallelism: the ranks of one mesh axis shard each layer's matrices.

The first matrices of a layer are sharded by columns (their output), the last one by rows (their
input). Everything in between, attention heads and hidden channels, stays on its rank, and the
partial results are summed. With sequence parallelism the sum is scattered along the sequence and
gathered again before the next matrices (arXiv:2205.05198). The traffic is the same, and norms and
the residual stream are sharded instead of replicated. Embedding and head are sharded along the
vocabulary.

A model describes its modules as data, in its `tensor_plan`: the role of each one. Modules pass
plain local tensors to each other, (B, S / tp, C) under sequence parallelism, so pipeline stages and
recomputed blocks need not know of it. Parameters are DTensors on the tp axis, and so are
activations between a gather and the matrices after it.

**Replicated matrices.** A matrix with a narrow output, such as the latents of MLA, is not worth
sharding. Each rank multiplies its part of the sequence, and the latents are gathered, which is less
traffic than the stream. Its gradient of the weight is then one term of a sum over ranks.

**Embedding.** A rank looks up the tokens whose rows it has, uses zeros for the other tokens, and
the sum over ranks is the result. DTensor can do the same (`RowwiseParallel`), but in backward it
builds the gradient of the full table on every rank before it takes that rank's rows. Here each rank
builds V / tp rows. With a vocabulary of 128,256 and 16,384 channels on 8 ranks, a float32 gradient
takes 1 GiB instead of 7.8.

**LoRA adapters** are sharded like the matrix that they adapt: with a column matrix B is sharded and
A is replicated, with a row matrix A is sharded and B is replicated. The product then has the
placement of the matrix's own product, so forward sends nothing for adapters. (DTensor by itself
would sum the product of width R between them.) Backward sums the gradients of the replicated one.

Shapes: B batch, S sequence, T = B S tokens, C, D widths, V vocabulary, R = V / tp rows of a rank.
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
from torchtitan.models.sizes import DecoderConfig, MoEConfig
from torchtitan.models.spec import TensorRole


class HasParallelStyle:
    """Marks a module that chooses its own style for a role, because it has more parameters."""

    def parallel_style(self, role: TensorRole, *, stream: Placement) -> ParallelStyle:
        """Return the style. `stream` is the placement of the tensors between modules."""
        raise NotImplementedError


def check_tensor_parallel(
    model: LanguageModel,
    *,
    plan: Mapping[str, TensorRole],
    parallelism: ParallelismConfig,
) -> None:
    """Raise ConfigError unless the plan covers a full model and the degree divides its sizes."""
    tp, architecture = parallelism.tensor_parallel_degree, model.config
    rules = []
    if unplanned := find_unplanned(model, plan=plan):
        rules.append(f"must be 1, got {tp}: {unplanned}")
    if uneven := find_uneven_sizes(architecture, tp=tp):
        rules.append(
            f"must divide the model's heads, feed-forward width and vocabulary, got {uneven}; use "
            f"data_parallel_shard_degree for the remaining ranks"
        )
    elif uneven := find_uneven_matrices(dict(model.named_parameters()), plan=plan, num=tp):
        rules.append(f"must divide every sharded dimension, got {tp} for {uneven}")
    if rules:
        key = "parallelism.tensor_parallel_degree"
        raise ConfigError([Violation((key,), rule) for rule in rules])


def find_unplanned(model: nn.Module, *, plan: Mapping[str, TensorRole]) -> str:
    """Describe the modules with parameters that have no role. Empty if all have one."""
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    if blocks := [o for o in sorted(owners) if o.startswith("layers.") and o.count(".") == 1]:
        return (
            f"{blocks[0]} has parameters of its own, and a block cannot be sharded: put them into "
            f"a submodule with a role in the tensor_plan"
        )
    left = [o for o in sorted(owners) if not any(_matches(o, pattern) for pattern in plan)]
    some = ", ".join(left[:4]) + (" ..." if len(left) > 4 else "")
    return f"the model's tensor_plan has no role for {some}" if left else ""


def find_uneven_matrices(
    parameters: Mapping[str, Tensor], *, plan: Mapping[str, TensorRole], num: int
) -> str:
    """Name some matrices whose sharded dimension is not a multiple of `num`."""
    columns: tuple[TensorRole, ...] = ("vocabulary", "column", "gathered_column", "head")
    sharded_dim = {**dict.fromkeys(columns, 0), "row": 1}
    uneven = [
        f"{name} ({parameter.shape[sharded_dim[role]]})"
        for name, parameter in parameters.items()
        for pattern, role in plan.items()
        if _matches(name.rpartition(".")[0], pattern) and role in sharded_dim and parameter.ndim > 1
        if parameter.shape[sharded_dim[role]] % num
    ]
    return ", ".join(uneven[:4])


def find_uneven_sizes(architecture: DecoderConfig, *, tp: int) -> str:
    """Describe the sizes that `tp` does not divide, and the degrees that fit. Empty if it fits."""
    has_dense = not isinstance(architecture, MoEConfig) or not architecture.has_experts(0)
    sizes = {
        "num_heads": architecture.num_heads,
        "num_kv_heads": architecture.num_kv_heads,
        **({"hidden_dim": architecture.hidden_dim} if has_dense else {}),
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
    """Shard the modules of `model` that the plan names, in place.

    With `sequence_parallel` the stream between modules is sharded along the sequence. With
    `loss_parallel` the loss is computed from each rank's part of the vocabulary; otherwise every
    rank computes it from all logits. Without labels the model returns all logits.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    for pattern, role in plan.items():
        common = _style(role, stream=stream, loss_parallel=loss_parallel)
        for name, module in list(model.named_modules()):
            if _matches(name, pattern) and common is not None:
                has_style = isinstance(module, HasParallelStyle)
                style = module.parallel_style(role, stream=stream) if has_style else common
                # None: parameters are on the meta device, so there is nothing to send
                parallelize_module(module, mesh, style, src_data_rank=None)
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    elsewhere = {*router_biases(model), *(p for module in experts for p in module.parameters())}
    left = [
        name
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) and p not in elsewhere
    ]
    assert not left, f"the tensor plan does not place {', '.join(left)} on the tp axis"
    # to_local() returns a view, and FSDP warns that one might be changed in place. It warns while
    # training, so a filter for this call would not help, and a copy of the stream would cost more
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def _matches(name: str, pattern: str) -> bool:
    """Compare component by component: a star matches one component of a name."""
    return name.count(".") == pattern.count(".") and matches(name, [pattern])


def _style(role: TensorRole, *, stream: Placement, loss_parallel: bool) -> ParallelStyle | None:
    """Return the style of a role, or None if tensor parallelism does not change the module.

    `stream` is the placement of the tensors between modules.
    """
    match role:
        case "vocabulary":
            return VocabParallelEmbedding(stream)
        case "norm":
            return ReplicatedNorm(stream)
        case "head_norm":
            return ReplicatedNorm(Shard(2))  # the matrices before it are sharded by heads
        case "joint_norm":
            return JointNorm()
        case "sinks":
            return ShardedSinks()
        case "gather":
            return GatherInput(stream)
        case "column":
            return ColwiseParallel()
        case "gathered_column":
            return ColwiseParallel(input_layouts=stream)
        case "copied":
            return ReplicatedLinear(stream)
        case "shared":
            return GatherOutput(stream)
        case "row":
            return RowwiseParallel(output_layouts=stream)
        case "head":
            return VocabParallelHead(stream, loss_parallel=loss_parallel)
        case "route":
            return None if stream == Shard(1) else LocalRoute()
        case "gate":
            return ReplicatedGate()
        case "experts":
            return None


def to_dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Wrap the ranks' local tensors as one DTensor, without communication."""
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def replicate_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module's own parameters on the tp axis.

    Each rank's gradient covers its own tokens or heads, so it is Partial over tp. FSDP2 reduces it
    to the parameter's Replicate before its own reduction.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(to_dtensor(parameter, mesh, Replicate())))


def shard_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> None:
    """Place a module's own parameters by name. A name that the module lacks is skipped."""
    own = dict(module.named_parameters(recurse=False))
    for name in [name for name in placements if name in own]:
        # None: parameters are on the meta device, so there is nothing to send
        sharded = distribute_tensor(own[name], mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded))


class StreamStyle(ParallelStyle):
    """Base class of the styles that depend on the placement of the tensors between modules."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream


class ReplicatedNorm(StreamStyle):
    """Replicates a module's weights. The module's input and output keep their placement."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)
        module.register_forward_pre_hook(
            lambda _, inputs: to_dtensor(inputs[0], device_mesh, self.stream)
        )
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class JointNorm(ParallelStyle):
    """Replicates the weights of a norm of all heads. Each rank has the heads of its own columns.

    The heads are gathered, so every rank computes the same norm and complete gradients.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)
        sharded = Shard(2)
        module.register_forward_pre_hook(
            lambda _, inputs: to_dtensor(inputs[0], device_mesh, sharded).redistribute(
                placements=[Replicate()]
            )
        )
        module.register_forward_hook(
            lambda _, inputs, output: output.redistribute(placements=[sharded]).to_local()
        )
        return module


class ShardedSinks(ParallelStyle):
    """Shards a module that returns a number per head by heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard_parameters(module, device_mesh, {"weight": Shard(0)})
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class GatherInput(StreamStyle):
    """Gathers the first argument of a module that contains several matrices.

    The gradients of all its matrices are summed before they are scattered. Further arguments, such
    as the rotary embedding and the cache, are passed unchanged.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
            x, *arguments = inputs
            assert isinstance(x, Tensor)
            x_BSC = to_dtensor(x, device_mesh, self.stream)
            return x_BSC.redistribute(placements=[Replicate()]), *arguments

        module.register_forward_pre_hook(gather)
        return module


class GatherOutput(StreamStyle):
    """Gathers the output of a module without weights, because the heads of every rank use it.

    Each rank has the gradient of its own heads, and the sum over ranks is the gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: object, x_BSD: Tensor) -> Tensor:
            x = to_dtensor(x_BSD, device_mesh, self.stream).redistribute(placements=[Replicate()])
            return x.to_local(grad_placements=[Partial()])

        module.register_forward_hook(gather)
        return module


class ReplicatedLinear(StreamStyle):
    """Replicates a linear layer's weights. Each rank multiplies the tokens that it has."""

    def __init__(self, stream: Placement) -> None:
        super().__init__(stream)
        self.tokens = Shard(0) if stream == Shard(1) else stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)
        multiply: Callable[[Tensor], DTensor] = module.forward

        def on_flat_tokens(x_BSC: Tensor) -> Tensor:
            # flat: DTensor would gather a sharded sequence before the product
            out_TD = multiply(to_dtensor(x_BSC.flatten(0, 1), device_mesh, self.tokens))
            return out_TD.to_local().unflatten(0, x_BSC.shape[:2])

        module.forward = on_flat_tokens
        return module


class ReplicatedGate(ParallelStyle):
    """Replicates a router's weights. Each rank multiplies its own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module, device_mesh)
        module.product = partial(_local_product, product=module.product)
        return module


def _local_product(x_BSC: Tensor, *weights: DTensor, product: Callable[..., Tensor]) -> Tensor:
    # local tensors: a DTensor would need the same number of tokens on every rank
    return product(x_BSC, *(w.to_local(grad_placements=[Partial()]) for w in weights))


class LocalRoute(ParallelStyle):
    """Makes each rank route only its own part of a replicated sequence to experts."""

    def __init__(self) -> None:
        super().__init__()
        self._routes: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MoELayer)
        route: Callable[..., Tensor] = type(module).route

        def route_part(module: nn.Module, x_BSC: Tensor) -> Tensor:
            replicated = to_dtensor(x_BSC, device_mesh, Replicate())
            out = route(module, replicated.redistribute(placements=[Shard(1)]).to_local())
            stride = torch.empty(x_BSC.shape, device="meta").stride()
            gathered = DTensor.from_local(
                out, device_mesh, [Shard(1)], run_check=False, shape=x_BSC.shape, stride=stride
            )  # shape and stride, because the parts may differ in length
            return gathered.redistribute(placements=[Replicate()]).to_local()

        # one function for all layers, so that their blocks share one compiled graph
        module.route = MethodType(self._routes.setdefault(route, route_part), module)
        return module


class VocabParallelHead(GatherInput):
    """Shards the output head, if it has a weight of its own, and computes logits and loss."""

    def __init__(self, stream: Placement, *, loss_parallel: bool) -> None:
        super().__init__(stream)
        self.loss_parallel = loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = module.named_parameters(recurse=False)
        shard_parameters(module, device_mesh, {name: Shard(0) for name, _ in own})
        super()._apply(module, device_mesh)
        loss: HeadLoss = module.loss

        def local_loss(x_BSC: DTensor, weight_VC: DTensor, labels_BS: Tensor) -> Tensor:
            if not self.loss_parallel:  # every rank computes the same loss, and complete gradients
                return loss(x_BSC.to_local(), weight_VC.full_tensor(), labels_BS)
            # the vocabulary of each rank contributes to the gradient of x
            x = x_BSC.to_local(grad_placements=[Partial()])
            return loss(x, weight_VC.to_local(), labels_BS)

        def gather_logits(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
            # a loss is a plain tensor already
            return output.full_tensor() if isinstance(output, DTensor) else output

        module.register_forward_hook(gather_logits)
        module.loss = local_loss
        return module


class VocabParallelEmbedding(StreamStyle):
    """Shards an embedding by rows. Its output has the placement of the stream.

    An embedding that does more than look up rows is left to DTensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not _only_looks_up(module):
            general = RowwiseParallel(input_layouts=Replicate(), output_layouts=self.stream)
            general.src_data_rank = None
            return general._apply(module, device_mesh)
        shard_parameters(module, device_mesh, {"weight": Shard(0)})
        module.forward = partial(_look_up, module, mesh=device_mesh, stream=self.stream)
        return module


def _only_looks_up(module: nn.Module) -> bool:
    """Return whether the output is rows of the table, and the gradient their plain sum."""
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
    """Return the rows of all tokens, with the placement `stream`."""
    weight = module.weight  # read in every forward, because FSDP replaces it by the gathered one
    assert isinstance(weight, DTensor)
    rows_RC = weight.to_local()
    index_BS = tokens_BS - mesh.get_local_rank() * len(rows_RC)
    elsewhere_BS = (index_BS < 0) | (index_BS >= len(rows_RC))
    x_BSC = F.embedding(index_BS.masked_fill_(elsewhere_BS, 0), rows_RC)
    # in backward too, row 0 gets zeros for the tokens of other ranks
    x_BSC = x_BSC.masked_fill_(elsewhere_BS.unsqueeze(-1), 0)
    summed = to_dtensor(x_BSC, mesh, Partial()).redistribute(placements=[stream], async_op=True)
    return summed.to_local()


def low_rank(x: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """Return B A x."""
    return F.linear(F.linear(x, a_RI), b_OR)


def adapter_style(role: TensorRole, *, stream: Placement) -> ParallelStyle:
    """Return the style of a linear layer with an adapter.

    `stream` is the placement of the tensors between modules.
    """
    if role in ("column", "gathered_column"):
        return _ColwiseAdapter(input_layouts=stream if role == "gathered_column" else None)
    if role == "copied":
        return ReplicatedLinear(stream)
    assert role == "row", f"a linear layer is sharded by columns or rows, not as a {role}"
    return _RowwiseAdapter(output_layouts=stream)


class _ColwiseAdapter(ColwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        placements |= {"lora_a": Replicate(), "lora_b": Shard(0)}
        shard_parameters(module, device_mesh, placements)
        module.low_rank = partial(_local_low_rank, result=Shard(-1))


class _RowwiseAdapter(RowwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
        placements |= {"lora_a": Shard(1), "lora_b": Replicate()}
        shard_parameters(module, device_mesh, placements)
        module.low_rank = partial(_local_low_rank, result=Partial())


def _local_low_rank(x: DTensor, a_RI: DTensor, b_OR: DTensor, *, result: Placement) -> DTensor:
    """Multiply the local tensors. `result` is the placement of the product."""
    product = low_rank(*map(_to_local, (x, a_RI, b_OR)))
    return to_dtensor(product, x.device_mesh, result)


def _to_local(tensor: DTensor) -> Tensor:
    """Return the local tensor. The gradient of a replicated one is Partial."""
    [placement] = tensor.placements
    gradient = Partial() if placement.is_replicate() else placement
    return tensor.to_local(grad_placements=[gradient])
