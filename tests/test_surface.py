"""What users and their scripts see of the trainer, compared with `tests/surface.json`.

Settings (names, types and defaults in `--help`), exit codes, files of a run's folder, keys of
metrics.jsonl in their order, TensorBoard tags, keys of a checkpoint's JSON files, and names, types
and shapes of its tensors, for a dense model on two ranks, experts and LoRA. All is observed through
the commands and the files that they leave. Record an intended change by

    python -m tests.test_surface

The exit code after a second signal is in test_signals.py, those of several ranks in test_train.py.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.golden.jobs import ADAPTERS, DENSE, EXPERTS, write_data
from tests import warm_python

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("surface.json")
WIDE = "100000"  # columns: --help has the text of a setting in one line
OPTION = re.compile(r"^  --(\S+)(.*(?:\n {4}.*)*)", re.MULTILINE)
FACTS = r"\(([^()]*?; (?:default: .*?|required))(?:; .*?)?\)"  # (int > 0; default: 10; needs ...)
FACTS_OF_KEY = re.compile(rf"(\w+): .*?{FACTS}")  # in a table that a setting takes

JOBS = {
    # all that a run can write
    "dense": (
        2,
        f"{DENSE} training.steps=4 checkpoint.last_save_in_hf=true "
        "profiling.enable_profiling=true profiling.profile_freq=4 profiling.profiler_warmup=1",
    ),
    "experts": (1, f"{EXPERTS} training.steps=2 router.log_layers=true"),
    "lora": (1, f"{ADAPTERS} training.steps=2"),
}
UNKNOWN, NOT_FINITE = "training.stepz=1", "optimizer.lr=1e30"
LONG = "training.steps=1000000 lr_scheduler.total_steps=1000000"
DEADLINE = f"{LONG} job.time_limit_seconds=1"
ENDS = {
    "help": (1, "help"),
    "done": (1, "job.dump_folder=done training.steps=1"),
    "nothing left to do": (1, "job.dump_folder=done training.steps=1"),
    "a setting that is unknown": (1, UNKNOWN),
    "a file that is missing": (1, "training.dataset_path=nowhere.jsonl"),
    "a loss that is not finite": (1, f"job.dump_folder=nan {NOT_FINITE}"),
    "the deadline": (1, f"job.dump_folder=long {DEADLINE}"),
}


def train(settings: str, *, folder: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Train as a user would, on the base job of the goldens with other settings."""
    launcher = ["-m", "torchtitan.launch", "--standalone", f"--nproc_per_node={ranks}"]
    words = ["help"] if settings == "help" else ["job.config_file=base.toml", *settings.split()]
    return subprocess.run(
        [
            *(sys.executable, *(launcher if ranks > 1 else []), "-m", "torchtitan.train"),
            *(f"--{word}" for word in words),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": WIDE},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def settings_in_help(folder: Path) -> dict[str, str]:
    found = {}
    for option in OPTION.finditer(train("help", folder=folder).stdout):
        name, text = option.groups()
        facts = re.search(FACTS, text)
        assert facts is not None, f"--{name} must tell type and default, got {text}"
        found[name] = facts[1]
        for key in FACTS_OF_KEY.finditer(text, facts.end()):
            found[f"{name}[].{key[1]}"] = key[2]
    return found


def exit_codes(folder: Path) -> dict[str, int]:
    write_data(folder)
    return {
        name: train(settings, ranks=ranks, folder=folder).returncode
        for name, (ranks, settings) in ENDS.items()
    }


def surface_of_run(kind: str, folder: Path) -> dict[str, Any]:
    write_data(folder)
    ranks, settings = JOBS[kind]
    settings = f"job.dump_folder=run metrics.enable_tensorboard=true {settings}"
    done = train(settings, ranks=ranks, folder=folder)
    assert done.returncode == 0, done.stderr
    run = folder / "run"
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(next(run.rglob("events.out.tfevents.*")).parent)).Reload()
    [step] = (run / "checkpoint").glob("step-*")
    return {
        "files": [re.sub(r"(tfevents)\..*", r"\1.*", name) for name in files],
        "first row": list(rows[0]),
        "second row": list(rows[1]),
        "tensorboard": sorted(
            tag for kind in ("scalars", "tensors") for tag in events.Tags()[kind]
        ),
        "json": {
            str(path.relative_to(step)): sorted(json.loads(path.read_text()))
            for path in sorted(step.rglob("*.json"))
            if "hf" not in path.parts
        },
        "tensors": {path.parent.name: tensors(path.parent) for path in step.rglob(".metadata")},
    }


def tensors(component: Path) -> dict[str, str]:
    stored = FileSystemReader(component).read_metadata().state_dict_metadata
    return {
        name: f"{about.properties.dtype} {list(about.size)}".removeprefix("torch.")
        if isinstance(about, TensorStorageMetadata)
        else "bytes"
        for name, about in sorted(stored.items())
    }


def surface(section: str, folder: Path) -> Any:
    if section == "settings":
        return settings_in_help(folder)
    return exit_codes(folder) if section == "exit codes" else surface_of_run(section, folder)


SECTIONS = ("settings", "exit codes", *JOBS)


@pytest.mark.promise("surface")
@pytest.mark.slow(gate=["settings", "lora"])
@pytest.mark.parametrize("section", SECTIONS)
def test_the_surface_is_what_was_recorded(section: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))[section]
    texts = (
        json.dumps(value, indent=1).splitlines() for value in (recorded, surface(section, tmp_path))
    )
    changes = list(difflib.unified_diff(*texts, "recorded", "now", lineterm="", n=2))
    assert not changes, "\n".join(["", *changes, "meant so? python -m tests.test_surface"])


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        python, server = warm_python.start(Path(temporary) / "python")
        sys.executable = str(python)
        for section in SECTIONS:
            folder = Path(temporary) / section
            folder.mkdir()
            found[section] = surface(section, folder)
        server.communicate()  # closes its input, which ends it
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
