"""Find the first module that differs between two layouts, forward and then backward.

Both layouts train one step from the same initial weights on the same samples; `watch.py` records
it. Then are compared, token by token or parameter by parameter: the samples, the weights before the
step, each module's output in forward order, the gradient of each output backward, and the gradient
of each weight backward. The mistake is in the first difference or right before it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.tools.compare.compare_runs import say
from torchtitan.tools.compare.layouts.launch import train
from torchtitan.tools.compare.layouts.words import Layout, fit_local_batch, parse_layout
from torchtitan.tools.compare.watch import CALLBACK, STEP, Seen, columns, places_of, read_seen

KINDS: Mapping[str, str] = {
    "samples": "the samples differ",
    "weights": "the weights before the step differ",
    "outputs": "forward: the output differs",
    "gradients": "backward: the gradient of the output differs",
    "weight_gradients": "backward: the gradient of the weight differs",
}
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative to the largest norm in a module. The rounding of 32 layers is far below."""
Tokens = dict[tuple[int, int], list[tuple[int, Tensor]]]
"""By sample and place: (rank, norm and product), of each rank that has the token."""


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """The records of all ranks of a layout."""

    tokens: dict[str, dict[str, Tokens]]
    """By kind and name of the module."""
    parameters: dict[str, dict[str, Tensor]]
    """By kind and name: squared norm and product."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference."""

    kind: str
    name: str
    text: str


def main(options: argparse.Namespace) -> int:
    """Train and compare, print the result and return the exit code."""
    common = [f"--job.config_file={options.toml.resolve()}", *options.settings]
    a, b = parse_layout(options.a), parse_layout(options.b)
    tolerance, sketches = 0.0, list[Sketch]()
    with tempfile.TemporaryDirectory() as temporary:
        for layout in (a, b):
            sys.stderr.write(f"{layout.name}: training to step {options.step}\n")
            folder = Path(temporary) / str(len(sketches))
            folder.mkdir()
            words, dtype = _arguments(common, layout, step=options.step, folder=folder)
            tolerance = max(tolerance, TOLERANCES.get(dtype, TOLERANCES["bfloat16"]))
            train(
                words,
                world_size=layout.world_size,
                log=folder / "output.txt",
                what=f"layout '{layout.name}' cannot be trained",
                environ={STEP: str(options.step)},
            )
            sketches.append(join(read_seen(folder)))
    tolerance = tolerance if options.tolerance is None else options.tolerance
    found, largest = find_difference(*sketches, tolerance=tolerance)
    for kind, gap in largest.items():
        say(f"{kind.replace('_', ' '):<18} differ by at most {gap:.3g}")
    if found is None:
        say(f"no difference above {tolerance:g}")
        return 0
    say(f"{found.name}: {KINDS[found.kind]}: {found.text}")
    return 1


def _arguments(
    common: Sequence[str], layout: Layout, *, step: int, folder: Path
) -> tuple[list[str], str]:
    """Return the trainer's arguments, and the dtype of its computation."""
    arguments = [*common, *layout.arguments]
    training = load_config(arguments).training
    batch = training.global_batch_size
    if batch == -1:
        raise ConfigError(
            "training.global_batch_size must be set, so that both layouts train on the same batch, "
            "got -1"
        )
    local = fit_local_batch(training.local_batch_size, global_batch_size=batch, layout=layout)
    arguments += [
        f"--job.dump_folder={folder}",
        f"--training.steps={step}",
        f"--training.local_batch_size={local}",
        "--training.max_norm=inf",
        "--activation_checkpoint.mode=none",  # a recomputed block would be recorded twice
        "--checkpoint.enable=false",
        "--validation.enable=false",
        "--training.callbacks",
        *training.callbacks,
        CALLBACK,
    ]
    return arguments, training.mixed_precision_param


def join(ranks: Iterable[Seen]) -> Sketch:
    """Join the records of all ranks by samples and places."""
    tokens: dict[str, dict[str, Tokens]] = {
        kind: defaultdict(lambda: defaultdict(list)) for kind in ("samples", "outputs", "gradients")
    }
    parameters: dict[str, dict[str, Tensor]] = {"weights": {}, "weight_gradients": {}}

    def add(kind: str, name: str, places: Sequence[tuple[int, int]], numbers: Tensor) -> None:
        found = tokens[kind][name]
        for (sample, place), pair in zip(places, numbers, strict=True):
            found[seen["position"] + sample, place].append((seen["rank"], pair))

    for seen in ranks:
        places = places_of(seen)
        width = seen["batches"][0]["tokens"].shape[1]
        for key in ("tokens", "labels"):
            ids = columns(seen, key).double()  # as norm: 1; integers are compared exactly
            add("samples", key, places, torch.stack([torch.ones_like(ids), ids], 1))
        for kind in ("outputs", "gradients"):
            for name, numbers in seen[kind].items():
                own = places if numbers.shape[1] == width else places_of(seen, is_split=True)
                if len(own) == numbers.shape[0] * numbers.shape[1]:
                    add(kind, name, own, numbers.flatten(0, 1)[:, :2])
        for kind, found in parameters.items():
            for name, shares in seen[kind].items():
                found[name] = found.get(name, torch.zeros(2, dtype=torch.float64)) + shares[:2]
    return Sketch(tokens=tokens, parameters=parameters)


def find_difference(
    a: Sketch, b: Sketch, *, tolerance: float
) -> tuple[Difference | None, dict[str, float]]:
    """Return the first difference, and the largest relative difference of each kind."""
    first: Difference | None = None
    largest: dict[str, float] = {}
    modules = [*a.tokens["outputs"]]
    names_of = {
        "samples": ["tokens", "labels"],
        "weights": [*a.parameters["weights"]],
        "outputs": modules,
        "gradients": modules[::-1],
        "weight_gradients": [*a.parameters["weight_gradients"]][::-1],
    }
    for kind, names in names_of.items():
        largest[kind] = 0.0
        for name in names:
            if kind in a.tokens:
                gap, text = _compare_tokens(a.tokens[kind].get(name), b.tokens[kind].get(name))
            else:
                gap, text = _compare_parameter(a.parameters[kind], b.parameters[kind], name)
            largest[kind] = max(largest[kind], gap)
            if gap > (0.0 if kind == "samples" else tolerance) and first is None:
                first = Difference(kind=kind, name=name, text=text)
    return first, largest


def _compare_tokens(a: Tokens | None, b: Tokens | None) -> tuple[float, str]:
    """Return the largest difference relative to the largest norm, and its token."""
    if not a or not b:
        return 0.0, ""  # a gradient that one of the schedules does not expose
    if a.keys() != b.keys():
        sample, place = min(a.keys() ^ b.keys())
        return math.inf, f"only one layout has sample {sample}, place {place}"
    scale = max(float(seen[0][1][0]) for seen in a.values()) or 1.0
    worst, text = 0.0, ""
    for (sample, place), [(_, x), *_] in a.items():
        for rank, y in b[sample, place]:
            gap = float((x - y).abs().max()) / scale
            gap = math.inf if math.isnan(gap) else gap
            if gap > worst:
                worst = gap
                text = f"sample {sample}, place {place}, rank {rank}: {_numbers(x, y)}"
    return worst, f"by {worst:.3g}; {len(a)} tokens; most at {text}"


def _compare_parameter(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], name: str
) -> tuple[float, str]:
    if name not in b:
        return math.inf, "only one layout has it"
    x, y = (torch.stack([one[name][0].clamp(min=0).sqrt(), one[name][1]]) for one in (a, b))
    gap = float((x - y).abs().max()) / (float(x[0]) or 1.0)
    gap = math.inf if math.isnan(gap) else gap
    return gap, f"by {gap:.3g}; {_numbers(x, y)}"


def _numbers(x: Tensor, y: Tensor) -> str:
    return f"norm {x[0]:.6g} and {y[0]:.6g}, product {x[1]:.6g} and {y[1]:.6g}"
