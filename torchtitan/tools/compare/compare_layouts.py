"""Train one job in several layouts on this machine, and compare them with the first.

`command.py` has the options, `layouts/` the parts: the notation (`words`), the launcher (`launch`)
of ranks that save more (`rank`, `routing`), the comparison (`gaps`, `flips`) and the `report`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.log import plural
from torchtitan.checkpoint.storage import find_steps
from torchtitan.job import load_config
from torchtitan.metrics.rows import read_rows
from torchtitan.models.families import find_model
from torchtitan.models.settings import ModelSection
from torchtitan.models.sizes import MoEConfig
from torchtitan.tools.compare.compare_runs import MAX_LOSS, StoredTensors, have_same_samples, say
from torchtitan.tools.compare.layouts.flips import compare_choices
from torchtitan.tools.compare.layouts.gaps import (
    TOLERANCES,
    compare_gradients,
    compare_rows,
    compare_weights,
    first_unequal,
    largest_move,
)
from torchtitan.tools.compare.layouts.launch import last_lines, run_ranks
from torchtitan.tools.compare.layouts.rank import FLOAT64, GRADIENTS, NUM_STEPS, REPLAYED
from torchtitan.tools.compare.layouts.report import Verdict, show_table, write_json
from torchtitan.tools.compare.layouts.routing import CHOICES
from torchtitan.tools.compare.layouts.words import Layout, fit_local_batch, option_key, parse_layout

FIXED = ("training.steps", "training.max_norm", "training.global_batch_size")
FIXED_SECTIONS = ("job.", "metrics.", "checkpoint.")
LOCAL_BATCH = "training.local_batch_size"
CHECKPOINTS = "checkpoint"


def main(options: argparse.Namespace) -> int:
    """Train all layouts, compare them with the first, print the result, return the exit code.

    If the reference fails, no other layout is trained.
    """
    file = f"--job.config_file={options.toml}"
    common = (file, *options.settings, *settings_of_all(steps=options.steps))
    plans = make_plans(options.layouts, common=common)
    config = load_config(common)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.out or Path(temporary)).resolve()
        for number, (layout, arguments) in enumerate(plans, start=1):
            replayed = verdicts[0].folder / CHOICES if verdicts else None
            verdict = _train(
                layout, arguments, folder=folder / str(number), options=options, replayed=replayed
            )
            verdicts.append(verdict)
            if verdicts[0].problem:
                note("the reference failed: the other layouts are not trained")
                break
            if verdict is not verdicts[0] and not verdict.problem:
                _compare(verdict, verdicts[0], options=options, model=config.model)
        if not verdicts[0].problem:
            _show_reference(verdicts[0], max_norm=config.training.max_norm)
        show_table(verdicts)
    if options.json is not None:
        write_json(options.json, verdicts, toml=options.toml)
    return int(any(result.complaints for result in verdicts))


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
    layout: Layout,
    arguments: Sequence[str],
    *,
    folder: Path,
    options: argparse.Namespace,
    replayed: Path | None,
) -> Verdict:
    """Train a layout. With `replayed`, a folder of choices, its tokens go to these experts."""
    run, start = folder / "run", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    note(f"{layout.name}, {plural(layout.world_size, 'rank')}: training")
    problem = run_ranks(
        [*arguments, f"--job.dump_folder={run}"],
        world_size=layout.world_size,
        log=folder / "output.txt",
        module="torchtitan.tools.compare.layouts.rank",
        environ={
            NUM_STEPS: str(options.gradient_steps),
            REPLAYED: str(replayed or ""),
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
        is_reference=replayed is None,
        problem=problem,
        rows=rows,
        gradients_tolerance=options.gradients_tolerance,
        weights_tolerance=options.weights_tolerance,
    )


def _compare(
    verdict: Verdict, reference: Verdict, *, options: argparse.Namespace, model: ModelSection
) -> None:
    """Fill in the verdict on a layout that trained to its end."""
    _, sizes = find_model(model)
    if isinstance(sizes, MoEConfig):
        groups = sizes.num_expert_groups or 1
        verdict.flips = compare_choices(
            reference.folder / CHOICES,
            verdict.folder / CHOICES,
            num_steps=options.steps,
            groups=(groups, sizes.num_limited_groups or groups),
            tolerance=options.margin_tolerance,
        )
    tolerances = {
        **TOLERANCES,
        "loss": options.loss_tolerance,
        "grad_norm": options.grad_norm_tolerance,
    }
    if have_same_samples(reference.folder, verdict.folder):
        tolerances[MAX_LOSS] = options.loss_tolerance
    initial = _weights(reference, min)
    verdict.unequal = first_unequal(initial, _weights(verdict, min))
    verdict.steps = compare_rows(reference.rows, verdict.rows, tolerances=tolerances)
    for step in range(1, min(options.gradient_steps, options.steps) + 1):
        verdict.gradients.append(
            compare_gradients(
                *(
                    StoredTensors(x.folder / GRADIENTS / f"step-{step}", GRADIENTS, skip=())
                    for x in (reference, verdict)
                )
            )
        )
    verdict.weights = compare_weights(initial, _weights(reference, max), _weights(verdict, max))


def _weights(of: Verdict, choose: Callable[[Iterable[int]], int]) -> StoredTensors:
    """Return the initial weights with `min`, the final ones with `max`."""
    folder = of.folder / CHECKPOINTS
    return StoredTensors(folder / f"step-{choose(find_steps(folder))}", "model", skip=())


def _show_reference(reference: Verdict, *, max_norm: float) -> None:
    """Print how much the reference trained: without movement, agreement proves little."""
    moved = largest_move(_weights(reference, min), _weights(reference, max))
    rows = reference.rows
    clipped = sum(row["grad_norm"] > max_norm for row in rows)
    first, last = (
        "-" if row["loss"] is None else f"{row['loss']:.5f}" for row in (rows[0], rows[-1])
    )
    say(
        f"reference: loss {first} to {last}, weights moved by up to {moved:.2g}, "
        f"{clipped} of {len(rows)} steps clipped (max_norm {max_norm:g})"
    )


def note(text: str) -> None:
    """Print progress to stderr, which keeps it out of the results."""
    sys.stderr.write(text + "\n")
