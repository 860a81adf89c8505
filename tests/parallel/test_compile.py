"""What is compiled, how often, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
import torch._inductor.config
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from tests.parallel.test_activation import gradients, tiny
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.interface import Documents
from torchtitan.parallel.activation import apply_activation_checkpointing
from torchtitan.parallel.compile import (
    apply_compile,
)

pytestmark = pytest.mark.slow


@dataclass
class Counter:
    """A compiler that makes nothing of a graph, but counts how often there is one and it runs."""

    graphs: int = 0
    calls: int = 0

    def __call__(
        self, graph: torch.fx.GraphModule, examples: list[Tensor]
    ) -> Callable[..., object]:
        self.graphs += 1

        def run(*args: Any) -> object:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(
    backend: str | Counter, *, memory_budget: float = 1.0, keeps_operators: bool = False
) -> Decoder:
    model = tiny()
    apply_compile(
        model,
        backend=backend,  # type: ignore[arg-type]
        memory_budget=memory_budget,
        opaque_attention=False,
        sequence_comes_async=False,
        keeps_operators=keeps_operators,
    )
    return model


def assert_equal_to_rounding(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    # no bits: compiled blocks rotate by real numbers, others by complex ones (`models/rope.py`)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-7)


def test_gradients_and_names_stay_and_all_blocks_share_one_graph() -> None:
    counter = Counter()
    model, plain = compiled(counter), tiny()
    got, expected = gradients(model), gradients(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(got) == list(expected)
    assert_equal_to_rounding(got, expected)
    assert (counter.graphs, counter.calls) == (1, len(model.layers))


class Doubling(Block):
    """A block with a forward of its own."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(2.0 * x, *others)


def mixed() -> Decoder:
    """A model of blocks of two classes, one block's forward replaced on the instance."""
    model = tiny(num_layers=5)
    for name in ("1", "3"):
        model.layers[name].__class__ = Doubling
    replaced = model.layers["4"].forward
    model.layers["4"].forward = lambda x, *others: replaced(3.0 * x, *others)
    return model


def test_each_block_runs_its_own_forward() -> None:
    counter, model = Counter(), mixed()
    apply_compile(
        model,
        backend=counter,  # type: ignore[arg-type]
        memory_budget=1.0,
        opaque_attention=False,
        sequence_comes_async=False,
    )
    apply_activation_checkpointing(model, mode="selective", option="2")
    got, expected = gradients(model), gradients(mixed())
    assert list(got) == list(expected)
    assert_equal_to_rounding(got, expected)
    assert (counter.graphs, counter.calls) == (3, 5 + 3)
    others = gradients(tiny(num_layers=5))
    assert not any(torch.equal(got[name], others[name]) for name in got if "attention.wq" in name)


@pytest.mark.parametrize(
    ("mode", "option", "recomputed"), [("full", "1", 2), ("selective", "2", 1)]
)
def test_a_recomputed_block_runs_the_same_graph_again(
    mode: Any, option: str, recomputed: int
) -> None:
    counter = Counter()
    model = compiled(counter)
    apply_activation_checkpointing(model, mode=mode, option=option)
    got, expected = gradients(model), gradients(tiny())
    assert_equal_to_rounding(got, expected)
    assert (counter.graphs, counter.calls) == (1, len(model.layers) + recomputed)


def kept_and_gradients(model: Decoder) -> tuple[int, dict[str, Tensor]]:
    """The bytes that forward saves for backward beside the weights, and the gradients."""
    own = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = gradients(model)
    return sum(saved.values()), found


def test_by_operator_a_graph_keeps_less_and_all_blocks_share_it() -> None:
    kept, found = {}, {}
    for keeps_operators in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = compiled("aot_eager_decomp_partition", keeps_operators=keeps_operators)
        kept[keeps_operators], found[keeps_operators] = kept_and_gradients(model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert kept[True] < kept[False]
    assert list(found[True]) == list(found[False])
    assert_equal_to_rounding(found[True], found[False])
    assert_equal_to_rounding(found[True], gradients(tiny()))


def test_each_shape_is_compiled_once_and_too_many_are_an_error() -> None:
    counter = Counter()
    model, graphs = compiled(counter), []
    for num_samples, length in [(2, 12), (2, 12), (4, 12), (3, 20), (4, 12), (2, 12)]:
        model(torch.ones(num_samples, length, dtype=torch.int64)).sum().backward()
        graphs.append(counter.graphs)
    assert graphs == [1, 1, 2, 3, 3, 3]
    with torch.no_grad():  # as evaluation
        for _ in range(2):
            model(torch.ones(2, 12, dtype=torch.int64))
    assert counter.graphs == 4
    for length in range(30, 34):
        model(torch.ones(2, length, dtype=torch.int64))
    with pytest.raises(FailOnRecompileLimitHit):
        model(torch.ones(2, 34, dtype=torch.int64))


def test_opaque_attention_gets_the_documents_of_each_batch_and_compiles_nothing_for_them() -> None:
    given: list[Documents | None] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        given.append(documents)
        # no compiler could follow
        return q * float(q.detach().sum() * 0 + 1)

    counter = Counter()
    model = tiny()
    for block in model.layers.values():
        block.attention.attend = attend
    apply_compile(
        model,
        backend=counter,  # type: ignore[arg-type]
        memory_budget=1.0,
        opaque_attention=True,
        sequence_comes_async=False,
    )
    batches = [None, *(Documents(((n, 12 - n), (12,))) for n in (3, 5, 7))]
    tokens = torch.arange(24).view(2, 12)
    graphs = []
    for documents in batches[1:]:
        model(tokens, documents=documents)
        graphs.append(counter.graphs)
    # of block and attention what stands before and behind
    assert graphs == [4, 4, 4]
    assert given == [d for d in batches[1:] for _ in model.layers]
