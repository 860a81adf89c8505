"""Small jobs, one table for tests and scripts: models, layouts, options.

A job is the TOML of `TINY` or `TINY8`, with the arguments of one entry of `MODELS` and of one of
`LAYOUTS`, and those of any `OPTIONS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TINY = """
[model]
flavor = "tiny"
tokenizer_path = "byte"
[training]
dataset = "synthetic_masked"
seq_len = 32
local_batch_size = 2
global_batch_size = 8
steps = 20
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 5
total_steps = 20
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 100
"""
STEPS = 3
FIXTURES = Path(__file__).parent / "fixtures"
FSDP: tuple[str, ...] = ()
DDP = (
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=1",
)
HSDP = (
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=2",
)
UNSAVED = "--checkpoint.enable=false"
"""For jobs that are not resumed: a save takes half a second of each rank."""
TIED = "--model.tie_embeddings=true"
# four layers are enough for two ranks with two stages each, at half the cost of eight
TINY8 = (
    TINY.replace('"tiny"', '"tiny8"\nnum_layers = 4')
    .replace("local_batch_size = 2", "local_batch_size = 4")
    .replace("\nsteps = 20", f"\nsteps = {STEPS}")
)


def pipeline(schedule: str, *, pp: int = 2, **settings: object) -> tuple[str, ...]:
    """Return the arguments of a pipeline; `settings` are keys of [parallelism]."""
    keys = {
        "pipeline_parallel_degree": pp,
        "pipeline_parallel_schedule": schedule,
        **settings,
    }
    return tuple(f"--parallelism.{key}={value}" for key, value in keys.items())


SIZES = ("--model.dim=16", "--model.hidden_dim=42", "--model.vocab_size=266")
TP2 = "--parallelism.tensor_parallel_degree=2"
COPIED = "--parallelism.enable_sequence_parallel=false"
WHOLE_LOGITS = "--parallelism.disable_loss_parallel"
TWO_STEPS = "--training.steps=2"
DOCUMENTS = ("--training.attn_mask_type=block_causal", "--training.reset_positions=true")
BALANCED = (
    "--model.expert_bias=true",
    "--router.bias_update_rate=0.01",
    "--router.sequence_loss_weight=0.5",
    "--router.global_loss_weight=0.5",
    "--router.z_loss_weight=0.05",
    "--router.log_layers",
)
"""Losses of routers go by counts of the step before, biases by those of this one."""
OWN_THINGS = (
    "--training.dataset=examples.own_dataset:Sums",
    "--training.dataset_options.digits=1",
    "--training.loss=examples.own_hooks:smoothed",
    "--lr_scheduler.decay_type=examples.own_hooks:quadratic",
    "--optimizer.name=examples.own_optimizer:Lion",
    "--optimizer.lr=1e-4",
    "--optimizer.options.betas=[0.9, 0.98]",
    "--metrics.sinks=examples.own_hooks:CsvSink",
)
PP2, PP2_ZBV = pipeline("1F1B"), pipeline("ZBVZeroBubble")
IN_TWOS = "--parallelism.pipeline_parallel_microbatch_size=2"


def cp(degree: int, method: str, balancer: str = "headtail") -> tuple[str, ...]:
    return (
        f"--parallelism.context_parallel_degree={degree}",
        f"--parallelism.context_parallel_rotate_method={method}",
        f"--parallelism.context_parallel_load_balancer={balancer}",
    )


def ep(degree: int) -> str:
    """Return the argument of expert parallelism."""
    return f"--parallelism.expert_parallel_degree={degree}"


def frozen(*patterns: str) -> str:
    return f"--optimizer.frozen_params={json.dumps(patterns)}"


@dataclass(frozen=True)
class Model:
    """The model and its settings, which the reference has too."""

    arguments: tuple[str, ...] = ()
    reads_texts: bool = False
    """Else its samples are synthetic, with masked labels."""
    folder: str = ""
    """Of a config.json in tests/fixtures, which has the sizes."""

    def options(self, texts: Path) -> tuple[str, ...]:
        """Two steps: the second one starts from the first one's weights and moments."""
        data: tuple[str, ...] = ("--training.seq_len=40",)
        if self.reads_texts:
            files = ("--training.dataset=files", f"--training.dataset_path={texts}")
            data = (*files, "--training.seq_len=64")
        sizes: tuple[str, ...] = SIZES
        if self.folder:
            flavor = f"--model.flavor={FIXTURES / self.folder}"
            sizes = ("--model.name=transformers", flavor, "--model.num_layers=none")
        return (*sizes, *data, TWO_STEPS, *self.arguments)


@dataclass(frozen=True)
class Layout:
    """A layout: the degree of each axis, and `halves` where a backward is in two halves."""

    degrees: Mapping[str, int]
    arguments: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return math.prod(self.degrees.values())

    def local_batch_size(self, how: str) -> int:
        """Four for stages, so that each has more than one microbatch; else all 8 samples."""
        size = 4 if "pp" in self.degrees else 8 // self.degrees.get("dp", 1)
        return size // 2 if "accumulating" in how else size

    def options(self, how: str) -> list[str]:
        words = [word for name in how.split(", ") if name for word in OPTIONS[name]]
        size = f"--training.local_batch_size={self.local_batch_size(how)}"
        return [*self.arguments, UNSAVED, size, *words]


FEATURES = {
    "all": Model(),
    "tied": Model((TIED,)),
    "documents": Model(DOCUMENTS, reads_texts=True),
    # all of the first stage among others
    "few": Model(
        (frozen("tok_embeddings.*", *(f"layers.{i}.*" for i in range(3)), "*.wk.*", "norm.*"),)
    ),
    "all but a tied embedding": Model((frozen("tok_*", "layers.*.feed_forward.w1.*"), TIED)),
    "adapter": Model(
        ("--lora.rank=4", "--lora.alpha=8.0", "--optimizer.lr=0.02", frozen("*.3.*.wo.lora_b"))
    ),
    "bfloat16": Model(("--training.mixed_precision_param=bfloat16",)),
}
EXPERTS, DEEPSEEK = "--model.name=qwen3_moe", "--model.name=deepseek_v3"
MISTRAL, MIXTRAL = "--model.name=mistral", "--model.name=mixtral"
MUON = ("--optimizer.name=Muon", "--optimizer.lr=0.02")
GEMMA, GLM = "--model.name=gemma3", "--model.name=glm4_moe"
GPT_OSS = "--model.name=gpt_oss"
GROUPS = '--optimizer.groups=[{params = ["tok*", "*.0.*"], lr = 1e-3}, {params = "*", lr = 5e-4}]'
ADAPTER = ("--lora.rank=4", "--lora.alpha=8.0")
OF_ATTENTION = (*ADAPTER, '--lora.modules=["layers.*.attention.w*"]')
ROUTED = (EXPERTS, *BALANCED, "--training.steps=4", "--training.local_batch_size=8")
PAIRS = ("--training.dataset=synthetic_preferences", *DOCUMENTS, "--training.seq_len=240")
PADDING = ("--training.dataset=synthetic_examples", "--training.seq_len=180")
IN_SIXES = ("--training.global_batch_size=6", "--training.local_batch_size=2")
ODD = "--training.seq_len=41"
# the first layer is dense
THREE_LAYERS = "--model.num_layers=3"
FEW_EXPERTS = (
    "--model.num_experts=2",
    "--model.num_experts_per_token=1",
    "--model.norm_expert_weights=false",  # else a router has no gradient
)
"""Fewer than ranks: each is split by its width, equally over the ranks."""
FAMILIES = {
    "pairs": Model((*PAIRS, "--training.loss=dpo", "--training.loss_options.label_smoothing=0.1")),
    "pairs, adapters": Model((*PAIRS, "--training.loss=ipo", *ADAPTER)),
    "pairs, packed": Model(
        (*PAIRS, "--training.loss=orpo", "--training.packing=packed", "--training.seq_len=512")
    ),
    "pairs, experts": Model(
        (*PAIRS, "--training.loss=simpo", EXPERTS, THREE_LAYERS, "--training.loss_options.beta=1")
    ),
    "experts": Model((EXPERTS, THREE_LAYERS)),
    "experts in four layers": Model((EXPERTS,)),
    "few experts": Model((EXPERTS, THREE_LAYERS, *FEW_EXPERTS)),
    "experts, odd tokens": Model((EXPERTS, ODD, THREE_LAYERS)),
    "experts, in sixes": Model((EXPERTS, *IN_SIXES, THREE_LAYERS)),
    "experts, documents": Model((EXPERTS, *DOCUMENTS, THREE_LAYERS), reads_texts=True),
    "frozen experts": Model((EXPERTS, frozen("*.experts.*"), THREE_LAYERS)),
    "frozen routers, odd tokens": Model((EXPERTS, ODD, frozen("*.router.*"), THREE_LAYERS)),
    "experts, adapters": Model((EXPERTS, *OF_ATTENTION, THREE_LAYERS)),
    "experts, Muon": Model((EXPERTS, *MUON, THREE_LAYERS)),
    "balanced": Model((*ROUTED, THREE_LAYERS)),
    "balanced in four layers": Model(ROUTED),
    "balanced, odd tokens": Model((*ROUTED, ODD, THREE_LAYERS)),
    "balanced, documents": Model((*ROUTED, *DOCUMENTS, THREE_LAYERS), reads_texts=True),
    "balanced, padding": Model((*ROUTED, *PADDING)),
    "DeepSeek": Model((DEEPSEEK, THREE_LAYERS)),
    "DeepSeek in four layers": Model((DEEPSEEK,)),
    "DeepSeek, documents": Model((DEEPSEEK, *DOCUMENTS, THREE_LAYERS), reads_texts=True),
    "DeepSeek, adapters": Model((DEEPSEEK, *OF_ATTENTION, THREE_LAYERS)),
    "GLM": Model((GLM, THREE_LAYERS)),
    "GLM in four layers": Model((GLM,)),
    "Qwen2": Model(("--model.name=qwen2",)),
    "Qwen2, adapters": Model(("--model.name=qwen2", "--lora.rank=4")),
    "Qwen3": Model(("--model.name=qwen3",)),
    # windows of 7 tokens
    "Mistral": Model((MISTRAL,)),
    "Mistral, documents": Model((MISTRAL, *DOCUMENTS), reads_texts=True),
    "Mixtral": Model((MIXTRAL, "--model.num_layers=2")),
    "Mixtral in four layers": Model((MIXTRAL,)),
    # windows of 7 tokens in every second layer
    "OLMo 3": Model(("--model.name=olmo3",)),
    "OLMo 3, adapters": Model(("--model.name=olmo3", *OF_ATTENTION)),
    # sinks, windows and experts with biases
    "GPT-OSS": Model((GPT_OSS, "--model.num_layers=2")),
    "GPT-OSS in four layers": Model((GPT_OSS,)),
    "GPT-OSS, documents": Model((GPT_OSS, *DOCUMENTS, "--model.num_layers=2"), reads_texts=True),
    "Gemma": Model((GEMMA,)),
    "Gemma, documents": Model((GEMMA, *DOCUMENTS), reads_texts=True),
    "OLMo 2": Model(("--model.name=olmo2",)),
    "SmolLM3": Model(("--model.name=smollm3",)),
    "Granite": Model(("--model.name=granite",)),
    "Phi": Model(("--model.name=phi3",)),
    "Muon": Model(MUON),
    "Muon, in sixes": Model((*MUON, *IN_SIXES)),
    "Muon, adapters": Model((*MUON, *ADAPTER, "--optimizer.muon_excluded_params=output.*")),
    "Muon, groups": Model((*MUON, GROUPS)),
    "own family": Model(("--model.name=examples.parallel_block:SPEC", "--model.flavor=tiny")),
    "own things": Model((*OWN_THINGS, WHOLE_LOGITS)),
    # windows of 8 tokens in three layers of four, and norms of heads
    "Exaone": Model(folder="exaone4"),
    "Exaone, documents": Model(DOCUMENTS, reads_texts=True, folder="exaone4"),
    "Exaone, adapters": Model(
        (*ADAPTER, '--lora.modules=["layers.*.self_attn.*_proj"]'), folder="exaone4"
    ),
    # biases, LayerNorm and a tied head
    "Starcoder": Model(folder="starcoder2"),
    "Starcoder, documents": Model(DOCUMENTS, reads_texts=True, folder="starcoder2"),
}
MODELS = FEATURES | FAMILIES
OPTIONS: dict[str, tuple[str, ...]] = {
    "recomputed": ("--activation_checkpoint.mode=full",),
    "half recomputed": ("--activation_checkpoint.mode=selective",),
    "by operator": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    "accumulating": (),
    "chunks": ("--training.loss_chunks=3",),
    "kept": ("--parallelism.fsdp_reshard_after_forward=never",),
    "offloaded": ("--training.enable_cpu_offload",),
    "compiled": ("--compile.enable", "--compile.backend=aot_eager"),
}
LAYOUTS = {
    "one device": Layout({}),
    "fsdp 2": Layout({"dp": 2}),
    "ddp 2": Layout({"dp": 2}, DDP),
    "hsdp 2x2": Layout({"dp": 4}, HSDP),
    "tp 2": Layout({"tp": 2}, (TP2,)),
    "tp 2, stream copied": Layout({"tp": 2}, (TP2, COPIED)),
    "tp 2, logits gathered": Layout({"tp": 2}, (TP2, WHOLE_LOGITS)),
    "fsdp 2 x tp 2": Layout({"dp": 2, "tp": 2}, (TP2,)),
    "ddp 2 x tp 2": Layout({"dp": 2, "tp": 2}, (TP2, *DDP)),
    "pp 2": Layout({"pp": 2}, PP2),
    "pp 2 ZBV": Layout({"pp": 2, "halves": 1}, PP2_ZBV),
    "pp 2 Interleaved x fsdp 2": Layout({"pp": 2, "dp": 2}, pipeline("Interleaved1F1B")),
    "pp 2 ZBV x ddp 2": Layout({"pp": 2, "halves": 1, "dp": 2}, (*PP2_ZBV, *DDP)),
    "pp 2 x tp 2": Layout({"pp": 2, "tp": 2}, (*PP2, TP2, IN_TWOS)),
    "pp 2 DualPipeV x tp 2, nothing else split": Layout(
        {"pp": 2, "halves": 1, "tp": 2}, (*pipeline("DualPipeV"), TP2, COPIED, WHOLE_LOGITS)
    ),
    "cp 2 allgather": Layout({"cp": 2}, cp(2, "allgather")),
    "cp 2 allgather balanced": Layout({"cp": 2}, cp(2, "allgather", "balanced")),
    "cp 2 ring": Layout({"cp": 2}, cp(2, "ring")),
    "cp 2 ulysses": Layout({"cp": 2}, cp(2, "ulysses")),
    "cp 2 ulysses contiguous": Layout({"cp": 2}, cp(2, "ulysses", "none")),
    "cp 4 ring": Layout({"cp": 4}, cp(4, "ring")),
    "cp 4 ulysses": Layout({"cp": 4}, cp(4, "ulysses")),
    "cp 4 allgather contiguous": Layout({"cp": 4}, cp(4, "allgather", "none")),
    "cp 2 ring x fsdp 2": Layout({"cp": 2, "dp": 2}, cp(2, "ring")),
    "cp 2 allgather x ddp 2": Layout({"cp": 2, "dp": 2}, (*cp(2, "allgather"), *DDP)),
    "cp 2 ring x tp 2, stream copied": Layout({"cp": 2, "tp": 2}, (*cp(2, "ring"), TP2, COPIED)),
    "cp 2 ulysses x tp 2": Layout({"cp": 2, "tp": 2}, (*cp(2, "ulysses"), TP2)),
    "cp 2 allgather x pp 2": Layout({"cp": 2, "pp": 2}, (*cp(2, "allgather"), *PP2)),
    "cp 2 ring x pp 2 ZBV": Layout({"cp": 2, "pp": 2, "halves": 1}, (*cp(2, "ring"), *PP2_ZBV)),
    "cp 2 ring balanced x pp 2 x tp 2": Layout(
        {"cp": 2, "pp": 2, "tp": 2}, (*cp(2, "ring", "balanced"), *PP2, TP2, IN_TWOS)
    ),
    "pp 2 ZBV x fsdp 2, weights freed": Layout(
        {"pp": 2, "dp": 2}, pipeline("ZBVZeroBubble", fsdp_reshard_after_forward="always")
    ),
    # only for families
    "fsdp 3": Layout({"dp": 3}),
    "fsdp 4": Layout({"dp": 4}),
    "cp 2 allgather x fsdp 2": Layout({"cp": 2, "dp": 2}, cp(2, "allgather")),
    "ep 2": Layout({"dp": 2}, (ep(2),)),
    "ep 4": Layout({"dp": 4}, (ep(4),)),
    "ep 2 x fsdp 2": Layout({"dp": 4}, (ep(2),)),
    "ep 2 x hsdp 2x2": Layout({"dp": 4}, (*HSDP, ep(2))),
    "ep 2 x tp 2": Layout({"tp": 2}, (TP2, ep(2))),
    "ep 2 x tp 2, stream copied": Layout({"tp": 2}, (TP2, COPIED, ep(2))),
    "ep 2 x tp 2 x fsdp 2": Layout({"tp": 2, "dp": 2}, (TP2, ep(2))),
    "ep 4 x tp 2 x fsdp 2": Layout({"tp": 2, "dp": 2}, (TP2, ep(4))),
    "ep 2 x cp 2 ring": Layout({"cp": 2}, (*cp(2, "ring"), ep(2))),
    "ep 4 x cp 2 ring x fsdp 2": Layout({"cp": 2, "dp": 2}, (*cp(2, "ring"), ep(4))),
    "ep 2 x cp 2 ring x tp 2": Layout({"cp": 2, "tp": 2}, (*cp(2, "ring"), TP2, ep(2))),
    "ep 2 x pp 2 Interleaved x tp 2": Layout(
        {"pp": 2, "tp": 2}, (*pipeline("Interleaved1F1B"), TP2, IN_TWOS, ep(2))
    ),
    "ep 2 x pp 2 x fsdp 2": Layout({"pp": 2, "dp": 2}, (*PP2, ep(2))),
    "ep 2 x pp 2 InterleavedZeroBubble x fsdp 2": Layout(
        {"pp": 2, "dp": 2}, (*pipeline("InterleavedZeroBubble"), ep(2))
    ),
    "ep 2 x pp 2 ZBV x fsdp 2": Layout({"pp": 2, "dp": 2}, (*PP2_ZBV, ep(2))),
    "ep 2 x pp 2 DualPipeV x fsdp 2": Layout({"pp": 2, "dp": 2}, (*pipeline("DualPipeV"), ep(2))),
}
