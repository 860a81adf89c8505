"""Does `compare --bisect` name the right place? `python -m tests.tools.audit.bisect_campaign`.

Fourteen faults in layouts of FSDP, TP, CP, PP and EP, each to be found at its module and direction;
eleven layouts without one, where nothing may be found; and what it costs beside the same two
trainings without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.tools.audit.faults import FAULT, FAULTS, MOE
from torchtitan.tools.compare.bisect import KINDS

ROOT = Path(__file__).parents[3]
JOB = str(ROOT / "train_configs" / "compare_layouts.toml")
CLEAN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fsdp2", ()),
    ("ddp2", ()),
    ("hsdp2x2", ()),
    ("tp2", ()),
    ("cp2", ()),
    ("pp2", ()),
    ("pp2 --parallelism.pipeline_parallel_schedule=Interleaved1F1B", ()),
    ("fsdp2,tp2", ()),
    ("cp2,tp2", ()),
    ("pp2,fsdp2", ()),
    ("fsdp2,ep2", MOE),
)


def bisect(layout: str, *options: str, fault: str | None = None) -> tuple[int, str]:
    """Run the command; return its code and what it printed."""
    words = [
        layout if fault is None else f"{layout} --training.callbacks=tests.tools.audit.faults:Plant"
    ]
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torchtitan", "compare", "--bisect", JOB, "single"),
            *words,
            *options,
        ],
        env={**os.environ, FAULT: fault or "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def check_fault(name: str) -> str:
    """Let a fault be found; return what was said of it."""
    _, layout, options, (kind, place) = FAULTS[name]
    code, said = bisect(layout, *options, fault=name)
    line = next((line for line in said.splitlines() if KINDS[kind] in line), said)
    assert code == 1, f"{name}: not found\n{said}"
    assert line.startswith(f"{place}: {KINDS[kind]}"), f"{name}: expected {kind} {place}\n{said}"
    return line


def check_clean(layout: str, options: tuple[str, ...]) -> str:
    """Let nothing be found in a layout; return the line with the largest difference."""
    code, said = bisect(layout, *options)
    assert code == 0, f"{layout}: a false alarm\n{said}"
    gaps = [float(line.split()[-1]) for line in said.splitlines() if "at most" in line]
    return f"{max(gaps):.2g}"


def main() -> None:
    """Run all, and print a line for each."""
    began = time.monotonic()
    for name in FAULTS:
        sys.stdout.write(f"{name}: {check_fault(name)}\n")
        sys.stdout.flush()
    for layout, options in CLEAN:
        sys.stdout.write(f"{layout}: nothing, by at most {check_clean(layout, options)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
