"""Settings that contradict bitwise equal runs are refused, missing ones made; on a CPU too, since
the checks for CUDA touch nothing but flags and the environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.naming import naming
from torchtitan.base.determinism import set_determinism
from torchtitan.base.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    cudnn, state = torch.backends.cudnn, torch.get_rng_state()
    flags = (cudnn.benchmark, cudnn.deterministic)
    yield
    cudnn.benchmark, cudnn.deterministic = flags
    torch.set_rng_state(state)
    torch.use_deterministic_algorithms(False)


def prepare(
    environ: dict[str, str], *, deterministic: bool = True, device_type: str = "cuda"
) -> None:
    set_determinism(
        seed=7,
        deterministic=deterministic,
        warn_only=False,
        device_type=device_type,
        environ=environ,
    )


def test_what_is_missing_is_set() -> None:
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert torch.backends.cudnn.deterministic
    assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="deterministic"):  # torch's word
        torch.ones(3).put_(torch.tensor([1]), torch.ones(1), accumulate=False)


def test_what_contradicts_is_refused_and_left() -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}
    with pytest.raises(ConfigError, match=naming("CUBLAS_WORKSPACE_CONFIG", ":16:8", "':4096:2'")):
        prepare(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}
    assert not torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = True
    with pytest.raises(ConfigError, match=naming("torch.backends.cudnn.benchmark", True)):
        prepare({})


def test_the_seed() -> None:
    prepare({}, deterministic=False)
    drawn = torch.rand(1)
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(7))
