"""Small tensors are written and read as torch.save and torch.load do; these are the oracle."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.checkpoint.test_stored import bits, saved
from torchtitan.checkpoint.load import read_tensors
from torchtitan.checkpoint.storage import TensorPlanner, TensorWriter
from torchtitan.checkpoint.stored import LARGE
from torchtitan.checkpoint.templates import Templates

DTYPES = [
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "bool"),
]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=draws).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_torch_save(dtype: str) -> None:
    templates = Templates()
    for shape in ((), (5,), (1, 3), (3, 1), (64, 33), (0,), (2, 0)):
        for seed in range(3):
            tensor = drawn(*shape, dtype=dtype, seed=seed)
            with patch("torch.save", wraps=torch.save) as through_torch:
                content = templates.save(tensor)
            assert content == saved(tensor)
            assert through_torch.called == (seed == 0 or 0 in shape)


def test_tensors_that_lie_otherwise_go_through_torch() -> None:
    templates = Templates()
    for tensor in (
        drawn(3, 3),
        drawn(3, 3).T,
        drawn(4, 3)[1:],
        drawn(3, dtype="complex64"),
        drawn(3, dtype="complex64").conj(),
        torch._neg_view(drawn(3)),
    ):
        templates.save(tensor.clone())
        assert templates.save(tensor) == saved(tensor)


def load(templates: Templates, content: bytes, *, of: Tensor) -> Any:
    file = io.BufferedReader(io.BytesIO(b"before" + content))  # type: ignore[arg-type]
    place = slice(6, 6 + len(content))
    return templates.load(file, place, dtype=of.dtype, shape=of.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tensors_are_those_of_torch_load(dtype: str) -> None:
    templates = Templates()
    for shape in ((), (5,), (1, 3), (3, 1), (64, 33), (0,)):
        for seed in range(3):
            tensor = drawn(*shape, dtype=dtype, seed=seed)
            with patch("torch.load", wraps=torch.load) as through_torch:
                found = load(templates, saved(tensor), of=tensor)
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(bits(found), bits(tensor))
            assert through_torch.called == (seed == 0 or 0 in shape)


def test_archives_that_differ_elsewhere_go_through_torch() -> None:
    """Whatever byte changes, the result is that of torch.load, or an error."""
    templates, tensor = Templates(), drawn(2, 3, dtype="int32", seed=1)
    load(templates, saved(drawn(2, 3, dtype="int32")), of=tensor)
    content = saved(tensor)
    for index in range(0, len(content), 3):
        changed = content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]
        with patch("torch.load", wraps=torch.load) as through_torch:
            try:
                found = load(templates, changed, of=tensor)
            except Exception:  # noqa: BLE001 - of any type
                continue
        assert through_torch.called
        expected = torch.load(io.BytesIO(changed), map_location="cpu", weights_only=True)
        assert torch.equal(found, expected)
    transposed = drawn(3, 2, dtype="int32").T
    assert torch.equal(load(templates, saved(transposed), of=tensor), transposed)


def test_only_what_is_expected_becomes_a_template() -> None:
    templates, tensor = Templates(), drawn(2, 3, dtype="int32")
    for expected in (drawn(2, 3), drawn(6, dtype="int32"), tensor):
        for _ in range(2):  # the second would be read by a template of the first
            found = load(templates, saved(tensor), of=expected)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {f"{dtype}.{n}": drawn(2, n, dtype=dtype, seed=n) for dtype in DTYPES for n in (3, 4)}
    tensors |= {f"step.{n}": torch.tensor(float(n)) for n in range(20)}
    tensors["large"] = drawn(LARGE // 4)
    tensors["a.view"] = drawn(8, 4)[2:4]
    tensors["weight"] = torch.nn.Parameter(drawn(7))
    tensors["b.transposed"] = drawn(3, 5).T
    writer, planner = TensorWriter(tmp_path / "model"), TensorPlanner(tensors)
    dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    theirs = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "model"), no_dist=True)
    ours = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_tensors(tmp_path, "model", into=ours, group=None)
    for name, tensor in tensors.items():
        assert torch.equal(bits(theirs[name]), bits(tensor)), name
        assert torch.equal(bits(ours[name]), bits(tensor)), name
    assert (tmp_path / "model" / "__0_0.distcp").stat().st_size < 2 * LARGE  # no view's storage
