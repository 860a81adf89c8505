"""Are replayed steps those that were trained? `python -m tests.tools.audit.replay_campaign`.

For each kind of data and layout a run is trained, and its last step is replayed: in the same layout
its figures must be equal bit for bit, in another one to rounding. The losses of the tokens must add
up to the loss, the norms of the gradients to the gradient norm, and both replays must agree on
every token.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.tools.audit.campaign import LAYOUTS, SETTINGS, SMALL, write_data

JOB = (
    *SMALL,
    "--model.vocab_size=264",
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--metrics.log_freq=1",
    "--training.steps=4",
    "--training.mixed_precision_param=float32",
)
MORE_LAYOUTS = {
    **LAYOUTS,
    "tp 2": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "pp 2": (2, ("--parallelism.pipeline_parallel_degree=2",)),
}
ROUNDING = 1e-4
"""Relative; float32 sums in another order differ by 1e-6 and less here."""


def replay(run: Path, *options: str) -> dict[str, Any]:
    """Run the command; return what was seen of the last step."""
    command = ["explain", str(run), "--step=4", "--replay", "--json", *options]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan", "audit", *command],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    tokens = found["replay"]["tokens"]
    assert {one["sample"] for one in tokens} == {one["sample"] for one in found["samples"]}
    assert len(tokens) == len(found["samples"]) * 32
    seen: dict[str, Any] = found["replay"]
    figures = seen["replayed"]
    assert math.isclose(seen["mean_of_tokens"], figures["loss"], rel_tol=1e-6)
    squares = [one["grad_norm"] ** 2 for one in seen["parameters"]]
    assert math.isclose(math.sqrt(math.fsum(squares)), figures["grad_norm"], rel_tol=1e-6)
    return seen


def check(run: Path, *, alone: bool) -> None:
    """Replay the last step of a run as it was, and if asked on one device."""
    seen = replay(run)
    assert seen["replayed"] == seen["logged"]
    assert seen["from_step"] == 2
    if not alone:
        return
    single = [f"--parallelism.{axis}_parallel_degree=1" for axis in ("tensor", "context")]
    single += ["--parallelism.pipeline_parallel_degree=1", "--training.local_batch_size=4"]
    other = replay(run, "--world_size=1", *single)
    for key, value in seen["logged"].items():
        assert math.isclose(other["replayed"][key], value, rel_tol=ROUNDING)
    places = [
        {(one["sample"], one["place"]): one["loss"] for one in found["tokens"]}
        for found in (seen, other)
    ]
    assert places[0].keys() == places[1].keys()
    for place, loss in places[0].items():
        assert math.isclose(places[1][place], loss, rel_tol=ROUNDING, abs_tol=ROUNDING)


def main() -> None:
    """Train and replay all kinds of data in all layouts."""
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        write_data(Path())
        for kind in ("mixed", "packed", "padded"):
            for name, (world, degrees) in MORE_LAYOUTS.items():
                run = Path(f"{kind} {name}")
                words = [*JOB, *SETTINGS[kind], *degrees, f"--job.dump_folder={run}"]
                words.append("--training.dataset_cache=cache")
                launcher = ["torchtitan.launch", "--standalone", f"--nproc_per_node={world}", "-m"]
                command = [sys.executable, "-m", *launcher, "torchtitan.train", *words]
                subprocess.run(command, check=True, capture_output=True, timeout=300)
                check(run, alone=world > 1)
                sys.stdout.write(f"{run}: equal\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
