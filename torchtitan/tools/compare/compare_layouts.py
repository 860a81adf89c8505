"""Train one job in several layouts on this machine, and say where they part.

    python -m torchtitan compare layouts my.toml single fsdp2 hsdp2x2
    python -m torchtitan compare layouts my.toml single "fsdp2 --compile.enable"

A layout is words with numbers of ranks joined by commas (fsdpN, ddpN, hsdpNxN, tpN, ppN, cpN; 1 or
single is one device) and options of the trainer behind them; epN adds no ranks, but deals out
experts among those of fsdp, cp and tp. Each is a real launch with the same global batch; the first
one is the reference, and single goes before a layout that is given alone.
Initial weights must be equal bit for bit; losses, gradient norms before clipping, the gradient of
every parameter in the first steps and final weights within the tolerances; max_loss too, where the
data-parallel ranks have the samples of the reference's. Options of the trainer outside quotes count
for all layouts.

A model with experts is compared twice: with its tokens sent where the reference sent them
(replayed), and with each layout choosing by itself (free), where two scores that nearly tie may be
decided otherwise. Such flips are counted, and must be near ties.

Exit code 0 the same training in all of them, 1 a layout diverges or fails, 2 a mistake.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.base.errors import ConfigError, UserError
from torchtitan.job import load_config
from torchtitan.models.families import find_model
from torchtitan.models.sizes import MoEConfig
from torchtitan.tools.compare.compare_runs import MAX_LOSS, find_max_loss
from torchtitan.tools.compare.layouts import report
from torchtitan.tools.compare.layouts.flips import Flips, compare_choices
from torchtitan.tools.compare.layouts.gaps import (
    TOLERANCES,
    compare_gradients,
    compare_rows,
    compare_weights,
    first_unequal,
    largest_move,
)
from torchtitan.tools.compare.layouts.launch import Outcome, launch, settings_of_all
from torchtitan.tools.compare.layouts.options import ROUTINGS, build_parser, check_options
from torchtitan.tools.compare.layouts.report import Verdict, show_steps, show_table, write_json
from torchtitan.tools.compare.layouts.words import Layout, fit_local_batch, option_key, parse_layout

SET_HERE = ("training.steps", "training.max_norm", "training.global_batch_size")
SET_HERE_SECTIONS = ("job.", "metrics.", "checkpoint.")
PROG = "python -m torchtitan compare layouts"
LOCAL_BATCH = "training.local_batch_size"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with the options it is launched with, or why it cannot be."""

    layout: Layout
    arguments: tuple[str, ...]
    refusal: str


def make_plan(layout: Layout, *, common: Sequence[str], global_batch_size: int) -> Plan:
    """Check a layout's settings, and cut the global batch for it.

    Raises:
        ConfigError: It sets what must be equal in all layouts, or cannot share the global batch.
    """
    for option in layout.overrides:
        key = option_key(option)
        if key in SET_HERE or key.startswith(SET_HERE_SECTIONS):
            raise ConfigError(
                f"layout '{layout.name}': {key} is the same for all layouts; give it outside the "
                "quotes, or as an option of this script (--help)"
            )
    arguments = (*common, *layout.arguments, f"--training.global_batch_size={global_batch_size}")
    if any(option_key(option) == LOCAL_BATCH for option in layout.overrides):
        return _checked(layout, arguments)
    local = load_config(common).training.local_batch_size
    fitting = fit_local_batch(local, global_batch_size=global_batch_size, layout=layout)
    if fitting != local:
        say(f"{layout.name}: {LOCAL_BATCH} {fitting}, not {local}, to share {global_batch_size}")
    return _checked(layout, (*arguments, f"--{LOCAL_BATCH}={fitting}"))


def _checked(layout: Layout, arguments: tuple[str, ...]) -> Plan:
    try:
        load_config(arguments)
    except ConfigError as error:
        return Plan(
            layout=layout, arguments=arguments, refusal=f"its settings are refused: {error}"
        )
    return Plan(layout=layout, arguments=arguments, refusal="")


def make_plans(texts: Sequence[str], *, common: Sequence[str]) -> list[Plan]:
    """Read the layouts; the first is the reference, whose global batch all of them take."""
    layouts = [parse_layout(text) for text in texts]
    if len(layouts) == 1:
        layouts.insert(0, parse_layout("single"))
    for option in common:
        if option_key(option).removeprefix("parallelism.") in layouts[0].degrees:
            raise ConfigError(f"{option} differs by layout: write it as a layout's word")
    config = load_config(common)
    whole = config.training.global_batch_size
    if whole == -1:
        whole = config.training.local_batch_size * layouts[0].dp
        say(f"training.global_batch_size is not set: {whole}, as in {layouts[0].name}")
    if {config.training.mixed_precision_param, config.training.dtype} != {"float32"}:
        say(
            "the job computes in bfloat16, or may; tolerances are for float32, see --help to "
            "change either"
        )
    return [make_plan(each, common=common, global_batch_size=whole) for each in layouts]


def run_plan(
    plan: Plan, *, label: str, folder: Path, options: argparse.Namespace, replayed: Path | None
) -> Outcome:
    """Launch one layout, showing how far it is."""
    ranks = plan.layout.world_size
    head = f"{label}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    if plan.refusal:
        return Outcome(folder=folder, seconds=0.0, rows=[], problem=plan.refusal)
    outcome = launch(
        plan.arguments,
        world_size=ranks,
        folder=folder,
        timeout_s=options.timeout,
        on_wait=progress(head, num_steps=options.steps),
        gradient_steps=options.gradient_steps,
        replayed=replayed,
        float64=options.float64,
    )
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    say(f"{clear}{head}: {'failed' if outcome.problem else 'trained'}, {outcome.seconds:.0f} s")
    return outcome


def judge(
    plan: Plan,
    outcome: Outcome,
    reference: Outcome,
    *,
    flips: Flips | None,
    routing: str,
    options: argparse.Namespace,
) -> Verdict:
    """Compare what a layout left with what the reference left, as long as that is one training:
    up to the first step in which it chose other experts."""
    verdict = Verdict(
        layout=plan.layout.name,
        world_size=plan.layout.world_size,
        seconds=outcome.seconds,
        is_reference=outcome is reference,
        routing=routing,
        problem=outcome.problem,
        rows=outcome.rows,
        flips=flips,
    )
    if outcome is reference or outcome.problem:
        return verdict
    parted = flips.first_step if flips is not None and routing == "free" else None
    num_steps = options.steps if parted is None else parted - 1
    verdict = replace(
        verdict, unequal=first_unequal(reference.initial_weights(), outcome.initial_weights())
    )
    if not num_steps:
        return verdict
    tolerances = {
        **TOLERANCES,
        "loss": options.loss_tolerance,
        "grad_norm": options.grad_norm_tolerance,
    }
    if find_max_loss(reference.folder, outcome.folder)(1):
        tolerances[MAX_LOSS] = options.loss_tolerance
    rows = [[row for row in x.rows if row["step"] <= num_steps] for x in (reference, outcome)]
    verdict = replace(
        verdict,
        steps=compare_rows(*rows, tolerances=tolerances),
        gradients=tuple(
            compare_gradients(reference.gradients(step), outcome.gradients(step))
            for step in range(1, min(options.gradient_steps, num_steps) + 1)
        ),
        gradients_tolerance=options.gradients_tolerance,
    )
    if parted is not None:
        return verdict
    weights = (reference.initial_weights(), reference.final_weights(), outcome.final_weights())
    return replace(
        verdict,
        weights=compare_weights(*weights),
        weights_tolerance=options.weights_tolerance,
    )


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the experts of a model are chosen in a comparison."""

    kinds: tuple[str, ...]
    """Of the layouts, one training each; "" for a model without experts."""
    groups: tuple[int, int]
    """Of experts, and how many of them a token chooses from."""


def find_routing(common: Sequence[str], options: argparse.Namespace) -> Routing:
    """Look at the job's model."""
    _, sizes = find_model(load_config(common).model)
    if not isinstance(sizes, MoEConfig):
        return Routing(kinds=("",), groups=(1, 1))
    groups = sizes.num_expert_groups or 1
    kinds = ROUTINGS if options.routing == "both" else (options.routing,)
    return Routing(kinds=kinds, groups=(groups, sizes.num_limited_groups or groups))


def compare(
    plans: Sequence[Plan],
    *,
    max_norm: float,
    folder: Path,
    routing: Routing,
    options: argparse.Namespace,
) -> list[Verdict]:
    """Launch all layouts, print how they compare, and return the verdicts.

    Nothing more is launched once the reference has failed.
    """
    reference: Outcome | None = None
    verdicts: list[Verdict] = []
    for number, plan in enumerate(plans, start=1):
        plan = replace(plan, arguments=(*plan.arguments, f"--training.max_norm={max_norm}"))
        for kind in routing.kinds if reference is not None else ("",):
            label = f"[{number}/{len(plans)}] {plan.layout.name}{f' ({kind})' if kind else ''}"
            replayed = reference.choices if reference is not None and kind == "replayed" else None
            into = folder / (f"{number}-{kind}" if kind else str(number))
            outcome = run_plan(plan, label=label, folder=into, options=options, replayed=replayed)
            flips = None
            if reference is not None and kind and not outcome.problem:
                flips = compare_choices(
                    reference.choices,
                    outcome.choices,
                    num_steps=options.steps,
                    replayed=kind == "replayed",
                    groups=routing.groups,
                    tolerance=options.margin_tolerance,
                )
            reference = reference or outcome
            verdicts.append(
                judge(plan, outcome, reference, flips=flips, routing=kind, options=options)
            )
            if options.verbose and outcome.rows:
                show_steps(plan.layout.name, outcome.rows, reference_rows=reference.rows)
        if reference is not None and reference.problem:
            say("the reference failed: the other layouts are not trained")
            break
    if reference is not None and not reference.problem:
        show_reference(reference, max_norm=max_norm)
    show_table(verdicts)
    return verdicts


def show_reference(reference: Outcome, *, max_norm: float) -> None:
    """Print what layouts are compared with: a training that moves nothing would prove little."""
    moved = largest_move(reference.initial_weights(), reference.final_weights())
    clipped = sum(row["grad_norm"] > max_norm for row in reference.rows)
    first, last = (
        "-" if row["loss"] is None else f"{row['loss']:.5f}"
        for row in (reference.rows[0], reference.rows[-1])
    )
    report.say(
        f"reference: loss {first} to {last}, weights moved by up to {moved:.2g}, "
        f"{clipped} of {len(reference.rows)} steps clipped (max_norm {max_norm:g})"
    )


def say(text: str) -> None:
    """Say what goes on, beside the results."""
    sys.stderr.write(text + "\n")


def progress(head: str, *, num_steps: int) -> Callable[[int, float], None]:
    """Return what shows steps and seconds: on a terminal, in one line."""
    terminal = sys.stderr.isatty()
    if not terminal:
        say(f"{head}: training")

    def show(step: int, seconds: float) -> None:
        if terminal:
            sys.stderr.write(f"\r{head}: step {step}/{num_steps}, {seconds:.0f} s ")
            sys.stderr.flush()

    return show


def find_clippings(options: argparse.Namespace, common: Sequence[str]) -> dict[str, float]:
    """Return the norms to clip at, by what to call each.

    Raises:
        ConfigError: Both ways are asked for, but the job clips at no norm.
    """
    max_norm = load_config(common).training.max_norm
    if not options.both_clippings:
        return {"": max_norm}
    if math.isinf(max_norm):
        raise ConfigError(
            "--both_clippings needs a training.max_norm to clip at, got inf; add "
            "--training.max_norm=N with N below the gradient norms"
        )
    return {"unclipped": math.inf, "clipped": max_norm}


def end_ranks_on_signals() -> None:
    """Make the signals that end this process an exception, on whose way the ranks are ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def main(argv: Sequence[str], *, prog: str = PROG) -> int:
    """Compare, print what was found, and return the exit code."""
    options, extra = build_parser(__doc__ or "", prog=prog).parse_known_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    verdicts: dict[str, list[Verdict]] = {}
    try:
        check_options(options, extra)
        file = f"--job.config_file={options.toml}"
        common = (file, *extra, *settings_of_all(steps=options.steps))
        plans = make_plans(options.layouts, common=common)
        clippings, routing = find_clippings(options, common), find_routing(common, options)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.out or Path(temporary)).resolve()
            for name, max_norm in clippings.items():
                if name:
                    report.say(f"{name}:")
                verdicts[name] = compare(
                    plans,
                    max_norm=max_norm,
                    folder=folder / name,
                    routing=routing,
                    options=options,
                )
        if options.json is not None:
            write_json(options.json, verdicts, toml=options.toml)
    except UserError as error:
        say(f"error: {error}")
        return error.exit_code
    return int(any(each.complaints for group in verdicts.values() for each in group))
