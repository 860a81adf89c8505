"""Plant known bugs into a job, one at a time, and show that comparing its layouts finds each.

    python -m torchtitan.audit compare --plant my.toml single fsdp2 tp2 cp2

The first layout is the reference and stays right. Each other one is trained as it is, which must
compare equal, and then once for each bug that can occur in it. Bugs of resuming are planted into
the reference's layout too: a run is stopped halfway, and goes on with the bug. The table says by
which figure the comparison notices each, and in which step first: initial weights (start), loss,
gradient norm before clipping, gradients of the first steps, final weights and final optimizer
states. A bug that cannot occur in a layout is named, with the reason.

Exit code 0 every bug that occurs is caught, 1 one is not or a layout diverges by itself, 2 a
mistake.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan.assemble.model import find_model
from torchtitan.audit.compare_layouts import (
    Plan,
    find_routing,
    judge,
    make_plans,
    progress,
    run_plan,
    say,
)
from torchtitan.audit.compare_runs import StoredTensors
from torchtitan.audit.layouts import report
from torchtitan.audit.layouts.gaps import compare_gradients
from torchtitan.audit.layouts.launch import CHECKPOINTS, Outcome, launch, settings_of_all
from torchtitan.audit.layouts.options import build_parser, check_options
from torchtitan.audit.plants import PLANTS, Job
from torchtitan.base.errors import ConfigError, UserError, did_you_mean
from torchtitan.checkpoint.folders import find_steps
from torchtitan.job import load_config

PROG = "python -m torchtitan.audit compare --plant"
FIGURES = ("start", "loss", "grad_norm", "gradients", "weights", "optimizer", "other")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the comparison noticed of one bug in one layout."""

    bug: str
    layout: str
    steps: Mapping[str, int]
    """The first step that each figure is beyond its tolerance in; figures within it have none."""
    problem: str = ""
    """Why the run did not end, if it did not."""

    @property
    def is_caught(self) -> bool:
        """Whether anything was noticed."""
        return bool(self.steps or self.problem)

    @property
    def summary(self) -> str:
        """Say it in a few words."""
        if self.problem:
            return "caught: the run fails"
        if not self.steps:
            return "NOT CAUGHT"
        first = min(self.steps, key=lambda figure: self.steps[figure])
        return f"caught in step {self.steps[first]} by {first}"


def notice(
    plan: Plan, outcome: Outcome, reference: Outcome, *, options: argparse.Namespace
) -> dict[str, int]:
    """Return the figures of a run that are not the reference's, each with its first such step."""
    verdict = judge(plan, outcome, reference, flips=None, routing="", options=options)
    steps: dict[str, int] = {}
    if verdict.unequal:
        steps["start"] = 0
    if verdict.steps is not None:
        for step in verdict.steps.unmatched_steps[:1]:
            steps["other"] = step
        for figure, gap in verdict.steps.gaps.items():
            if gap.beyond:
                name = figure if figure in FIGURES else "other"
                steps[name] = min(gap.beyond[0][0], steps.get(name, options.steps))
    for step, gradient in enumerate(verdict.gradients, start=1):
        if gradient.largest > verdict.gradients_tolerance:
            steps.setdefault("gradients", step)
    if verdict.weights is not None and verdict.weights.largest > verdict.weights_tolerance:
        steps["weights"] = options.steps
    states = reference.final("optimizer"), outcome.final("optimizer")
    if optimizer_gap(*states) > options.weights_tolerance:
        steps["optimizer"] = options.steps
    return steps


def optimizer_gap(reference: StoredTensors, states: StoredTensors) -> float:
    """Return the largest difference of any state, relative to its norm; of one kind at a time,
    since kinds (first and second moments, counts) differ in size by orders."""
    kinds = {name.rpartition(".")[2] for name in (*reference, *states)}
    largest = 0.0
    for kind in sorted(kinds):
        of_kind = [
            {name: each[name] for name in each if name.endswith(f".{kind}")}
            for each in (reference, states)
        ]
        largest = max(largest, compare_gradients(*of_kind).largest)
    return largest


def draws_random_numbers(outcome: Outcome, *, steps: int) -> bool:
    """Return whether the random generators moved in the second half of a run."""
    at = [
        StoredTensors(outcome.folder / CHECKPOINTS / f"step-{step}", "train_state", skip=())
        for step in (steps // 2, steps)
    ]
    names = [name for name in at[0] if name.startswith("rank_")]
    return any(not at[0][name].equal(at[1][name]) for name in names)


class Planting:
    """Trains a job with one bug after the other, and compares each with the reference."""

    def __init__(self, plans: Sequence[Plan], *, folder: Path, options: argparse.Namespace) -> None:
        self._plans, self._folder, self._options = plans, folder, options
        self._bugs = {name: plant for name, plant in PLANTS.items() if name in options.bugs}
        self.obstacles: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """The layouts that a bug cannot occur in, by bug and reason."""
        self.failures: list[str] = []
        """Layouts with which nothing could be shown, and why."""

    def run(self) -> Iterator[Found]:
        """Yield what is noticed, bug by bug."""
        common = self._plans[0].arguments
        replays = find_routing(common, self._options).kinds != ("",)
        reference: Outcome | None = None
        for number, plan in enumerate(self._plans, start=1):
            label = f"[{number}/{len(self._plans)}] {plan.layout.name}"
            replayed = reference.choices if reference is not None and replays else None
            folder = self._folder / f"{number}-right"
            right = run_plan(
                plan, label=label, folder=folder, options=self._options, replayed=replayed
            )
            if right.problem:
                self.failures.append(f"{plan.layout.name}: {right.problem}")
            elif reference is not None and (
                apart := notice(plan, right, reference, options=self._options)
            ):
                self.failures.append(
                    f"{plan.layout.name}: it differs from the reference without a bug, by "
                    f"{', '.join(apart)}; see `compare layouts`"
                )
            else:
                is_reference, reference = reference is None, reference or right
                yield from self._plant(
                    plan, right, reference, is_reference=is_reference, number=number
                )
                continue
            if reference is None:
                return

    def _plant(
        self, plan: Plan, right: Outcome, reference: Outcome, *, is_reference: bool, number: int
    ) -> Iterator[Found]:
        config = load_config(plan.arguments)
        _, sizes = find_model(config.model)
        draws = draws_random_numbers(right, steps=self._options.steps)
        job = Job(config=config, layout=plan.layout, sizes=sizes, rows=reference.rows, draws=draws)
        replayed = (
            reference.choices if find_routing(plan.arguments, self._options).kinds[0] else None
        )
        for name, plant in self._bugs.items():
            if is_reference and not plant.resumes:
                continue
            if why := plant.obstacle(job):
                self.obstacles[name][why].append(plan.layout.name)
                continue
            folder = self._folder / f"{number}-{name}"
            if plant.resumes:
                stop_halfway(right.folder, into=folder / "run", steps=self._options.steps)
            head = f"{plan.layout.name}, {name}"
            outcome = launch(
                plan.arguments,
                world_size=plan.layout.world_size,
                folder=folder,
                timeout_s=self._options.timeout,
                on_wait=progress(head, num_steps=self._options.steps),
                gradient_steps=self._options.gradient_steps,
                replayed=None if plant.resumes else replayed,
                float64=self._options.float64,
                planted=name,
            )
            steps = (
                {} if outcome.problem else notice(plan, outcome, reference, options=self._options)
            )
            found = Found(bug=name, layout=plan.layout.name, steps=steps, problem=outcome.problem)
            say(f"{head}: {found.summary}")
            yield found


def stop_halfway(run: Path, *, into: Path, steps: int) -> None:
    """Copy a run as if it had been stopped after its checkpoint halfway."""
    shutil.copytree(run, into)
    for step in find_steps(into / CHECKPOINTS):
        if step > steps // 2:
            shutil.rmtree(into / CHECKPOINTS / f"step-{step}")


def show(found: Sequence[Found], planting: Planting) -> None:
    """Print the table, what cannot occur, and loudly what was not caught."""
    width = max([len("bug"), *(len(each.bug) for each in found)]) + 2
    wide = max([len("layout"), *(len(each.layout) for each in found)]) + 2
    head = "".join(f"{figure:>10}" for figure in FIGURES)
    report.say(f"{'bug':<{width}}{'layout':<{wide}}{head}  first step beyond tolerance")
    for each in sorted(found, key=lambda each: list(PLANTS).index(each.bug)):
        cells = "".join(f"{each.steps.get(figure, '-')!s:>10}" for figure in FIGURES)
        report.say(f"{each.bug:<{width}}{each.layout:<{wide}}{cells}  {each.summary}")
    occurred = {each.bug for each in found}
    for bug, reasons in planting.obstacles.items():
        why = "; ".join(f"{why} in {', '.join(names)}" for why, names in reasons.items())
        where = "in all of the layouts" if bug in occurred else "here"
        report.say(f"{bug} cannot occur {where}: {why}")
    for failure in planting.failures:
        report.say(f"NOTHING SHOWN for {failure}")
    for each in found:
        if not each.is_caught:
            report.say(f"NOT CAUGHT: {each.bug} in {each.layout}")


def parse(argv: Sequence[str], *, prog: str) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line: the bugs, and of `compare layouts` what makes sense here.

    Raises:
        ConfigError: An option makes no sense, or a bug is unknown.
    """
    parser = build_parser(__doc__ or "", prog=prog)
    parser.add_argument(
        "--bugs", default=",".join(PLANTS), metavar="NAMES", help=f"some of {', '.join(PLANTS)}"
    )
    options, extra = parser.parse_known_args(argv)
    check_options(options, extra)
    for name in ("both_clippings", "verbose"):
        if getattr(options, name):
            raise ConfigError(f"--{name} is of `compare layouts`, and has no meaning here; drop it")
    if options.routing != "both":
        raise ConfigError("--routing cannot be set here: experts are always replayed; drop it")
    if options.steps < 2:
        raise ConfigError(f"--steps must be at least 2, to resume halfway, got {options.steps}")
    options.bugs = options.bugs.split(",")
    for bug in options.bugs:
        if bug not in PLANTS:
            known = f"one of {', '.join(PLANTS)}"
            raise ConfigError(f"--bugs must name {known}, got {bug!r}{did_you_mean(bug, PLANTS)}")
    return options, extra


def main(argv: Sequence[str], *, prog: str = PROG) -> int:
    """Plant, print the table, and return the exit code."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        options, extra = parse(argv, prog=prog)
        settings = settings_of_all(steps=options.steps, interval=options.steps // 2)
        common = (f"--job.config_file={options.toml}", *extra, *settings)
        plans = make_plans(options.layouts, common=common)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.out or Path(temporary)).resolve()
            planting = Planting(plans, folder=folder, options=options)
            found = list(planting.run())
        show(found, planting)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            rows = [{**asdict(each), "caught": each.is_caught} for each in found]
            more = {"cannot_occur": planting.obstacles, "failures": planting.failures}
            options.json.write_text(json.dumps({"bugs": rows, **more}, indent=1), encoding="utf-8")
    except UserError as error:
        say(f"error: {error}")
        return error.exit_code
    return int(bool(planting.failures) or any(not each.is_caught for each in found))
