"""Check that a model with experts trains alike in 77 layouts, on up to 8 ranks.

    python scripts/expert_campaign.py qwen3_moe --json outputs/qwen3_moe.json

Each group of layouts is one `torchtitan compare layouts` of a small job with one device: experts on
1, 2, 4 and 8 ranks with FSDP, HSDP, DDP, tensor, context and pipeline parallelism in each schedule;
recomputed, compiled, offloaded and accumulating; documents; fewer experts than ranks; experts
without tokens; odd numbers of tokens; ranks without a valid label. Further options are those of
`compare layouts`.

Experts and routers start larger than usual, so that they matter from the first step on. The first
of four layers is dense. Exit code 0 if all layouts agree, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

from torchtitan.models.families import MODELS
from torchtitan.models.init import Init, Normal
from torchtitan.models.interface import LanguageModel
from torchtitan.models.sizes import DecoderConfig, MoEConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.pipeline.schedules import SCHEDULES
from torchtitan.tools.compare import command as compare

TOML = ROOT / "train_configs" / "compare_layouts.toml"
NO_SP = "--parallelism.enable_sequence_parallel=false"
FULL = "--activation_checkpoint.mode=full"
SELECTIVE = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option="
COMPILED = "--compile.enable=true --compile.backend=aot_eager"
OFFLOADED = "--training.enable_cpu_offload=true"
WITHIN = "--training.attn_mask_type=block_causal"


def cp(method: str, balancer: str = "headtail") -> str:
    """Return the options of context parallelism."""
    return (
        f"--parallelism.context_parallel_rotate_method={method} "
        f"--parallelism.context_parallel_load_balancer={balancer}"
    )


def pp(schedule: str) -> str:
    """Return the options of a pipeline."""
    return f"--parallelism.pipeline_parallel_schedule={schedule}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layouts of one job."""

    options: tuple[str, ...] = ()
    layouts: tuple[str, ...]


GROUPS = {
    "plain": Group(
        layouts=(
            "fsdp2",
            "fsdp2,ep2",
            "fsdp4,ep2",
            "fsdp4,ep4",
            "fsdp8,ep4",
            "fsdp8,ep8",
            "ddp2",
            "hsdp2x2",
            "hsdp2x2,ep2",
            "hsdp2x4,ep2",
            "hsdp2x4,ep4",
            "tp2",
            "tp2,ep2",
            f"tp2 {NO_SP}",
            f"tp2,ep2 {NO_SP}",
            "tp2,fsdp2,ep2",
            "tp2,fsdp2,ep4",
            "tp4,fsdp2,ep8",
            f"cp2,ep2 {cp('ring')}",
            f"cp2,ep2 {cp('allgather')}",
            f"cp2,ep2 {cp('ulysses')}",
            f"cp2,fsdp2,ep4 {cp('ring')}",
            f"cp2,tp2,ep2 {cp('ring')}",
            f"cp2,tp2,fsdp2,ep8 {cp('allgather')}",
            *(f"pp2,fsdp2,ep2 {pp(schedule)}" for schedule in SCHEDULES),
            f"pp2,fsdp4,ep4 {pp('1F1B')}",
            f"pp2,hsdp2x2,ep2 {pp('ZBVZeroBubble')}",
            f"pp2,tp2,ep2 {pp('Interleaved1F1B')} {FULL}",
            f"pp2,tp2,fsdp2,ep4 {pp('DualPipeV')}",
            f"pp2,cp2,ep2 {pp('1F1B')} {cp('ring')}",
            f"pp2,cp2,tp2,ep4 {pp('ZBVZeroBubble')} {cp('ulysses')}",
        )
    ),
    "kept, recomputed, compiled": Group(
        layouts=(
            "single --training.local_batch_size=2",
            f"fsdp2,ep2 --training.local_batch_size=2 {FULL}",
            f"fsdp4,ep4 {FULL}",
            f"fsdp2,ep2 {SELECTIVE}2",
            f"fsdp2,ep2 {SELECTIVE}op",
            f"tp2,fsdp2,ep4 {SELECTIVE}op",
            f"tp2,ep2 {NO_SP} {FULL}",
            f"fsdp2,ep2 {COMPILED}",
            f"tp2,fsdp2,ep2 {COMPILED} {FULL}",
            f"fsdp4,ep2 {OFFLOADED}",
            "fsdp4,ep2 --parallelism.fsdp_reshard_after_forward=never",
            "fsdp4,ep2 --optimizer.name=AdamW --optimizer.implementation=for-loop",
        )
    ),
    "documents": Group(
        options=("--training.dataset=synthetic", WITHIN),
        layouts=(
            "fsdp4,ep4",
            f"cp2,ep2 {cp('ring', 'balanced')}",
            f"cp4,ep4 {cp('allgather')}",
            f"cp2,fsdp2,tp2,ep4 {cp('ulysses')}",
        ),
    ),
    "balanced": Group(
        options=(
            "--model.expert_bias=true",
            "--router.bias_update_rate=0.01",
            "--router.sequence_loss_weight=0.01",
            "--router.global_loss_weight=0.01",
            "--router.z_loss_weight=0.001",
        ),
        layouts=(
            "fsdp4,ep2 --training.local_batch_size=2",
            "hsdp2x2,ep2",
            f"tp2,fsdp2,ep4 {FULL}",
            f"tp2,ep2 {NO_SP}",
            f"cp2,fsdp2,ep4 {cp('ring')}",
            f"pp2,fsdp2,ep2 {pp('ZBVZeroBubble')}",
            f"pp2,tp2,ep2 {pp('1F1B')} {FULL}",
        ),
    ),
    "two experts": Group(
        options=(
            "--model.num_experts=2",
            "--model.num_expert_groups=1",
            "--model.num_limited_groups=1",
            "--model.num_experts_per_token=1",
            "--model.norm_expert_weights=false",
        ),
        layouts=("fsdp8", "fsdp8,ep2", "tp2,fsdp4,ep2", f"pp2,fsdp4,ep2 {pp('1F1B')}"),
    ),
    "experts without a token": Group(
        options=(
            "--model.num_experts=64",
            "--training.seq_len=8",
            "--training.global_batch_size=8",
        ),
        layouts=("fsdp2", "fsdp8,ep8", f"fsdp2,ep2 {FULL}", "tp2,fsdp2,ep4", "cp2,tp2,ep4"),
    ),
    "odd numbers of tokens": Group(
        options=(
            "--training.seq_len=33",
            "--training.global_batch_size=12",
            "--training.local_batch_size=4",
        ),
        layouts=(
            "fsdp3",
            "fsdp4,ep4",
            "fsdp6,ep2",
            f"tp2,ep2 {NO_SP}",
            f"tp4,ep4 {NO_SP} {FULL}",
        ),
    ),
    "ranks without a label": Group(
        options=("--training.dataset=synthetic_examples", "--training.seq_len=512"),
        layouts=(
            "fsdp8,ep8",
            f"cp4,ep4 {cp('ring', 'none')}",
            f"cp2,fsdp2,ep4 {cp('allgather', 'none')}",
        ),
    ),
}


def strong(family: str) -> ModelSpec:
    """Return a family whose experts and routers start large."""
    spec = MODELS[family]

    def build(config: DecoderConfig) -> LanguageModel:
        model = spec.build(config)
        usual = model.initial

        def initial(name: str) -> Init:
            matters = ".experts." in name or ".router.gate." in name
            return Normal(std=0.3) if matters else usual(name)

        model.initial = initial  # type: ignore[method-assign]
        return model

    return replace(spec, build=build)


FAMILIES = [name for name, spec in MODELS.items() if issubclass(spec.sizes, MoEConfig)]
STRONG = SimpleNamespace(**{name: strong(name) for name in FAMILIES})


def run_group(name: str, *, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Compare a group's layouts with one device, and return the figures of each."""
    print(f"{name}:", flush=True)
    group = GROUPS[name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = [str(TOML), "single", *group.layouts, *arguments, *group.options]
        compare.main(["layouts", *words, f"--json={file}"])
        runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.is_file() else []
    if not runs:
        runs = [{"layout": name, "verdict": "FAILED", "why": ["refused, see above"]}]
    return [{"group": name, **run} for run in runs]


def main(argv: Sequence[str]) -> int:
    """Run the campaign and return the exit code."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--group", choices=list(GROUPS), help="only this group")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of each training (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options, further = parser.parse_known_args(argv)
    model = f"--model.name=scripts.expert_campaign:STRONG.{options.family}"
    arguments = (model, "--model.num_layers=4", f"--steps={options.steps}", *further)
    names = GROUPS if options.group is None else [options.group]
    runs = [run for name in names for run in run_group(name, arguments=arguments)]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(runs, indent=1), encoding="utf-8")
    wrong = [run for run in runs if run["why"]]
    layouts = {(run["group"], run["layout"]) for run in runs if run["verdict"] != "reference"}
    print(f"{len(layouts)} layouts, {len(wrong)} of {len(runs)} trainings diverge or fail")
    for run in wrong:
        print(f"{run['group']}: {run['layout']}: {'; '.join(run['why'])}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
