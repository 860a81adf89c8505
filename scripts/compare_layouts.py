"""Train one job in several layouts on this machine, and say where they part.

    python scripts/compare_layouts.py train_configs/compare_layouts.toml single fsdp2 hsdp2x2
    python scripts/compare_layouts.py my.toml single "fsdp2 --activation_checkpoint.mode=full"

A layout is words with numbers of ranks joined by commas (fsdpN, ddpN, hsdpNxN, tpN, ppN, cpN; 1 or
single is one device) and options of the trainer behind them. Each is a real launch with the same
global batch; the first one is the reference, and single goes before a layout that is given alone.
Initial weights must be equal bit for bit, losses, gradient norms before clipping and final weights
within the tolerances. Options of the trainer outside quotes count for all layouts.

Exit code 0 the same training in all of them, 1 a layout diverges or fails, 2 a mistake.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts.layouts.gaps import (
    TOLERANCES,
    WEIGHTS_TOLERANCE,
    Divergence,
    WeightGap,
    compare_rows,
    compare_weights,
    first_unequal,
)
from scripts.layouts.launch import Outcome, launch, settings_of_all
from scripts.layouts.words import Layout, fit_local_batch, option_key, parse_layout
from torchtitan.base.errors import ConfigError, UserError
from torchtitan.config.load import load_config

SET_HERE = ("training.steps", "training.max_norm", "training.global_batch_size")
SET_HERE_SECTIONS = ("job.", "metrics.", "checkpoint.")
LOCAL_BATCH = "training.local_batch_size"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with the options it is launched with, or why it cannot be."""

    layout: Layout
    arguments: tuple[str, ...]
    refusal: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one layout compares with the reference."""

    layout: str
    world_size: int
    seconds: float
    problem: str = ""
    """Why there is nothing to compare."""
    initial: str = ""
    """The first initial weight that is not equal bit for bit."""
    steps: Divergence | None = None
    weights: WeightGap | None = None
    weights_tolerance: float = WEIGHTS_TOLERANCE

    @property
    def complaints(self) -> list[str]:
        """Say all that is wrong; empty where it is the same training."""
        found = [self.problem] if self.problem else []
        if self.initial:
            found.append(f"initial weights: {self.initial}")
        if self.steps is not None and self.steps.is_found:
            found.append(str(self.steps))
        if self.weights is not None and self.weights.largest > self.weights_tolerance:
            found.append(
                f"final weights, most of all {self.weights.name}, by {self.weights.largest:.2g} "
                f"(tolerance {self.weights_tolerance:g})"
            )
        return found

    def summary(self) -> str:
        """Say it in a few words."""
        if self.problem:
            return "FAILED"
        if self.initial:
            return "DIVERGES at the initial weights"
        first = self.steps.first if self.steps is not None else None
        if first is not None:
            step, size = first.beyond[0]
            return f"DIVERGES at step {step}: {first.figure} by {size:.2g}"
        return "DIVERGES: see below" if self.complaints else "same"


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
    if "bfloat16" in (config.training.mixed_precision_param, config.training.dtype):
        say("the job computes in bfloat16; tolerances are for float32, see --help to change either")
    return [make_plan(each, common=common, global_batch_size=whole) for each in layouts]


def run_plan(plan: Plan, *, label: str, folder: Path, options: argparse.Namespace) -> Outcome:
    """Launch one layout, showing how far it is."""
    ranks = plan.layout.world_size
    head = f"{label}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    if plan.refusal:
        return Outcome(folder=folder, seconds=0.0, rows=[], problem=plan.refusal)
    with_end = progress(head, num_steps=options.steps)
    outcome = launch(
        plan.arguments,
        world_size=ranks,
        folder=folder,
        timeout_s=options.timeout,
        on_wait=with_end,
    )
    say(f"\r{head}: {'failed' if outcome.problem else 'trained'}, {outcome.seconds:.0f} s")
    return outcome


def compare_outcome(
    plan: Plan, outcome: Outcome, reference: Outcome, options: argparse.Namespace
) -> Verdict:
    """Compare what a layout left with what the reference left."""
    known: dict[str, Any] = {
        "layout": plan.layout.name,
        "world_size": plan.layout.world_size,
        "seconds": outcome.seconds,
        "weights_tolerance": options.weights_tolerance,
    }
    if reference.problem:
        return Verdict(**known, problem="the reference failed: nothing to compare with")
    if outcome.problem:
        return Verdict(**known, problem=outcome.problem)
    tolerances = {
        **TOLERANCES,
        "loss": options.loss_tolerance,
        "grad_norm": options.grad_norm_tolerance,
    }
    return Verdict(
        **known,
        initial=first_unequal(reference.weights(0), outcome.weights(0)),
        steps=compare_rows(reference.rows, outcome.rows, tolerances=tolerances),
        weights=compare_weights(reference.weights(options.steps), outcome.weights(options.steps)),
    )


def compare(
    plans: Sequence[Plan], *, clipping: Sequence[str], folder: Path, options: argparse.Namespace
) -> list[Verdict]:
    """Launch all layouts under one clipping, print the table, and return the verdicts."""
    reference: Outcome | None = None
    verdicts = []
    for number, plan in enumerate(plans):
        plan = _checked(plan.layout, (*plan.arguments, *clipping))
        label = f"[{number + 1}/{len(plans)}] {plan.layout.name}"
        if reference is not None and reference.problem:
            outcome = reference
        else:
            outcome = run_plan(plan, label=label, folder=folder / str(number), options=options)
        if reference is None:
            reference = outcome
            _show_reference(plan, outcome, options)
        else:
            verdicts.append(compare_outcome(plan, outcome, reference, options))
        if options.verbose and outcome.rows:
            _show_rows(plan.layout.name, outcome, reference)
    if reference is not None and not reference.problem:
        _show_table(verdicts)
    return verdicts


def _show_reference(plan: Plan, outcome: Outcome, options: argparse.Namespace) -> None:
    if outcome.problem:
        print(f"the reference, {plan.layout.name}, {outcome.problem}")
        return
    moved = compare_weights(outcome.weights(0), outcome.weights(options.steps))
    [max_norm] = [word.partition("=")[2] for word in plan.arguments if "max_norm" in word][-1:]
    clipped = sum(row["grad_norm"] > float(max_norm) for row in outcome.rows)
    print(
        f"reference: {plan.layout.name}; loss {outcome.rows[0]['loss']:.5f} to "
        f"{outcome.rows[-1]['loss']:.5f}; weights moved by up to {moved.largest:.2g}; "
        f"max_norm {max_norm} clipped {clipped} of {options.steps} steps"
    )


def _show_rows(name: str, outcome: Outcome, reference: Outcome) -> None:
    theirs = {int(row["step"]): row for row in reference.rows}
    print(f"{name}\n{'step':>6}{'loss':>18}{'relative':>10}{'grad_norm':>18}{'relative':>10}")
    for row in outcome.rows:
        step = int(row["step"])
        cells = f"{step:>6}"
        for figure in ("loss", "grad_norm"):
            gaps = compare_rows([theirs[step]], [row], tolerances={figure: math.inf}).gaps
            cells += f"{row[figure]:>18.10g}{gaps[figure].largest:>10.1e}"
        print(cells)


def _show_table(verdicts: Sequence[Verdict]) -> None:
    width = max(len("layout"), *(len(each.layout) for each in verdicts))
    print(f"{'layout':<{width}}{'ranks':>7}{'loss':>10}{'grad_norm':>11}{'weights':>10}  verdict")
    for each in verdicts:
        cells = ["-"] * 3
        if each.steps is not None and each.weights is not None:
            gaps = each.steps.gaps
            sizes = (gaps["loss"].largest, gaps["grad_norm"].largest, each.weights.largest)
            cells = [f"{size:.1e}" for size in sizes]
        loss, norm, weights = cells
        figures = f"{each.world_size:>7}{loss:>10}{norm:>11}{weights:>10}"
        print(f"{each.layout:<{width}}{figures}  {each.summary()}")
    print(
        "Largest relative differences: of figures over all steps; of final weights in any tensor, "
        "against its largest element."
    )
    for each in verdicts:
        for complaint in each.complaints:
            print(f"{each.layout}: {complaint}")


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


def find_clippings(options: argparse.Namespace, common: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the options of each clipping by its name.

    Raises:
        ConfigError: Both are asked for, but the job clips at no norm.
    """
    max_norm = load_config(common).training.max_norm
    clippings = {"": [f"--training.max_norm={max_norm}"]}
    if not options.both_clippings:
        return clippings
    if math.isinf(max_norm):
        raise ConfigError(
            "--both_clippings needs a training.max_norm to clip at, got inf; add "
            "--training.max_norm=N with N below the gradient norms"
        )
    return {"unclipped": ["--training.max_norm=inf"], "clipped": clippings[""]}


def write_json(path: Path, verdicts: Mapping[str, Sequence[Verdict]], *, toml: Path) -> None:
    """Write every figure of every verdict."""
    runs = [
        {"clipping": clipping, **asdict(each), "verdict": each.summary(), "why": each.complaints}
        for clipping, group in verdicts.items()
        for each in group
    ]
    path.write_text(json.dumps({"toml": str(toml), "runs": runs}, indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s TOML LAYOUT [LAYOUT ...] [options] [--section.key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("toml", type=Path, metavar="TOML", help="the job")
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT", help="the first is the reference")
    add = parser.add_argument
    add("--steps", type=int, default=10, metavar="N", help="of each training (default 10)")
    add("--timeout", type=float, default=600, metavar="S", help="seconds a layout may take (600)")
    add("--out", type=Path, metavar="DIR", help="keep the runs here; else they are deleted")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--verbose", action="store_true", help="show every step")
    add(
        "--both_clippings",
        action="store_true",
        help="each with max_norm = inf, then with the job's",
    )
    tolerance: dict[str, Any] = {"type": float, "metavar": "X"}
    add("--loss_tolerance", default=TOLERANCES["loss"], **tolerance, help="(1e-5)")
    add("--grad_norm_tolerance", default=TOLERANCES["grad_norm"], **tolerance, help="(1e-4)")
    add("--weights_tolerance", default=WEIGHTS_TOLERANCE, **tolerance, help="(1e-4)")
    return parser


def _check(options: argparse.Namespace, common: Sequence[str]) -> None:
    for word in common:
        if not (word.startswith("--") and "." in option_key(word)):
            raise ConfigError(f"unknown option {word}; the trainer's are --section.key=value")
        if option_key(word) in ("training.steps", "job.dump_folder", "job.config_file"):
            raise ConfigError(f"{option_key(word)} is given as --steps, --out or TOML here")
    if options.steps < 1 or options.timeout <= 0:
        raise ConfigError(
            f"--steps and --timeout must be positive, got {options.steps} and {options.timeout:g}"
        )
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"--out must be a new folder or an empty one, got {options.out}")


def main(argv: Sequence[str]) -> int:
    """Compare, print what was found, and return the exit code."""
    options, extra = _parser().parse_known_args(argv)
    try:
        _check(options, extra)
        file = f"--job.config_file={options.toml}"
        common = (file, *extra, *settings_of_all(steps=options.steps))
        plans = make_plans(options.layouts, common=common)
        clippings = find_clippings(options, common)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.out or Path(temporary)).resolve()
            verdicts = {}
            for name, clipping in clippings.items():
                if name:
                    print(f"{name}:")
                place = folder / name if name else folder
                verdicts[name] = compare(plans, clipping=clipping, folder=place, options=options)
    except UserError as error:
        say(f"error: {error}")
        return error.exit_code
    if options.json is not None:
        write_json(options.json, verdicts, toml=options.toml)
    return int(any(each.complaints for group in verdicts.values() for each in group))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends its ranks
    sys.exit(main(sys.argv[1:]))
