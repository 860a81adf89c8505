"""Train one job in several layouts on this machine, and compare them with the first.

`words.py` has the notation of layouts, `launch.py` starts ranks that save more (`rank.py`), and
`gaps.py` compares.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.log import plural
from torchtitan.checkpoint.storage import find_steps
from torchtitan.job import load_config
from torchtitan.metrics.rows import RECORD, Row, read_rows
from torchtitan.models.families import find_model
from torchtitan.models.sizes import MoEConfig
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.compare.gaps import (
    TOLERANCES,
    compare_gradients,
    compare_rows,
    compare_tensors,
    compare_weights,
)
from torchtitan.tools.compare.launch import last_lines, run_ranks
from torchtitan.tools.compare.rank import FLOAT64, GRADIENTS, NUM_STEPS
from torchtitan.tools.compare.runs import say
from torchtitan.tools.compare.words import Layout, option_key, parse_layout
from torchtitan.tools.config import check_job
from torchtitan.tools.tensors import StoredTensors
from torchtitan.tools.verbs import format_table

CHECKPOINTS = "checkpoint"
SHARED = (
    "--metrics.log_freq=1",
    "--checkpoint.enable=true",
    f"--checkpoint.folder={CHECKPOINTS}",
    "--checkpoint.keep_latest_k=0",
    "--checkpoint.async_mode=disabled",
    "--checkpoint.load_step=-1",
    "--metrics.enable_tensorboard=false",
    "--metrics.enable_wandb=false",
)
"""Options of all layouts."""
LENGTHS = ("training.steps", "checkpoint.interval")
FIXED = ("training.steps", "training.max_norm", "training.global_batch_size")
FIXED_SECTIONS = ("job.", "metrics.", "checkpoint.")
"""Settings that no layout changes."""
LOCAL_BATCH = "training.local_batch_size"
FIGURES = ("loss", "grad_norm", "gradients", "weights")
Plan = tuple[Layout, tuple[str, ...]]
"""A layout, and the trainer's options for it."""


@dataclass(kw_only=True)
class Result:
    """A layout's training, and its comparison with the reference."""

    layout: str
    num_ranks: int
    folder: Path
    """The run's folder."""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    problem: str = ""
    """Why the layout failed."""
    figures: dict[str, float] = field(default_factory=dict)
    """Largest relative difference of each of `FIGURES`. Empty for the reference."""
    differences: list[tuple[int, str]] = field(default_factory=list)
    """The differences beyond the tolerances, each with its first step; 0: the initial weights."""

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        if self.problem:
            return "FAILED"
        if self.differences:
            step = self.differences[0][0]
            return f"DIVERGES at {f'step {step}' if step else 'the initial weights'}"
        return "same" if self.figures else "reference"

    def weights(self, *, last: bool) -> StoredTensors:
        """Return the final or the initial weights."""
        folder = self.folder / CHECKPOINTS
        return StoredTensors(folder / f"step-{find_steps(folder)[-1 if last else 0]}", "model")

    def gradients(self, step: int) -> StoredTensors:
        """Return the gradients of one of the first steps."""
        return StoredTensors(self.folder / GRADIENTS / f"step-{step}", GRADIENTS)


def main(options: argparse.Namespace) -> int:
    """Train all layouts, compare them with the first, print the result, return the exit code.

    If the reference fails, no other layout is trained.
    """
    # as Ctrl-C: the ranks are ended before this process
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    steps, file = options.steps, f"--job.config_file={options.toml}"
    common = (file, *options.settings, *SHARED, *(f"--{key}={steps}" for key in LENGTHS))
    plans = make_plans(options.layouts, common=common)
    config = resolve_model(load_config(common))
    if {config.training.mixed_precision_param, config.training.dtype} != {"float32"}:
        note("the tolerances are for float32, but this job may compute in bfloat16")
    if isinstance(find_model(config.model)[1], MoEConfig) and not options.float64:
        note("two experts with nearly equal scores are chosen by rounding; --float64 avoids it")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.out or Path(temporary)).resolve()
        for number, plan in enumerate(plans, start=1):
            note(f"{plan[0].name}, {plural(plan[0].world_size, 'rank')}: training")
            results.append(train_layout(plan, folder=folder / str(number), options=options))
            state = "failed" if results[-1].problem else "trained"
            note(f"{plan[0].name}: {state}, {results[-1].seconds:.0f} s")
            if results[0].problem:
                note("the reference failed: the other layouts are not trained")
                break
            if number > 1 and not results[-1].problem:
                compare_results(results[-1], results[0], options=options)
        if not results[0].problem:
            _show_reference(results[0])
    _show(results)
    if options.json is not None:
        runs = [{**asdict(result), "verdict": result.verdict} for result in results]
        text = json.dumps({"toml": options.toml, "runs": runs}, indent=1, default=str)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text, encoding="utf-8")
    return int(any(result.problem or result.differences for result in results))


def make_plans(texts: Sequence[str], *, common: Sequence[str]) -> list[Plan]:
    """Return the layouts with the trainer's options for each.

    The first is the reference, whose global batch all of them get. Raises UserError if the trainer
    would refuse a layout, or it sets an option that all layouts must share.
    """
    layouts = [parse_layout(text) for text in texts]
    if len(layouts) == 1:
        layouts.insert(0, parse_layout("single"))
    for option in common:
        if option_key(option).removeprefix("parallelism.") in layouts[0].degrees:
            raise ConfigError(f"write {option} as a word of each layout")
    training = load_config(common).training
    batch, local = training.global_batch_size, training.local_batch_size
    if batch == -1:
        batch = local * layouts[0].dp
        note(f"training.global_batch_size is not set: using {batch}, as in {layouts[0].name}")
    plans = []
    for layout in layouts:
        keys = [*map(option_key, layout.overrides)]
        for key in keys:
            if key in FIXED or key.startswith(FIXED_SECTIONS):
                raise ConfigError(f"layout '{layout.name}': {key} must be the same for all layouts")
        arguments = (*common, *layout.arguments, f"--training.global_batch_size={batch}")
        if LOCAL_BATCH not in keys:
            per_rank, remainder = divmod(batch, layout.dp)
            if remainder:
                raise ConfigError(
                    f"layout '{layout.name}': training.global_batch_size must be a multiple of "
                    f"its {layout.dp} data-parallel ranks, got {batch}"
                )
            fitting = next(n for n in range(min(local, per_rank), 0, -1) if per_rank % n == 0)
            if fitting != local:
                note(f"{layout.name}: {LOCAL_BATCH} is {fitting} instead of {local}")
            arguments += (f"--{LOCAL_BATCH}={fitting}",)
        check_job(load_config(arguments), world_size=layout.world_size)
        plans.append((layout, arguments))
    return plans


def train_layout(plan: Plan, *, folder: Path, options: argparse.Namespace) -> Result:
    """Train one layout with its output in `folder`; a failure is the result's `problem`."""
    (layout, arguments), start = plan, time.monotonic()
    result = Result(layout=layout.name, num_ranks=layout.world_size, folder=folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    float64 = "1" if options.float64 else ""
    result.problem = run_ranks(
        [*arguments, f"--job.dump_folder={result.folder}"],
        world_size=layout.world_size,
        log=folder / "output.txt",
        module="torchtitan.tools.compare.rank",
        environ={NUM_STEPS: str(options.gradient_steps), FLOAT64: float64},
        timeout_s=options.timeout,
    )
    if (metrics := result.folder / f"{RECORD}.jsonl").is_file():
        result.rows = [*read_rows(metrics)]
    if not result.problem and not result.rows:
        result.problem = f"trained no step{last_lines(folder / 'output.txt')}"
    result.seconds = time.monotonic() - start
    return result


def compare_results(result: Result, reference: Result, *, options: argparse.Namespace) -> None:
    """Add figures and differences to the result of a layout that trained to its end."""
    initial = reference.weights(last=False)
    bits = compare_tensors(initial, result.weights(last=False))
    differences = [(0, f"initial weights, {name}: {text}") for name, _, text in bits][:1]
    tolerances = {key: getattr(options, f"{key}_tolerance") for key in FIGURES}
    figures = {**TOLERANCES, **{key: tolerances[key] for key in ("loss", "grad_norm")}}
    gaps = compare_rows(reference.rows, result.rows, tolerances=figures)
    result.figures = {key: gaps[key].largest for key in ("loss", "grad_norm")}
    # within a step, figures come first
    differences += [(gap.beyond[0][0], str(gap)) for gap in gaps.values() if gap.beyond]

    steps = range(1, min(options.gradient_steps, options.steps) + 1)
    tensors = {
        (step, "gradients"): compare_gradients(reference.gradients(step), result.gradients(step))
        for step in steps
    }
    ends = (run.weights(last=True) for run in (reference, result))
    tensors[options.steps, "weights"] = compare_weights(initial, *ends)
    for (step, key), gap in tensors.items():
        if gap.largest > tolerances[key] >= result.figures.get(key, 0.0):  # the first of its kind
            text = f"{key} of step {step}, {gap.name}: differ by {gap.largest:.2g} "
            differences.append((step, f"{text}(tolerance {tolerances[key]:g})"))
        result.figures[key] = max(gap.largest, result.figures.get(key, 0.0))
    result.differences = sorted(differences, key=lambda difference: difference[0])


def _show_reference(reference: Result) -> None:
    """Print how much the reference trained: without movement, agreement proves little."""
    start, moved = reference.weights(last=False), 0.0
    for name, end in reference.weights(last=True).items():
        size = max(tensor.abs().max().item() for tensor in (start[name], end))
        moved = max(moved, (end - start[name]).abs().max().item() / (size or 1.0))
    losses = (reference.rows[i]["loss"] for i in (0, -1))
    first, last = ("-" if loss is None else f"{loss:.5f}" for loss in losses)
    say(f"reference: loss {first} to {last}, weights moved by up to {moved:.2g}")


def _show(results: Sequence[Result]) -> None:
    """Print the largest differences of each layout, then those beyond the tolerances."""
    rows = [["layout", "ranks", "seconds", *FIGURES]]
    for result in results:
        cells = [f"{result.figures[key]:.1e}" if key in result.figures else "-" for key in FIGURES]
        rows.append([result.layout, str(result.num_ranks), f"{result.seconds:.0f}", *cells])
    verdicts = ["verdict", *(result.verdict for result in results)]
    for line, verdict in zip(format_table(rows), verdicts, strict=True):
        say(f"{line}  {verdict}")
    for result in results:
        for text in [result.problem] if result.problem else [t for _, t in result.differences]:
            say(f"{result.layout}: {text}")


def note(text: str) -> None:
    """Print progress to stderr, which keeps it out of the results."""
    sys.stderr.write(text + "\n")
