"""Where do two layouts part? The first module whose numbers differ, forwards and then backwards.

    python -m torchtitan compare --bisect my.toml single "fsdp2,tp2"

Both train one step from the same initial weights on the same samples. Then are compared, in this
order and token by token or parameter by parameter: the samples, the weights before the step, each
module's output in the order of the forward, the gradient of each output backwards, and the gradient
of each weight backwards. What differs first is where the mistake is, or right before it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.tools.audit.watch import FOLDER, STEP, columns
from torchtitan.tools.compare.compare_runs import say
from torchtitan.tools.compare.layouts.launch import train
from torchtitan.tools.compare.layouts.words import Layout, fit_local_batch, parse_layout

CALLBACK = "torchtitan.tools.audit.sketch:Sketch"
KINDS: Mapping[str, str] = {
    "samples": "the samples differ",
    "weights": "the weights before the step differ",
    "outputs": "forward: the output differs",
    "gradients": "backward: the gradient of the output differs",
    "weight_gradients": "backward: the gradient of the weight differs",
}
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative to the largest norm in a module: rounding of 32 layers stays well below."""
BETWEEN: Sequence[tuple[str, str, str, str]] = (
    # axis, kind, end of the name, what lies between
    ("cp", "outputs", "attention", "the exchange of keys and values along cp"),
    ("cp", "gradients", "", "the exchange of gradients of keys and values along cp"),
    ("tp", "outputs", "attention", "the sum of wo's partial products along tp"),
    ("tp", "outputs", "feed_forward", "the sum of w2's partial products along tp"),
    ("tp", "outputs", "tok_embeddings", "the sum of the vocabulary's parts along tp"),
    ("tp", "gradients", "", "the sum of gradients of the stream along tp"),
    ("ep", "outputs", "moe", "the exchange of tokens between experts' ranks"),
    ("pp", "outputs", "", "the send from the stage before, if it is the first of a stage"),
    ("pp", "gradients", "", "the send from the stage behind, if it is the last of a stage"),
    ("dp", "weight_gradients", "", "the sum of gradients over data-parallel ranks"),
    ("cp", "weight_gradients", "", "the sum of gradients along cp"),
    ("tp", "weight_gradients", "norm.weight", "the sum of gradients of norms along tp"),
)
"""What ranks send each other right before a number, by axis."""

Place = tuple[int, int]
"""Number of a sample, and place in it."""


@dataclass(frozen=True, kw_only=True)
class Sketched:
    """What all ranks of a layout saw."""

    modules: dict[str, dict[str, dict[Place, list[tuple[int, Tensor]]]]]
    """By kind, name and token: (rank, its two numbers), of each rank that has the token."""
    parameters: dict[str, dict[str, Tensor]]
    """By kind and name: squared norm and product."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that differs."""

    kind: str
    name: str
    said: str


def main(argv: Sequence[str]) -> int:
    """Compare; return 0 if nothing differs, 1 if something does; raise UserError for mistakes."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan compare --bisect",
        description="Name the first module in which two layouts of a job differ.",
        allow_abbrev=False,
    )
    parser.add_argument("toml", type=Path, help="the job")
    parser.add_argument("a", help="the layout that is right, as single")
    parser.add_argument("b", help='the other one, as "fsdp2,tp2 --compile.enable"')
    parser.add_argument("--step", type=int, default=1, help="the step to compare")
    parser.add_argument("--tolerance", type=float, help="relative; by the type of the computation")
    parser.add_argument("--python_b", default=sys.executable, help="another interpreter for B")
    options, extra = parser.parse_known_args(argv)
    if options.step < 1:
        raise ConfigError(f"--step must be at least 1, got {options.step}")
    common = [f"--job.config_file={options.toml.resolve()}", *extra]
    a, b = parse_layout(options.a), parse_layout(options.b)
    sketches, tolerance = [], 0.0
    with tempfile.TemporaryDirectory() as temporary:
        for side, layout in (("a", a), ("b", b)):
            sys.stderr.write(f"{layout.name}: training {options.step} step(s)\n")
            folder = Path(temporary) / side
            words, dtype = _words(common, layout, step=options.step, folder=folder)
            python = options.python_b if side == "b" else sys.executable
            tolerance = max(tolerance, TOLERANCES.get(dtype, TOLERANCES["bfloat16"]))
            sketches.append(_train(words, layout, python=python, folder=folder, step=options.step))
    tolerance = tolerance if options.tolerance is None else options.tolerance
    found, largest = find_difference(*sketches, tolerance=tolerance)
    for kind, gap in largest.items():
        say(f"{kind.replace('_', ' '):<18} differ by at most {gap:.3g}")
    if found is None:
        say(f"no difference above {tolerance:g}")
        return 0
    say(f"{found.name}: {KINDS[found.kind]}: {found.said}")
    for line in _between(found, b):
        say(f"  between it and what is equal: {line}")
    return 1


def _words(
    common: Sequence[str], layout: Layout, *, step: int, folder: Path
) -> tuple[list[str], str]:
    """Return the trainer's command line, and the type in which it computes."""
    words = [*common, *layout.arguments]
    training = load_config(words).training
    whole = training.global_batch_size
    if whole == -1:
        raise ConfigError(
            "two layouts must train on the same batch: set training.global_batch_size, got -1"
        )
    local = fit_local_batch(training.local_batch_size, global_batch_size=whole, layout=layout)
    words += [
        f"--job.dump_folder={folder}",
        f"--training.steps={step}",
        f"--training.local_batch_size={local}",
        "--training.max_norm=inf",
        "--activation_checkpoint.mode=none",  # a block that is recomputed would be seen twice
        "--checkpoint.enable=false",
        "--validation.enable=false",
        "--training.callbacks",
        *training.callbacks,
        CALLBACK,
    ]
    return words, training.mixed_precision_param


def _train(
    words: Sequence[str],
    layout: Layout,
    *,
    python: str,
    folder: Path,
    step: int,
) -> Sketched:
    folder.mkdir()
    train(
        words,
        world_size=layout.world_size,
        log=folder / "output.txt",
        what=f"layout '{layout.name}' could not be trained",
        environ={STEP: str(step)},
        python=python,
    )
    return put_together(
        torch.load(file, weights_only=True) for file in (folder / FOLDER).glob("rank_*.pt")
    )


def put_together(ranks: Iterator[Mapping[str, Any]]) -> Sketched:
    """Put what each rank saw where it belongs, by samples and places."""
    modules: dict[str, Any] = {"samples": {}, "outputs": {}, "gradients": {}}
    parameters: dict[str, dict[str, Tensor]] = {"weights": {}, "weight_gradients": {}}
    for rank in sorted(ranks, key=lambda one: int(one["rank"])):
        whole = _places(rank)
        for key in ("tokens", "labels"):
            numbers = columns(rank["batches"], key)
            # no norm, and an integer is exact
            pairs = torch.stack([torch.ones(len(numbers)), numbers.double()], 1)
            _add(modules["samples"].setdefault(key, {}), whole, pairs, rank=rank["rank"])
        for kind in ("outputs", "gradients"):
            for name, seen in rank[kind].items():
                places = whole if seen.shape[1] == _width(rank) else _places(rank, splits=True)
                if len(places) == seen.shape[0] * seen.shape[1]:
                    into = modules[kind].setdefault(name, {})
                    _add(into, places, seen.flatten(0, 1), rank=rank["rank"])
        for kind, found in parameters.items():
            for name, shares in rank[kind].items():
                found[name] = found.get(name, torch.zeros(2, dtype=torch.float64)) + shares
    return Sketched(modules=modules, parameters=parameters)


def _width(rank: Mapping[str, Any]) -> int:
    width: int = rank["batches"][0]["tokens"].shape[1]
    return width


def _places(rank: Mapping[str, Any], *, splits: bool = False) -> list[Place]:
    """Return sample and place of each of a rank's tokens; `splits`: tp has cut each sequence."""
    dp_rank, dp = rank["dp"]
    found = []
    for a, batch in enumerate(rank["batches"]):
        places, block = batch["places"], len(batch["places"])
        if splits:
            tp_rank, tp = rank["tp"]
            parts = places.chunk(tp, dim=1)
            places = parts[tp_rank] if tp_rank < len(parts) else places[:, :0]
        first = rank["position"] + (a * dp + dp_rank) * block
        found += [(first + i, place) for i, row in enumerate(places.tolist()) for place in row]
    return found


def _add(
    into: dict[Place, list[tuple[int, Tensor]]], places: list[Place], seen: Tensor, *, rank: int
) -> None:
    for place, numbers in zip(places, seen, strict=True):
        into.setdefault(place, []).append((rank, numbers))


def find_difference(
    a: Sketched, b: Sketched, *, tolerance: float
) -> tuple[Difference | None, dict[str, float]]:
    """Return what differs first, and the largest difference of each kind, relative."""
    first: Difference | None = None
    largest: dict[str, float] = {}
    order = [*a.modules["outputs"]]
    turns = [
        ("samples", ["tokens", "labels"]),
        ("weights", [*a.parameters["weights"]]),
        ("outputs", order),
        ("gradients", order[::-1]),
        ("weight_gradients", [*a.parameters["weight_gradients"]][::-1]),
    ]
    for kind, names in turns:
        largest[kind] = 0.0
        for name in names:
            if kind in a.modules:
                gap, said = _compare_tokens(a.modules[kind].get(name), b.modules[kind].get(name))
            else:
                gap, said = _compare_parameter(a.parameters[kind], b.parameters[kind], name)
            largest[kind] = max(largest[kind], gap)
            limit = 0.0 if kind == "samples" else tolerance
            if gap > limit and first is None:
                first = Difference(kind=kind, name=name, said=said)
    return first, largest


def _compare_tokens(
    a: dict[Place, list[tuple[int, Tensor]]] | None,
    b: dict[Place, list[tuple[int, Tensor]]] | None,
) -> tuple[float, str]:
    """Return the largest difference, relative to the largest norm, and where it is."""
    if not a or not b:
        return 0.0, ""  # a gradient that one of the schedules does not show
    if a.keys() != b.keys():
        place = min(a.keys() ^ b.keys())
        return float("inf"), f"sample {place[0]} at {place[1]} is in one of them alone"
    scale = max(float(seen[0][1][0]) for seen in a.values()) or 1.0
    worst, at = 0.0, ""
    for place, seen in a.items():
        [(_, right), *_] = seen
        for rank, numbers in b[place]:
            gap = float((right - numbers).abs().max()) / scale
            gap = float("inf") if gap != gap else gap
            if gap > worst:
                worst = gap
                at = (
                    f"sample {place[0]}, place {place[1]}, rank {rank}: norm {float(right[0]):.6g} "
                    f"and {float(numbers[0]):.6g}, product {float(right[1]):.6g} and "
                    f"{float(numbers[1]):.6g}"
                )
    return worst, f"by {worst:.3g}; {len(a)} tokens; most at {at}"


def _compare_parameter(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], name: str
) -> tuple[float, str]:
    if name not in b:
        return float("inf"), "it is in one of them alone"
    norms = [float(one[name][0].clamp(min=0).sqrt()) for one in (a, b)]
    products = [float(one[name][1]) for one in (a, b)]
    scale = norms[0] or 1.0
    gap = max(abs(x - y) for x, y in (norms, products)) / scale
    gap = float("inf") if gap != gap else gap
    return gap, (
        f"by {gap:.3g}; norm {norms[0]:.6g} and {norms[1]:.6g}, product {products[0]:.6g} and "
        f"{products[1]:.6g}"
    )


def _between(found: Difference, layout: Layout) -> Iterator[str]:
    """Say what ranks of a layout send each other right before what differs."""
    degrees = {
        "cp": layout.degrees["context_parallel_degree"],
        "tp": layout.degrees["tensor_parallel_degree"],
        "pp": layout.degrees["pipeline_parallel_degree"],
        "ep": layout.degrees["expert_parallel_degree"],
        "dp": layout.dp,
    }
    for axis, kind, end, what in BETWEEN:
        if degrees[axis] > 1 and kind == found.kind and found.name.endswith(end):
            yield what
