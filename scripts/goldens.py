"""Compare the numbers that this code computes with recorded ones, bit for bit.

    python scripts/goldens.py check                  # all jobs
    python scripts/goldens.py check tp2 resume_fsdp2
    python scripts/goldens.py make tp2               # record again: explain it in the commit

`tests/goldens/goldens.json` holds, for each job of `golden/jobs.py`, every row of metrics.jsonl,
the data position, and hashes of the last checkpoint's weights, optimizer and random generators.
Tests compare layouts with each other, to a tolerance; this shows that a change of the code, meant
to change no number, changed none. It uses only settings and files, as users do, so that it survives
changes of the code.

The jobs run with the oldest CPU instructions (see `golden/ranks.py`), which all x86-64 machines
share. With another version of torch or of libc, or on another processor, other bits may be right
too: then figures are compared to a relative 1e-5, hashes are not compared, and the first line
reports it.

Exit code 0 if all numbers are equal, 1 if not or if a job fails, 2 with an invalid option.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts.golden.jobs import JOBS, write_data
from scripts.golden.ranks import ROOT, RunError, fork, pin_instructions, preload, run_job, wait_for
from scripts.golden.record import about_machine, differences, read_record, why_no_bits

GOLDENS = ROOT / "tests" / "goldens" / "goldens.json"
NUM_WORKERS = 2
SECONDS_FOR_ALL = 900
SHOWN = 6


def make(names: Sequence[str], *, folder: Path) -> bool:
    """Record the jobs; those that are not named keep their records."""
    goldens = read_goldens() if GOLDENS.is_file() else {"jobs": {}}
    if not run_jobs(names, against=None, folder=folder):
        return False
    made = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names}
    jobs = goldens["jobs"] | made
    goldens = {
        "made_with": about_machine(),
        "jobs": {name: jobs[name] for name in JOBS if name in jobs},
    }
    GOLDENS.write_text(json.dumps(goldens, indent=1) + "\n", encoding="utf-8")
    return True


def check(names: Sequence[str], *, folder: Path) -> bool:
    """Run the jobs again and compare."""
    goldens = read_goldens()
    if unlike := why_no_bits(about_machine(), goldens["made_with"]):
        print(f"this machine has {unlike}: figures are compared to a relative 1e-5, no hashes")
    return run_jobs(names, against=goldens, folder=folder)


def read_goldens() -> dict[str, Any]:
    """Return the machine and the jobs that were recorded."""
    goldens: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))
    return goldens


def run_jobs(names: Sequence[str], *, against: Mapping[str, Any] | None, folder: Path) -> bool:
    """Run jobs, several at a time, print a line for each, and return whether all went well.

    Each record is written to `folder`/NAME.json. A job that differs from its record has failed.
    """
    write_data(folder)
    started = time.monotonic()
    workers = [
        fork(partial(_work, names, against=against, folder=folder)) for _ in range(NUM_WORKERS)
    ]
    wait_for(workers, seconds=SECONDS_FOR_ALL)
    num_bad = len(list(folder.glob("*.bad")))
    seconds = time.monotonic() - started
    print(f"{len(names) - num_bad} of {len(names)} jobs correct, {seconds:.0f} s")
    return not num_bad


def _work(names: Sequence[str], *, against: Mapping[str, Any] | None, folder: Path) -> None:
    """Run the jobs that no other worker has started."""
    for name in names:
        try:
            (folder / f"{name}.started").touch(exist_ok=False)
        except FileExistsError:
            continue
        started = time.monotonic()
        complaints = _run(name, against=against, folder=folder)
        seconds = time.monotonic() - started
        lines = [f"{name:<28}{seconds:>5.1f} s  {'DIFFERS' if complaints else 'ok'}"]
        lines += [f"    {name}: {each}" for each in complaints[:SHOWN]]
        if len(complaints) > SHOWN:
            lines.append(f"    {name}: and {len(complaints) - SHOWN} more")
        if complaints:
            (folder / f"{name}.bad").touch()
        print("\n".join(lines), flush=True)


def _run(name: str, *, against: Mapping[str, Any] | None, folder: Path) -> list[str]:
    """Run one job, write its record, and return what is wrong with it."""
    try:
        run_job(JOBS[name], folder=folder / "runs" / name, data=folder)
    except RunError as error:
        return [str(error)]
    record = read_record(folder / "runs" / name)
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    if against is None:
        return []
    if name not in against["jobs"]:
        return [f"is not in {GOLDENS.name}; record it: scripts/goldens.py make {name}"]
    exact = not why_no_bits(about_machine(), against["made_with"])
    return list(differences(against["jobs"][name], record, exact=exact))


def main(argv: Sequence[str]) -> int:
    """Make or check, and return the exit code."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("make", "check"))
    parser.add_argument("jobs", nargs="*", metavar="NAME", help=f"of {', '.join(JOBS)} (all)")
    options = parser.parse_args(argv)
    names = options.jobs or list(JOBS)
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"no job {', '.join(unknown)}; there are {', '.join(JOBS)}")
    pin_instructions([__file__, *argv])
    preload()
    with tempfile.TemporaryDirectory() as folder:
        act = make if options.verb == "make" else check
        return 0 if act(names, folder=Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
