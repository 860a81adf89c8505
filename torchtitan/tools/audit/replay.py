"""Train a step of a run again and look into it, to find out why a loss jumped.

The step is trained from the checkpoint before it. If its loss and gradient norm equal the logged
ones, then what the replay shows is what happened: the outputs of layers, the largest gradients, and
the loss of every token with its sample.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import DataError
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.metrics.rows import RECORD, figure_of, read_rows
from torchtitan.tools.audit.history import Stretch, stretch_of
from torchtitan.tools.audit.rerun import rerun
from torchtitan.tools.audit.watch import CALLBACK, STEP, Seen, columns, places_of, read_seen
from torchtitan.tools.verbs import format_table

FIGURES = ("loss", "grad_norm")
NUM_SHOWN = 10
CONTEXT = 24
"""Tokens that are printed before a label."""
IGNORED = -100


def replay(
    run: Path,
    history: Sequence[Stretch],
    explained: Mapping[str, Any],
    *,
    out: Path | None,
    world_size: int | None,
    settings: Sequence[str],
) -> dict[str, Any]:
    """Train a step again.

    Args:
        run: Folder of the run.
        history: The run's steps.
        explained: The step, as `explain_step` returns it.
        out: Folder for the files. None: they are deleted.
        world_size: Ranks of another layout.
        settings: Settings of another layout.

    Raises:
        UserError: The step cannot be trained again.
    """
    step: int = explained["step"]
    stretch = stretch_of(history, step)
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        rows = rerun(
            run,
            stretch,
            last_step=step,
            out=folder,
            world_size=world_size,
            options=settings,
            callbacks=(CALLBACK,),
            environ={STEP: str(step)},
        )
        ranks = read_seen(folder / "run")
    row = next(row for row in rows if row["step"] == step)
    tokens = _tokens(ranks, [sample["sample"] for sample in explained["samples"]])
    logged = [row for row in read_rows(run / f"{RECORD}.jsonl") if row["step"] == step]
    num_valid = sum(1 for token in tokens if token["label"] != IGNORED)
    return {
        "replayed": {key: row[key] for key in FIGURES},
        "logged": {key: _number(figure_of(logged[-1], key)) for key in FIGURES} if logged else None,
        "from_step": stretch.first_step - 1,
        "modules": _modules(ranks),
        "parameters": _parameters(ranks, grad_norm=row["grad_norm"]),
        "tokens": sorted(tokens, key=lambda token: -token["loss"]),
        "mean_of_tokens": math.fsum(token["loss"] for token in tokens) / max(num_valid, 1),
    }


def _number(figure: float | None) -> float:
    return math.nan if figure is None else figure


def _modules(ranks: Sequence[Seen]) -> list[dict[str, Any]]:
    """Return root mean square and largest element of each module's outputs, in forward order."""
    outputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    widths: dict[str, int] = {}
    for seen in ranks:
        widths |= seen["widths"]
        for name, tokens in seen["outputs"].items():
            outputs[name].append(tokens.flatten(0, 1))
    found = []
    for name, parts in outputs.items():
        norm, largest = torch.cat(parts).unbind(1)
        rms = math.sqrt(float(norm.square().mean()) / widths[name])
        found.append({"module": name, "rms": rms, "largest": float(largest.max())})
    return found


def _parameters(ranks: Sequence[Seen], *, grad_norm: float) -> list[dict[str, Any]]:
    """Return the norms of gradients before clipping and of weights, the largest gradient first.

    The recorded gradients may be clipped, all by the same factor.
    """
    squares: dict[str, dict[str, float]] = {"weights": {}, "weight_gradients": {}}
    largest: dict[str, float] = {}
    for seen in ranks:
        for kind, sums in squares.items():
            for name, shares in seen[kind].items():
                sums[name] = sums.get(name, 0.0) + float(shares[0])
        for name, shares in seen["weight_gradients"].items():
            largest[name] = max(largest.get(name, 0.0), float(shares[1]))
    gradients = squares["weight_gradients"]
    total = math.sqrt(sum(gradients.values()))
    factor = grad_norm / total if total else 0.0
    found = [
        {
            "parameter": name,
            "grad_norm": math.sqrt(square) * factor,
            "weight_norm": math.sqrt(squares["weights"][name]),
            "largest": largest[name] * factor,
        }
        for name, square in gradients.items()
    ]
    return sorted(found, key=lambda each: -each["grad_norm"])


def _tokens(ranks: Sequence[Seen], samples: Sequence[int]) -> list[dict[str, Any]]:
    """Return the loss of each token, with its sample and its place there."""
    found: list[dict[str, Any]] = []
    for seen in ranks:
        if not seen["reports_losses"]:
            continue
        labels, losses = (torch.cat(parts) for parts in zip(*seen["losses"], strict=True))
        if not labels.equal(columns(seen, "labels")):
            raise DataError("the layers of the step see other labels than the loader returns")
        facts = [columns(seen, "tokens"), labels, losses]
        rows = zip(places_of(seen), *(each.tolist() for each in facts), strict=True)
        found += [
            {"sample": samples[i], "place": place, "token": token, "label": label, "loss": loss}
            for (i, place), token, label, loss in rows
        ]
    return found


def replay_lines(seen: Mapping[str, Any], *, tokenizer_path: str) -> Iterator[str]:
    """Yield the result as lines for a terminal."""
    logged, replayed = seen["logged"], seen["replayed"]
    verdict = "not logged"
    if logged is not None:
        verdict = f"logged: {_figures(logged)}"
        if logged == replayed:
            verdict = "equal to the log, bit for bit"
    yield f"trained again from step {seen['from_step']}: {_figures(replayed)}; {verdict}"
    rows = [["module", "rms", "largest"]]
    for each in seen["modules"]:
        rows.append([each["module"], f"{each['rms']:.4g}", f"{each['largest']:.4g}"])
    yield from ["", *format_table(rows), ""]
    rows = [["gradients before clipping", "norm", "largest", "weight"]]
    for each in seen["parameters"][:NUM_SHOWN]:
        figures = (f"{each[key]:.4g}" for key in ("grad_norm", "largest", "weight_norm"))
        rows.append([each["parameter"], *figures])
    yield from format_table(rows)
    yield f"\n{'loss':>8}  sample  place  text before -> label"
    tokenizer = build_tokenizer(tokenizer_path)
    for each in seen["tokens"][:NUM_SHOWN]:
        text = _around(each, seen["tokens"], tokenizer)
        yield f"{each['loss']:>8.3f}  {each['sample']:>6}  {each['place']:>5}  {text}"
    losses: dict[int, list[float]] = defaultdict(list)
    for each in seen["tokens"]:
        if each["label"] != IGNORED:
            losses[each["sample"]].append(each["loss"])
    means = {sample: math.fsum(found) / len(found) for sample, found in losses.items()}
    largest = sorted(means, key=lambda sample: -means[sample])[:NUM_SHOWN]
    yield "\nmean loss of samples: " + ", ".join(f"{k} {means[k]:.3f}" for k in largest)


def _figures(row: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in row.items())


def _around(
    token: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> str:
    before = sorted(
        (other["place"], other["token"])
        for other in tokens
        if other["sample"] == token["sample"] and 0 <= token["place"] - other["place"] < CONTEXT
    )
    text = tokenizer.decode([token for _, token in before])
    return f"{text!r} -> {tokenizer.decode([token['label']])!r}"
