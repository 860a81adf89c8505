"""A start is short: a run imports no package that it does not use, nor searches what it imports.

Packages that a plain run has no need of, by what they would be needed for. The optimizer of torch
itself imports its compiler, so that one is no use to look for.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

train = import_module("torchtitan.train")  # `from torchtitan import` gives the function

UNUSED = {
    "wandb": "metrics.enable_wandb",
    "tensorboard": "metrics.enable_tensorboard",
    "torch.utils.tensorboard": "metrics.enable_tensorboard",
    "matplotlib": "scripts",
    "rich.progress": "a terminal",
    "transformers": "tests",
    "pandas": "nothing",
    "tokenizers": "a tokenizer.json",
    "tiktoken": "a tiktoken file",
    "torchvision": "nothing",
}
RUN = """
import sys
from contextlib import ExitStack
from torchtitan.train import main
with ExitStack() as cleanup:
    exit_code = main(sys.argv[1:], cleanup=cleanup)
print(exit_code, *sys.modules)
"""


def imported(folder: Path) -> set[str]:
    job = {
        "job.dump_folder": folder,
        "model.flavor": "tiny",
        "model.tokenizer_path": "byte",
        "training.dataset": "synthetic",
        "training.seq_len": 16,
        "training.local_batch_size": 2,
        "training.steps": 1,
    }
    words = [f"--{name}={value}" for name, value in job.items()]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=False
    )
    exit_code, *modules = done.stdout.split()
    assert exit_code == "0", done.stderr
    return set(modules)


def test_what_needs_no_torch_imports_none() -> None:
    """A second of start for each process that prepares data, and for each look at a setting."""
    names = ("data.prepare", "data.holdout", "tools.config", "tools.hang")
    modules = ", ".join(f"torchtitan.{name}" for name in names)
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_a_plain_run_imports_what_it_uses(tmp_path: Path) -> None:
    modules = imported(tmp_path)
    assert "torchtitan.trainer" in modules
    assert sorted(modules & set(UNUSED)) == []


def test_garbage_is_looked_for_again_once_all_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not in what is imported."""
    seen = []

    def main(argv: object, *, cleanup: object) -> int:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return 0

    monkeypatch.setattr(train, "main", main)
    monkeypatch.setattr(train, "leave", lambda exit_code: seen.append(exit_code))
    assert gc.isenabled()  # to import the module has no effect, to run it does
    gc.disable()
    try:
        train.main_and_exit([])
    finally:
        gc.enable()
        gc.unfreeze()
    assert seen == [(True, True), 0]
