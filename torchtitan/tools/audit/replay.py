"""A step trained once more and looked at from inside: why did the loss spike?

    python -m torchtitan audit explain RUN --step 100 --replay

The step is trained again from the checkpoint before it. Its loss and gradient norm must be those
that were logged; then what is seen of it is what happened: each layer's outputs, the largest
gradients, and the loss of every token beside the sample that it is from.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import DataError
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.metrics.rows import RECORD, figure_of, read_rows
from torchtitan.tools.audit.history import Stretch, stretch_of
from torchtitan.tools.audit.rerun import rerun
from torchtitan.tools.audit.watch import FOLDER, STEP, columns

FIGURES = ("loss", "grad_norm")
SHOWN = 10
PIECE = 24
"""Tokens of a sample that a token is shown with."""
IGNORED = -100


def replay(
    run: Path,
    history: Sequence[Stretch],
    found: dict[str, Any],
    *,
    out: Path | None,
    world_size: int | None,
    options: Sequence[str],
) -> dict[str, Any]:
    """Train the step that `found` explains once more; return what was seen.

    Raises:
        UserError: It cannot be trained again.
    """
    step: int = found["step"]
    stretch = stretch_of(history, step)
    with tempfile.TemporaryDirectory() as temporary:
        again = rerun(
            run,
            stretch,
            last_step=step,
            out=out or Path(temporary),
            world_size=world_size,
            options=options,
            callbacks=("torchtitan.tools.audit.probe:Probe",),
            environ={STEP: str(step)},
        )
        parts = [
            torch.load(file, weights_only=True)
            for file in sorted((again.folder / FOLDER).glob("rank_*.pt"))
        ]
    row = next(row for row in again.rows if row["step"] == step)
    tokens = _tokens(parts, found)
    # the update sees gradients that may have been clipped: all by the same factor
    parameters = _parameters(parts)
    total = math.sqrt(sum(one["grad_norm"] ** 2 for one in parameters))
    for one in parameters:
        one["grad_norm"] *= row["grad_norm"] / total if total else 0.0
        one["largest"] *= row["grad_norm"] / total if total else 0.0
    num_valid = sum(1 for one in tokens if one["label"] != IGNORED)
    return {
        "replayed": {key: row[key] for key in FIGURES},
        "logged": _logged(run, step),
        "from_step": stretch.first_step - 1,
        "modules": _modules(parts),
        "parameters": sorted(parameters, key=lambda one: -one["grad_norm"]),
        "tokens": sorted(tokens, key=lambda one: -one["loss"]),
        "mean_of_tokens": math.fsum(one["loss"] for one in tokens) / max(num_valid, 1),
    }


def _logged(run: Path, step: int) -> dict[str, float] | None:
    rows = [row for row in read_rows(run / f"{RECORD}.jsonl") if row["step"] == step]
    found = {key: figure_of(rows[-1], key) for key in FIGURES} if rows else {}
    return {key: math.nan if value is None else value for key, value in found.items()} or None


def _modules(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return root mean square and largest value of each module's outputs, in forward order."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    for part in parts:
        for name, outputs in part["outputs"].items():
            seen[name].append(outputs)
    found = []
    for name, outputs in seen.items():
        squares, largest, count = torch.cat(outputs).unbind(1)
        rms = math.sqrt(float(squares.sum() / count.sum().clamp(min=1)))
        found.append({"module": name, "rms": rms, "largest": float(largest.max())})
    return found


def _parameters(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the norms of each parameter and its gradient, as the update gets it."""
    sums: dict[str, torch.Tensor] = {}
    largest: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, seen in part["parameters"].items():
            sums[name] = sums.get(name, torch.zeros(2, dtype=torch.float64)) + seen[:2]
            largest[name] = max(largest[name], float(seen[2]))
    return [
        {
            "parameter": name,
            "grad_norm": math.sqrt(float(grad)),
            "weight_norm": math.sqrt(float(weight)),
            "largest": largest[name],
        }
        for name, (grad, weight) in sums.items()
    ]


def _tokens(
    parts: Sequence[dict[str, Any]],
    found: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the loss of each token, with the sample it is from and its place there."""
    numbers = [sample["sample"] for sample in found["samples"]]
    rows: list[dict[str, Any]] = []
    dp = 1 + max(part["dp_rank"] for part in parts)
    for part in parts:
        if not part["tokens"]:
            continue
        losses = torch.cat([losses for _, losses in part["losses"]])
        labels = torch.cat([labels for labels, _ in part["losses"]])
        batches = part["tokens"]
        if not torch.equal(labels, columns(batches, "labels")):
            raise DataError(
                "the losses of the step could not be told apart by token: its layers saw other "
                "labels than the loader gave; replay it in another layout, as --world_size 1"
            )
        block = len(batches[0]["tokens"])
        samples = [
            numbers[(a * dp + part["dp_rank"]) * block + i]
            for a in range(len(batches))
            for i in range(block)
        ]
        width = batches[0]["tokens"].shape[1]
        told = [columns(batches, key).tolist() for key in ("tokens", "labels", "places")]
        rows += [
            {
                "sample": samples[i // width],
                "place": place,
                "token": token,
                "label": label,
                "loss": loss,
            }
            for i, (token, label, place, loss) in enumerate(
                zip(*told, losses.tolist(), strict=True)
            )
        ]
    return rows


def replay_lines(found: dict[str, Any], *, tokenizer_path: str) -> Iterator[str]:
    """Yield what was seen, for a terminal."""
    seen = found["replay"]
    then, now = seen["logged"], seen["replayed"]
    figures = ", ".join(f"{key} {value!r}" for key, value in now.items())
    if then is None:
        verdict = "it was not logged"
    elif then == now:
        verdict = "as it was logged, bit for bit"
    else:
        verdict = "logged: " + ", ".join(f"{key} {value!r}" for key, value in then.items())
    yield f"trained again from step {seen['from_step']}: {figures}; {verdict}"
    yield f"\n{'module':<40}{'rms':>12}{'largest':>12}"
    for one in seen["modules"]:
        yield f"{one['module']:<40}{one['rms']:>12.4g}{one['largest']:>12.4g}"
    yield f"\n{'gradients before clipping':<40}{'norm':>12}{'largest':>12}{'weight':>12}"
    for one in seen["parameters"][:SHOWN]:
        yield (
            f"{one['parameter']:<40}{one['grad_norm']:>12.4g}{one['largest']:>12.4g}"
            f"{one['weight_norm']:>12.4g}"
        )
    yield f"\n{'loss':>8}  sample  place  what stands before it -> what was to come"
    tokenizer = build_tokenizer(tokenizer_path)
    for one in seen["tokens"][:SHOWN]:
        yield (
            f"{one['loss']:>8.3f}  {one['sample']:>6}  {one['place']:>5}  "
            f"{_around(one, seen['tokens'], tokenizer)}"
        )
    by_sample: dict[int, list[float]] = defaultdict(list)
    for one in seen["tokens"]:
        if one["label"] != IGNORED:
            by_sample[one["sample"]].append(one["loss"])
    means = {number: math.fsum(losses) / len(losses) for number, losses in by_sample.items()}
    worst = sorted(means, key=lambda number: -means[number])[:SHOWN]
    yield "\nmean loss of samples: " + ", ".join(f"{k} {means[k]:.3f}" for k in worst)


def _around(one: dict[str, Any], tokens: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> str:
    """Show a token's text and its label's."""
    before = sorted(
        (other["place"], other["token"])
        for other in tokens
        if other["sample"] == one["sample"] and 0 <= one["place"] - other["place"] < PIECE
    )
    text, label = tokenizer.decode([token for _, token in before]), [one["label"]]
    return f"{text!r} -> {tokenizer.decode(label)!r}"
