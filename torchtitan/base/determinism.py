"""Determinism: runs that are equal bit for bit.

Equal seeds are not enough. An operator whose threads add numbers in the order they happen to finish
returns other digits each time. torch knows these operators and refuses them on request. cuBLAS and
cuDNN choose algorithms on their own and are configured by an environment variable and by flags. A
setting that the user made is never changed silently: a contradicting one is refused.
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
"""Workspaces of fixed size, which cuBLAS documents as reproducible."""


def set_determinism(
    *,
    seed: int,
    deterministic: bool,
    warn_only: bool,
    device_type: str,
    environ: MutableMapping[str, str],
) -> None:
    """Seed the random generators and restrict torch to deterministic operators.

    Call this before anything runs on the device, because cuBLAS reads the environment once.

    `warn_only` warns of other operators instead of raising an error; `environ` may be changed.
    Raises ConfigError if a setting of the process contradicts `deterministic`.
    """
    if deterministic and device_type == "cuda":
        benchmark, cublas = torch.backends.cudnn.benchmark, environ.setdefault(CUBLAS, ":4096:8")
        if benchmark or cublas not in CUBLAS_REPRODUCIBLE:
            raise ConfigError(
                f"debug.deterministic needs torch.backends.cudnn.benchmark = False, got "
                f"{benchmark}, and {CUBLAS} to be {' or '.join(CUBLAS_REPRODUCIBLE)} in the "
                f"environment, got '{cublas}'"
            )
        torch.backends.cudnn.deterministic = True
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def keep_process_settings() -> Iterator[None]:
    """Restore on exit the process settings that a run changes: environment, warning filters, random
    generators and determinism."""
    environ, cudnn = dict(os.environ), torch.backends.cudnn.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # asking an unused GPU for the current device would allocate memory on it
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
