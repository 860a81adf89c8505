"""What activation checkpointing costs in time, and what it saves in memory.

    none              all that a block computed is kept for backward
    full              every block is computed again
    every 2nd block   every second one is
    by operator       every block is, but for its dearest operators (without --compile)
    budget 0.5        the compiler keeps half of what it would (with --compile)

Every policy is a job of its own in one process, with the loop's own optimizer step, and they take
turns of --steps steps on the same batch; their losses must agree. Each is compared with "none",
compiled if that is. Peak memory is that of a process of its own for each: on a GPU what the
allocator has handed out, on a CPU the resident set, less what it was before the model was built.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.pairs import (
    CLOCKS,
    Comparison,
    Report,
    check_close,
    read_clocks,
    spent_since,
)
from scripts.benchmarks.ranks import run_ranks
from scripts.benchmarks.turns import TOLERANCES, peak_gib
from torchtitan.base.device import device_name
from torchtitan.build import build_run
from torchtitan.job import load_config
from torchtitan.mesh.ranks import RankInfo
from torchtitan.models.families import find_model
from torchtitan.models.settings import ModelConfig
from torchtitan.optim.clip import clip_gradients, global_norm
from torchtitan.optim.loss import count_valid
from torchtitan.optim.optimizer import optimizer_step

SUMMARY = "activation checkpointing: time and memory of each policy"
NONE = "none"
SELECTIVE = "--activation_checkpoint.mode=selective"
ALWAYS = {
    NONE: ("--activation_checkpoint.mode=none",),
    "full": ("--activation_checkpoint.mode=full",),
    "every 2nd block": (SELECTIVE, "--activation_checkpoint.selective_ac_option=2"),
}
PLAIN = {"by operator": (SELECTIVE, "--activation_checkpoint.selective_ac_option=op")}
COMPILED = {
    "budget 0.5": (
        "--activation_checkpoint.mode=memory_budget",
        "--activation_checkpoint.memory_budget=0.5",
    )
}
STEPS_FOR_MEMORY = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--flavor", default="small", metavar="NAME", help="size of llama3")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="computed in")
    parser.add_argument("--compile", action="store_true", help="compile all blocks")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples")
    parser.add_argument("--seq_len", type=int, default=128, metavar="N", help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="in a measurement")


def measure(args: argparse.Namespace) -> Report:
    """Let all policies take turns, then measure the memory of each.

    Raises:
        UserError: A setting is refused, or two policies do not compute the same.
    """
    policies = find_policies(compiled=args.compile)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "plot")}
    load_config(_describe_job(settings, policy=NONE, folder=Path("unused")))
    found = run_ranks(take_turns, settings | {"policies": list(policies)}, ranks=1)
    gaps = {
        name: check_close(
            f"losses of {name} and {NONE}",
            losses,
            found["losses"][NONE],
            tolerance=TOLERANCES[args.dtype],
        )
        for name, losses in found["losses"].items()
    }
    memory = {
        name: run_ranks(measure_peak, settings | {"policy": name}, ranks=1)["above_start_gib"]
        for name in policies
    }
    comparisons = [
        Comparison(
            f"{name} / {NONE}, {clock}",
            "",
            [each[clock] for each in found["spent"][name]],
            [each[clock] for each in found["spent"][NONE]],
        )
        for name in policies
        if name != NONE
        for clock in (CLOCKS if found["device_type"] == "cpu" else CLOCKS[:1])
    ]
    names = ("flavor", "batch", "seq_len", "steps", "compile", "dtype")
    return Report(
        about={name: getattr(args, name) for name in names}
        | {"device": found["device"], "torch": torch.__version__},
        comparisons=comparisons,
        notes=[
            f"losses agree to {max(gaps.values()):.1e}, {TOLERANCES[args.dtype]:g} is allowed",
            *(
                f"peak memory, {name}: {peak:.3f} GiB above the start of its process, "
                f"{peak / memory[NONE]:.2f} of {NONE}"
                for name, peak in memory.items()
            ),
        ],
        more={"memory_gib": memory, "gaps": gaps},
    )


def find_policies(*, compiled: bool) -> dict[str, tuple[str, ...]]:
    """Return the policies that there are, each with its settings."""
    return ALWAYS | (COMPILED if compiled else PLAIN)


def _describe_job(settings: dict[str, Any], *, policy: str, folder: Path) -> list[str]:
    _, architecture = find_model(ModelConfig(flavor=settings["flavor"]))
    tokenizer = "bpe_2048" if architecture.vocab_size >= 2048 else "byte"
    return [
        f"--job.dump_folder={folder / policy.replace(' ', '_')}",
        f"--model.flavor={settings['flavor']}",
        f"--model.tokenizer_path={tokenizer}",
        "--optimizer.lr=1e-4",
        "--training.dataset=synthetic",
        f"--training.seq_len={settings['seq_len']}",
        f"--training.local_batch_size={settings['batch']}",
        f"--training.mixed_precision_param={settings['dtype']}",
        *find_policies(compiled=settings["compile"])[policy],
        *(["--compile.enable"] if settings["compile"] else []),
    ]


class _Policy:
    """A model under one policy, and its optimizer step without the trainer around it."""

    def __init__(
        self, name: str, settings: dict[str, Any], *, launch: RankInfo, folder: Path
    ) -> None:
        job = _describe_job(settings, policy=name, folder=folder)
        self.run = run = build_run(load_config(job), launch=launch, color=False, undo=ExitStack())
        [samples, *_] = next(run.loader)
        self._batch = run.sequence_shard.take(samples).to(run.device)
        self._divisor = count_valid(self._batch.labels)
        self._parameters = list(run.model.parameters())
        self._losses: list[torch.Tensor] = []

    def optimizer_steps(self, num_steps: int) -> None:
        """Train on the one batch."""
        for _ in range(num_steps):
            loss = self.run.execution.forward_backward([self._batch], divisor=self._divisor)
            norm = global_norm(self._parameters, loss=loss)
            clip_gradients(self._parameters, norm=norm, max_norm=1.0)
            optimizer_step(self.run.optimizer, norm=norm)
            self._losses.append(loss / self._divisor)

    def losses(self) -> list[float]:
        """Return the mean loss of each step so far."""
        return [float(loss) for loss in self._losses]


def take_turns(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Let each policy take its steps, again and again."""
    policies = {
        name: _Policy(name, settings, launch=launch, folder=folder) for name in settings["policies"]
    }
    spent: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
    for _ in range(settings["pairs"] + 1):
        for name, policy in policies.items():
            before = read_clocks()
            policy.optimizer_steps(settings["steps"])
            spent[name].append(spent_since(before))
    device = policies[NONE].run.device
    return {
        "spent": {name: times[1:] for name, times in spent.items()},
        "losses": {name: policy.losses() for name, policy in policies.items()},
        "device": device_name(device),
        "device_type": device.type,
    }


def measure_peak(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Take a few steps under one policy, and return the peak of memory."""
    start = peak_gib()
    _Policy(settings["policy"], settings, launch=launch, folder=folder).optimizer_steps(
        STEPS_FOR_MEMORY
    )
    return {"above_start_gib": peak_gib() - start}
