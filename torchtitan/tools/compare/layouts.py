"""Train one job in several layouts on this machine, and compare them with the first.

`words.py` has the notation of layouts, `launch.py` starts ranks that save more (`rank.py`), and
`gaps.py` compares.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.log import plural
from torchtitan.checkpoint.storage import find_steps
from torchtitan.job import Config, load_config
from torchtitan.metrics.rows import Row, read_rows
from torchtitan.models.families import find_model
from torchtitan.models.sizes import MoEConfig
from torchtitan.tools.compare.gaps import (
    TOLERANCES,
    Gap,
    TensorGap,
    compare_gradients,
    compare_rows,
    compare_weights,
    first_unequal,
    largest_move,
)
from torchtitan.tools.compare.launch import last_lines, run_ranks
from torchtitan.tools.compare.rank import FLOAT64, GRADIENTS, NUM_STEPS
from torchtitan.tools.compare.runs import MAX_LOSS, StoredTensors, say, split_of
from torchtitan.tools.compare.words import Layout, fit_local_batch, option_key, parse_layout
from torchtitan.tools.verbs import format_table

FIXED = ("training.steps", "training.max_norm", "training.global_batch_size")
FIXED_SECTIONS = ("job.", "metrics.", "checkpoint.")
LOCAL_BATCH = "training.local_batch_size"
CHECKPOINTS = "checkpoint"
EXPLANATION = (
    "Largest relative differences: loss and grad_norm (before clipping) of any step, gradient of "
    "any tensor in the first steps, final weights of any tensor relative to its movement."
)


@dataclass(kw_only=True)
class Verdict:
    """The comparison of a layout with the reference."""

    layout: str
    world_size: int
    folder: Path
    """The run's folder."""
    seconds: float
    samples: tuple[int, int]
    """Data-parallel ranks and their local batch, which decide the samples of a rank."""
    rows: list[Row]
    problem: str = ""
    """Why the layout failed."""
    unequal: str = ""
    """The first initial weight that is not bit-identical."""
    steps: dict[str, Gap] = field(default_factory=dict)
    """Empty for the reference."""
    gradients: list[TensorGap] = field(default_factory=list)
    """One for each of the first steps."""
    weights: TensorGap | None = None
    differences: list[tuple[int, str]] = field(default_factory=list)
    """The differences beyond the tolerances, each with its first step, in order."""

    @property
    def summary(self) -> str:
        """The verdict in a few words."""
        if self.problem:
            return "FAILED"
        if self.unequal:
            return "DIVERGES at the initial weights"
        if self.differences:
            return f"DIVERGES at step {self.differences[0][0]}"
        return "same" if self.steps else "reference"


def main(options: argparse.Namespace) -> int:
    """Train all layouts, compare them with the first, print the result, return the exit code.

    If the reference fails, no other layout is trained.
    """
    file = f"--job.config_file={options.toml}"
    common = (file, *options.settings, *settings_of_all(steps=options.steps))
    plans = make_plans(options.layouts, common=common)
    config = load_config(common)
    if isinstance(find_model(config.model)[1], MoEConfig) and not options.float64:
        note("two experts with nearly equal scores are chosen by rounding; --float64 avoids it")
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.out or Path(temporary)).resolve()
        for number, (layout, arguments) in enumerate(plans, start=1):
            verdict = _train(layout, arguments, folder=folder / str(number), options=options)
            verdicts.append(verdict)
            if verdicts[0].problem:
                note("the reference failed: the other layouts are not trained")
                break
            if verdict is not verdicts[0] and not verdict.problem:
                _compare(verdict, verdicts[0], options=options)
        if not verdicts[0].problem:
            _show_reference(verdicts[0], config)
        _show(verdicts)
    if options.json is not None:
        runs = [{**asdict(verdict), "verdict": verdict.summary} for verdict in verdicts]
        text = json.dumps({"toml": options.toml, "runs": runs}, indent=1, default=str)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text, encoding="utf-8")
    return int(any(verdict.problem or verdict.differences for verdict in verdicts))


def settings_of_all(*, steps: int) -> tuple[str, ...]:
    """Return the options of all layouts: log every step, save the initial and final weights."""
    return (
        f"--training.steps={steps}",
        "--metrics.log_freq=1",
        "--checkpoint.enable=true",
        f"--checkpoint.folder={CHECKPOINTS}",
        f"--checkpoint.interval={steps}",
        "--checkpoint.keep_latest_k=0",
        "--checkpoint.async_mode=disabled",
        "--checkpoint.load_step=-1",
        "--metrics.enable_tensorboard=false",
        "--metrics.enable_wandb=false",
    )


def make_plans(
    texts: Sequence[str], *, common: Sequence[str]
) -> list[tuple[Layout, tuple[str, ...]]]:
    """Return the layouts with the trainer's options for each.

    The first is the reference, whose global batch all of them get. Raises ConfigError if a layout
    makes no sense, or sets an option that all layouts must share.
    """
    layouts = [parse_layout(text) for text in texts]
    if len(layouts) == 1:
        layouts.insert(0, parse_layout("single"))
    for option in common:
        if option_key(option).removeprefix("parallelism.") in layouts[0].degrees:
            raise ConfigError(f"write {option} as a word of each layout")
    training = load_config(common).training
    batch = training.global_batch_size
    if batch == -1:
        batch = training.local_batch_size * layouts[0].dp
        note(f"training.global_batch_size is not set: using {batch}, as in {layouts[0].name}")
    if {training.mixed_precision_param, training.dtype} != {"float32"}:
        note("the tolerances are for float32, but this job may compute in bfloat16")
    plans = []
    for layout in layouts:
        for key in map(option_key, layout.overrides):
            if key in FIXED or key.startswith(FIXED_SECTIONS):
                raise ConfigError(f"layout '{layout.name}': {key} must be the same for all layouts")
        arguments = (*common, *layout.arguments, f"--training.global_batch_size={batch}")
        if LOCAL_BATCH not in map(option_key, layout.overrides):
            local = training.local_batch_size
            fitting = fit_local_batch(local, global_batch_size=batch, layout=layout)
            if fitting != local:
                note(f"{layout.name}: {LOCAL_BATCH} is {fitting} instead of {local}")
            arguments += (f"--{LOCAL_BATCH}={fitting}",)
        load_config(arguments)  # mistakes cost no training
        plans.append((layout, arguments))
    return plans


def _train(
    layout: Layout, arguments: Sequence[str], *, folder: Path, options: argparse.Namespace
) -> Verdict:
    run, start = folder / "run", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    note(f"{layout.name}, {plural(layout.world_size, 'rank')}: training")
    problem = run_ranks(
        [*arguments, f"--job.dump_folder={run}"],
        world_size=layout.world_size,
        log=folder / "output.txt",
        module="torchtitan.tools.compare.rank",
        environ={
            NUM_STEPS: str(options.gradient_steps),
            FLOAT64: "1" if options.float64 else "",
        },
        timeout_s=options.timeout,
    )
    metrics = run / "metrics.jsonl"
    rows = list(read_rows(metrics)) if metrics.is_file() else []
    if not problem and not rows:
        problem = f"trained no step{last_lines(folder / 'output.txt')}"
    seconds = time.monotonic() - start
    note(f"{layout.name}: {'failed' if problem else 'trained'}, {seconds:.0f} s")
    return Verdict(
        layout=layout.name,
        world_size=layout.world_size,
        folder=run,
        seconds=seconds,
        samples=split_of(layout.dp, load_config(arguments).training.local_batch_size),
        problem=problem,
        rows=rows,
    )


def _compare(verdict: Verdict, reference: Verdict, *, options: argparse.Namespace) -> None:
    """Fill in the verdict on a layout that trained to its end."""
    tolerances = {
        **TOLERANCES,
        "loss": options.loss_tolerance,
        "grad_norm": options.grad_norm_tolerance,
    }
    if verdict.samples == reference.samples:
        tolerances[MAX_LOSS] = options.loss_tolerance
    initial = _weights(reference, min)
    differences = []
    if unequal := first_unequal(initial, _weights(verdict, min)):
        verdict.unequal = unequal
        differences.append((0, f"initial weights: {unequal}"))
    verdict.steps = compare_rows(reference.rows, verdict.rows, tolerances=tolerances)
    differences += [(gap.beyond[0][0], str(gap)) for gap in verdict.steps.values() if gap.beyond]
    for step in range(1, min(options.gradient_steps, options.steps) + 1):
        stored = (
            StoredTensors(x.folder / GRADIENTS / f"step-{step}", GRADIENTS, skip=())
            for x in (reference, verdict)
        )
        gap = compare_gradients(*stored)
        if gap.largest > options.gradients_tolerance and not any(
            other.largest > options.gradients_tolerance for other in verdict.gradients
        ):
            text = f"gradients from step {step}, the largest of {gap.name}: {gap.largest:.2g} "
            differences.append((step, f"{text}(tolerance {options.gradients_tolerance:g})"))
        verdict.gradients.append(gap)
    verdict.weights = compare_weights(initial, _weights(reference, max), _weights(verdict, max))
    if verdict.weights.largest > options.weights_tolerance:
        text = (
            f"final weights, the largest of {verdict.weights.name}: {verdict.weights.largest:.2g} "
        )
        text += f"of its movement (tolerance {options.weights_tolerance:g})"
        differences.append((options.steps, text))
    # within a step, figures come first
    verdict.differences = sorted(differences, key=lambda difference: difference[0])


def _weights(of: Verdict, choose: Callable[[Iterable[int]], int]) -> StoredTensors:
    """Return the initial weights with `min`, the final ones with `max`."""
    folder = of.folder / CHECKPOINTS
    return StoredTensors(folder / f"step-{choose(find_steps(folder))}", "model", skip=())


def _show_reference(reference: Verdict, config: Config) -> None:
    """Print how much the reference trained: without movement, agreement proves little."""
    moved = largest_move(_weights(reference, min), _weights(reference, max))
    rows, max_norm = reference.rows, config.training.max_norm
    clipped = sum(row["grad_norm"] > max_norm for row in rows)
    first, last = (
        "-" if row["loss"] is None else f"{row['loss']:.5f}" for row in (rows[0], rows[-1])
    )
    say(
        f"reference: loss {first} to {last}, weights moved by up to {moved:.2g}, "
        f"{clipped} of {len(rows)} steps clipped (max_norm {max_norm:g})"
    )


def _show(verdicts: Sequence[Verdict]) -> None:
    """Print a line for each layout, then the differences."""
    rows = [["layout", "ranks", "seconds", "loss", "grad_norm", "gradients", "weights"]]
    for verdict in verdicts:
        cells = [f"{verdict.steps[k].largest:.1e}" for k in ("loss", "grad_norm") if verdict.steps]
        cells = cells or ["-", "-"]
        for gaps in (verdict.gradients, [verdict.weights] if verdict.weights else []):
            cells.append(f"{max(gap.largest for gap in gaps):.1e}" if gaps else "-")
        rows.append([verdict.layout, str(verdict.world_size), f"{verdict.seconds:.0f}", *cells])
    summaries = ["verdict", *(verdict.summary for verdict in verdicts)]
    for line, summary in zip(format_table(rows), summaries, strict=True):
        say(f"{line}  {summary}")
    say(EXPLANATION)
    for verdict in verdicts:
        for text in [verdict.problem] if verdict.problem else [t for _, t in verdict.differences]:
            say(f"{verdict.layout}: {text}")


def note(text: str) -> None:
    """Print progress to stderr, which keeps it out of the results."""
    sys.stderr.write(text + "\n")
