"""A start is short: a run imports no package that it does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.jobs import write_job

NO_TORCH = ("", ".data.prepare", ".data.holdout", ".tools.config", ".tools.hang")
UNUSED = {
    "wandb",
    "tensorboard",
    "torch.utils.tensorboard",
    "rich.progress",
    "transformers",
    "pandas",
    "tokenizers",
    "tiktoken",
    "torchvision",
}
RUN = """
import sys
from contextlib import ExitStack
from torchtitan.train import main
with ExitStack() as cleanup:
    exit_code = main(sys.argv[1:], cleanup=cleanup)
print(exit_code, *sys.modules)
"""


def test_what_needs_no_torch_imports_none() -> None:
    modules = ", ".join(f"torchtitan{name}" for name in NO_TORCH)
    script = f"import sys, {modules}; torchtitan.__version__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_a_plain_run_imports_what_it_uses(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, *write_job(tmp_path), "--training.steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    exit_code, *modules = done.stdout.split()
    assert exit_code == "0", done.stderr
    assert "torchtitan.trainer" in modules
    assert not UNUSED.intersection(modules)
