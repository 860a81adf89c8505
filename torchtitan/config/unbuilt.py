"""Keys that torchtitan 0.2 and 0.1 files hold and that do nothing here yet.

A setting that is silently ignored is the worst mistake a trainer can make, and refusing a file that
merely spells out a default is the second worst. So each key names the values under which its
absence changes nothing; these load and are dropped, any other value is refused by name with what to
write instead. Building a feature means moving its keys from here into `schema.py`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torchtitan.config.fields import fields
from torchtitan.config.layers import Layer, Path, Setting, literal, same


@dataclass(frozen=True)
class Unbuilt:
    """A key without its feature."""

    harmless: tuple[object, ...]
    instead: str
    switch: str | None = None
    """The key without which this one asks for nothing."""


def _section(
    name: str, instead: str, *, switch: str | None = None, **harmless: object
) -> dict[Path, Unbuilt]:
    """List the keys of one section with the one value of each that changes nothing."""
    section = tuple(name.split("."))
    return {(*section, key): Unbuilt((value,), instead, switch) for key, value in harmless.items()}


_PLUGIN = "own modules are not loaded by name; write a script that calls torchtitan's functions"
_SNAPSHOT = "memory snapshots are not built yet; metrics report the peak of a real step"
_SYNC = "TorchFT is not built in; save often and restart, a run resumes exactly"
_COMPONENTS = (
    "the blocks of the model are what is compiled; the loss is one operator already, and has "
    "nothing to fuse"
)
_COMPILED_AUTOGRAD = (
    "compiling the backward of the whole model is not built in; compile.enable compiles that of "
    "each block"
)
_FLOAT8 = (
    "float8 is not gathered as such; bfloat16 is, and each rank turns it into float8 after that"
)
_MX = "MX formats are not built yet; train in bfloat16 (training.mixed_precision_param)"
_MOE = "mixture-of-experts models are not built yet; use a dense model"
_ASYNC_TENSOR = "asynchronous tensor parallelism is not built yet; its ranks wait for each other"
_SPLIT_POINTS = (
    "stages are not cut by split points; write module_fqns_per_model_part, the modules of each"
)
_LOOK = (
    "to try a checkpoint write another job.dump_folder and initial_load_path, with "
    "initial_load_model_only = false; the run that it is of stays as it is"
)
_QUANTIZED = "quantised Hugging Face weights are not read; take a model in bfloat16 or float32"
_ESTIMATE = "memory estimation is not built yet; metrics report the peak of a real step"
_RECOMPUTE = (
    "this kind of recomputation is not built yet; write mode = none, full, selective or "
    "memory_budget"
)

_IMAGES = "flux makes images, and models of text alone are built here: llama3 and qwen3"
_OTHER_MODEL = "is a model of torchtitan that is not built here; llama3 and qwen3 are"
_SAME_MODEL = 'is llama3, parallelised or supervised in another way; write name = "llama3"'
_DOCUMENTS = (
    'attends within documents; write flavor = "{}" and training.document_attention = "within"'
)

UNBUILT: dict[Path, Unbuilt] = {
    **_section("job", _PLUGIN, custom_config_module=""),
    # It marked a file for torchtitan's own tests; no run ever depended on it.
    ("job", "use_for_integration_test"): Unbuilt((False, True), "remove the line"),
    **_section("profiling", _SNAPSHOT, enable_memory_snapshot=False),
    **_section(
        "profiling",
        _SNAPSHOT,
        switch="profiling.enable_memory_snapshot",
        save_memory_snapshot_folder="memory_snapshot",
    ),
    **_section(
        "model",
        "the converted model is not printed; the log says what is converted",
        print_after_conversion=False,
    ),
    **_section(
        "optimizer",
        "the optimizer runs after the whole backward pass, so that gradients can be clipped",
        early_step_in_backward=False,
    ),
    **_section(
        "training", "looking for leaked cycles is not built in; use the gc module", gc_debug=False
    ),
    **_section("parallelism", _ASYNC_TENSOR, enable_async_tensor_parallel=False),
    **_section(
        "parallelism",
        _SPLIT_POINTS,
        pipeline_parallel_split_points=[],
    ),
    **_section("parallelism", _MOE, expert_parallel_degree=1, expert_tensor_parallel_degree=1),
    **_section(
        "parallelism",
        _MOE,
        switch="parallelism.expert_parallel_degree",
        expert_parallel_comm_backend="standard",
        pipeline_parallel_expert_parallel_overlap=True,
    ),
    **_section("parallelism", _COMPILED_AUTOGRAD, enable_compiled_autograd=False),
    **_section("checkpoint", _QUANTIZED, initial_load_in_hf_quantized=False),
    **_section("checkpoint", _LOOK, load_only=False),
    **_section(
        "checkpoint",
        "initial weights are equal in every layout, so no seed checkpoint is needed",
        create_seed_checkpoint=False,
    ),
    **_section("checkpoint", _SYNC, enable_ft_dataloader_checkpoints=True),
    **_section(
        "activation_checkpoint",
        "which matrix products are recomputed is not chosen by name; every second one is",
        per_op_sac_force_recompute_mm_shapes_by_fqns=["moe.router.gate"],
    ),
    **_section(
        "activation_checkpoint",
        "the curve of budgets is not drawn; metrics report the peak of a real step",
        visualize_memory_budget_pareto=False,
    ),
    **_section(
        "activation_checkpoint",
        _RECOMPUTE,
        early_stop=False,
        preserve_rng_state=True,
        determinism_check="default",
        debug=False,
    ),
    ("compile", "components"): Unbuilt((["model", "loss"], ["model"]), _COMPONENTS),
    **_section(
        "quantize.linear.float8",
        _FLOAT8,
        enable_fsdp_float8_all_gather=False,
        precompute_float8_dynamic_scale_for_fsdp=False,
    ),
    **_section(
        "float8",
        "activation_checkpoint says what is recomputed",
        force_recompute_fp8_weight_in_bwd=False,
    ),
    **_section("quantize.grouped_mm.float8", _MOE, switch="model.converters", fqns=[]),
    **_section(
        "quantize.linear.mx",
        _MX,
        switch="model.converters",
        mxfp8_dim1_cast_kernel_choice="triton",
        filter_fqns=["output"],
    ),
    # The default of 0.2 and that of 0.1's [mx].
    ("quantize", "linear", "mx", "recipe_name"): Unbuilt(
        ("mxfp8_cublas", "mxfp8"), _MX, "model.converters"
    ),
    **_section("mx", _MX, switch="model.converters", use_fp8_dim1_cast_triton_kernel=True),
    **_section(
        "quantize.grouped_mm.mx", _MOE, switch="model.converters", recipe_name="mxfp8", fqns=[]
    ),
    **_section(
        "comm",
        "fake process groups are not built in; start real ranks, gloo on CPU needs no GPU",
        mode="default",
    ),
    **_section("memory_estimation", _ESTIMATE, enable=False),
    **_section(
        "memory_estimation", _ESTIMATE, switch="memory_estimation.enable", disable_fake_mode=False
    ),
    **_section("fault_tolerance", _SYNC, enable=False),
    **_section(
        "fault_tolerance",
        _SYNC,
        switch="fault_tolerance.enable",
        process_group="gloo",
        process_group_timeout_ms=10000,
        replica_id=0,
        group_size=0,
        min_replica_size=1,
        semi_sync_method=None,
        sync_steps=5,
        should_quantize=False,
        fragment_sync_delay=0,
        fragment_update_alpha=0.0,
    ),
    **_section("experimental", _PLUGIN, custom_import="", custom_args_module=""),
    **_section("debug", _MOE, moe_force_load_balance=False),
}

_C4 = (
    'is not downloaded here; to try things out write dataset = "python_stdlib", else save C4 as '
    'JSONL and write dataset = "files" with dataset_path'
)

_NO_C4: dict[object, str] = {"c4": _C4, "c4_test": _C4, "c4_validation": _C4}

MODEL = ("model", "name")
# Models of torchtitan 0.2 of which nothing is built: their files hold keys of their own.
OTHER_MODELS: dict[object, str] = {
    "flux": _IMAGES,
    **dict.fromkeys(
        (
            "deepseek_v3",
            "llama4",
            "gpt_oss",
            "simple_fsdp.deepseek_v3",
            "compiler_toolkit.deepseek_v3",
            "autoparallel.deepseek_v3",
            "autoparallel.local_map_deepseek_v3",
        ),
        _MOE,
    ),
    "vlm": _OTHER_MODEL,
    "llama3-siglip2": _OTHER_MODEL,
    "transformers_modeling_backend": _OTHER_MODEL,
}

# Values of built keys that torchtitan knows and that are not built.
UNBUILT_VALUES: dict[Path, dict[object, str]] = {
    MODEL: {
        **OTHER_MODELS,
        **dict.fromkeys(
            ("llama3_ft", "simple_fsdp.llama3", "compiler_toolkit.llama3", "autoparallel.llama3"),
            _SAME_MODEL,
        ),
    },
    ("model", "flavor"): {
        **dict.fromkeys(("debugmodel_moe", "30B-A3B", "235B-A22B"), _MOE),
        "debugmodel_flex_attn": _DOCUMENTS.format("debugmodel"),
        "debugmodel_varlen_attn": _DOCUMENTS.format("debugmodel"),
        "8B_flex": _DOCUMENTS.format("8B"),
        "8B_varlen": _DOCUMENTS.format("8B"),
    },
    ("training", "dataset"): _NO_C4,
    ("validation", "dataset"): _NO_C4,
    ("model", "converters"): {
        "mx": _MX,
        "quantize.linear.mx": _MX,
        "quantize.grouped_mm.mx": _MOE,
        "quantize.grouped_mm.float8": _MOE,
    },
}
_CONVERTERS, _TENSOR = ("model", "converters"), ("parallelism", "tensor_parallel_degree")
_FLOAT8_KEYS = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
_AC_KEYS = ("early_stop", "preserve_rng_state", "determinism_check", "debug")
# Built keys without which such a value, or a key that is not built, asks for nothing.
SWITCHES: dict[Path, Path] = {
    ("validation", "dataset"): ("validation", "enable"),
    ("checkpoint", "enable_ft_dataloader_checkpoints"): ("fault_tolerance", "enable"),
    ("checkpoint", "initial_load_in_hf_quantized"): ("checkpoint", "initial_load_in_hf"),
    ("compile", "components"): ("compile", "enable"),
    ("float8", "force_recompute_fp8_weight_in_bwd"): _CONVERTERS,
    ("parallelism", "enable_async_tensor_parallel"): _TENSOR,
    ("parallelism", "pipeline_parallel_split_points"): ("parallelism", "pipeline_parallel_degree"),
    **{("quantize", "linear", "float8", key): _CONVERTERS for key in _FLOAT8_KEYS},
    **{("activation_checkpoint", key): ("activation_checkpoint", "mode") for key in _AC_KEYS},
}
OFF: tuple[object, ...] = (False, [], (), 1, "none")
"""Values that switch off: of a feature, a list, a degree, a mode."""


def other_model(settings: Layer) -> str | None:
    """Say that a job is for a model of which nothing is built: no other line can be mended then."""
    given = settings.get(MODEL)
    if given is None or not isinstance(given.value, str) or given.value not in OTHER_MODELS:
        return None
    return f"{given.where()}: {OTHER_MODELS[given.value]}; nothing else of this job was checked"


def without_unbuilt(settings: Layer) -> tuple[Layer, list[str]]:
    """Drop what asks for nothing, refuse what asks for a feature that is not built."""
    kept: Layer = {}
    mistakes = []
    for path, setting in settings.items():
        if _unread(path, settings=settings):
            continue
        if refusal := _refusal(path, setting=setting):
            mistakes.append(f"{setting.where()}: {refusal}")
        elif path in fields() or path not in UNBUILT:
            kept[path] = setting
    return kept, mistakes


def notices(settings: Layer) -> list[str]:
    """Name the keys that shape a feature which is switched off, and not built; a line a feature."""
    without_effect: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, setting in settings.items():
        known = UNBUILT.get(path)
        if unread := _unread(path, settings=settings):
            without_effect[".".join(SWITCHES[path]), unread].append(setting.where())
        if known and known.switch and not _is_harmless(setting, known):
            without_effect[known.switch, known.instead].append(setting.where())
    return [
        f"{'; '.join(places)}: {'has' if len(places) == 1 else 'have'} no effect, {switch} is off "
        f"({instead})"
        for (switch, instead), places in without_effect.items()
    ]


def _unread(path: Path, *, settings: Layer) -> str | None:
    """Say what is not built, or no choice, where the feature that would read it is off."""
    if not _is_off(path, settings=settings):
        return None
    setting, choices = settings[path], fields()[path].choices if path in fields() else ()
    if _refusal(path, setting=setting):
        if path in UNBUILT:
            return UNBUILT[path].instead
        return f"{setting.value} {value_refusal(path, setting=setting)}"
    if choices and isinstance(setting.value, str) and setting.value not in choices:
        return f"{setting.value} is none of {', '.join(choices)}"
    return None


def _is_off(path: Path, *, settings: Layer) -> bool:
    """Tell whether what is not built belongs to a feature that nobody switched on."""
    if path not in SWITCHES:
        return False
    switch, known = settings.get(SWITCHES[path]), fields().get(SWITCHES[path])
    if switch is None or switch.value is None:
        return known is None or any(same(known.default, off) for off in OFF)
    return any(same(switch.value, off) for off in OFF)


def _is_harmless(setting: Setting, known: Unbuilt) -> bool:
    given = (setting.value, [setting.value])  # one word stands for a list of one
    return any(same(form, value) for form in given for value in known.harmless)


def _refusal(path: Path, *, setting: Setting) -> str | None:
    if path in UNBUILT:
        known = UNBUILT[path]
        if known.switch or _is_harmless(setting, known):
            return None
        accepted = " or ".join(literal(value) for value in known.harmless if value is not None)
        only = f"only {accepted} is accepted" if accepted else "remove the line"
        return f"{known.instead} ({only})"
    return value_refusal(path, setting=setting)


def value_refusal(path: Path, *, setting: Setting) -> str | None:
    """Say what to do instead of a value that torchtitan knows and that is not built."""
    unbuilt = UNBUILT_VALUES.get(path, {})
    values = setting.value if isinstance(setting.value, list) else [setting.value]
    return next((unbuilt[v] for v in values if isinstance(v, str) and v in unbuilt), None)
