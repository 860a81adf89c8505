"""What makes two runs equal bit for bit.

Equal seeds are half of it. The other half is the order of additions: an operator whose threads add
in the order in which they happen to finish gives other digits each time. torch knows which of its
operators do so and refuses them on request; cuBLAS and cuDNN, which choose algorithms by
themselves, are told by a variable of the environment and by flags.

What the user has set is never flipped quietly. A setting that was not given is made, one that
contradicts is refused, so that what a run is started with is what it runs with.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch

from torchtitan.base.errors import ConfigError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_REPRODUCIBLE = (":4096:8", ":16:8")
"""Workspaces of fixed size, as cuBLAS documents for reproducible results."""


def set_determinism(
    *,
    seed: int,
    deterministic: bool,
    warn_only: bool,
    device_type: str,
    environ: MutableMapping[str, str],
) -> None:
    """Seed the generators, and hold operators to reproducible ones where asked.

    Call it before anything runs on the device: cuBLAS reads `environ` once.

    Raises:
        ConfigError: The process was started with a setting that contradicts `deterministic`.
    """
    if deterministic and device_type == "cuda":
        _prepare_cuda(environ)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _prepare_cuda(environ: MutableMapping[str, str]) -> None:
    if torch.backends.cudnn.benchmark:
        raise ConfigError(
            "[debug] deterministic needs torch.backends.cudnn.benchmark = False, got True: it "
            "picks algorithms by measured time; leave it off, or remove debug.deterministic"
        )
    given = environ.setdefault(CUBLAS, CUBLAS_REPRODUCIBLE[0])
    if given not in CUBLAS_REPRODUCIBLE:
        raise ConfigError(
            f"[debug] deterministic needs {CUBLAS} to be {' or '.join(CUBLAS_REPRODUCIBLE)} in the "
            f"environment, got '{given}'; unset it, or remove debug.deterministic"
        )
    torch.backends.cudnn.deterministic = True


@contextmanager
def keep_process_settings() -> Iterator[None]:
    """Restore on exit what a run changes in this process: environment, filters of warnings, random
    generators, determinism."""
    environ, cudnn = dict(os.environ), torch.backends.cudnn.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # asking for the current GPU of a process that has used none would take memory on the first one
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            torch.backends.cudnn.deterministic = cudnn
            for gpu in gpus:
                torch.cuda.set_device(gpu)
            for name in os.environ.keys() - environ.keys():
                del os.environ[name]
            os.environ.update(environ)
