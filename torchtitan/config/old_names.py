"""Names of torchtitan 0.1 and 0.2 that differ here: renamed keys, and keys that are not built.

A setting that is silently ignored is the worst mistake a trainer can make. Refusing a file that
only spells out a default is the second worst. So values that request nothing are dropped, others
are refused with what to write instead, or get a notice while their feature is off.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan.config.settings import OldNames, Refused

RENAMED = {
    "job.print_args": "job.print_config",
    "model.hf_assets_path": "model.tokenizer_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "memory_estimation.enabled": "memory_estimation.enable",
    "mx.recipe_name": "quantize.linear.mx.recipe_name",
    "mx.filter_fqns": "quantize.linear.mx.filter_fqns",
    **{
        f"float8.{key}": f"quantize.linear.float8.{key}"
        for key in (
            *("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"),
            *("recipe_name", "filter_fqns", "emulate"),
        )
    },
}
_REMOVE = "remove the line"
_CUSTOM = "custom code is named by import path where it is used (docs/extend.md)"
_FLOAT8 = "weights are gathered in bfloat16, and each rank converts them to float8 after that"
_AC = "this option of recomputation is not built; see activation_checkpoint.mode"
_EXPERTS = "the products of experts are not quantized"
_MX = 'MX formats are not built; write model.converters = ["float8"], or train in bfloat16'
_ESTIMATE = "`torchtitan plan memory --world_size N` estimates the memory of N ranks, on one CPU"
_TORCHFT = "TorchFT is not built in; save often (checkpoint.interval) and restart"
_MODE = ("activation_checkpoint.mode",)
_C4 = 'is not downloaded; save it as JSONL and write dataset = "files" with dataset_path'
REFUSED = {
    "job.custom_config_module": Refused(_CUSTOM),
    "job.use_for_integration_test": Refused(_REMOVE, (False, True)),
    "job.save_config_file": Refused("the resolved settings are always in job.dump_folder"),
    "experimental": Refused(_CUSTOM),
    "model.print_after_conversion": Refused("the converted model is not printed"),
    "optimizer.early_step_in_backward": Refused("the optimizer runs after the backward pass"),
    "training.gc_debug": Refused("training.gc_freq sets how often garbage is collected"),
    "parallelism.enable_async_tensor_parallel": Refused(
        "asynchronous tensor parallelism is not built",
        when=("parallelism.tensor_parallel_degree",),
    ),
    "parallelism.pipeline_parallel_split_points": Refused(
        "list the modules of each stage in parallelism.module_fqns_per_model_part",
        when=("parallelism.pipeline_parallel_degree",),
    ),
    "parallelism.expert_tensor_parallel_degree": Refused(
        "experts are not split; parallelism.expert_parallel_degree places whole ones on each rank"
    ),
    "parallelism.expert_parallel_comm_backend": Refused(
        "tokens are sent to their experts by torch's all-to-all",
        ("standard",),
        when=("parallelism.expert_parallel_degree",),
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Refused(_REMOVE, (False, True)),
    "parallelism.enable_compiled_autograd": Refused(
        "compiled autograd is not built in; compile.enable compiles the backward of each block"
    ),
    "debug.moe_force_load_balance": Refused(
        "routers are not overridden; router.bias_update_rate balances the experts"
    ),
    "parallelism.pipeline_parallel_schedule_csv": Refused(
        "name a schedule: parallelism.pipeline_parallel_schedule"
    ),
    "checkpoint.load_only": Refused(
        "to try a checkpoint without changing its run, set another job.dump_folder and "
        "checkpoint.initial_load_path, with checkpoint.initial_load_model_only = false"
    ),
    "checkpoint.initial_load_in_hf_quantized": Refused(_REMOVE, (False, True)),
    "checkpoint.create_seed_checkpoint": Refused(
        "initial weights are equal in every layout, so no seed checkpoint is needed"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": Refused(
        _TORCHFT, (True,), when=("fault_tolerance.enable",)
    ),
    "fault_tolerance.enable": Refused(_TORCHFT),
    "fault_tolerance": Refused(_TORCHFT, when=("fault_tolerance.enable",)),
    "memory_estimation.enable": Refused(_ESTIMATE),
    "memory_estimation": Refused(_ESTIMATE, when=("memory_estimation.enable",)),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Refused(
        'products are not chosen by name; selective_ac_option = "op" recomputes every second one',
        (["moe.router.gate"],),
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": Refused(
        "the Pareto curve of budgets is not drawn"
    ),
    "activation_checkpoint.early_stop": Refused(_AC, when=_MODE),
    "activation_checkpoint.preserve_rng_state": Refused(_AC, (True,), when=_MODE),
    "activation_checkpoint.determinism_check": Refused(_AC, ("default",), when=_MODE),
    "activation_checkpoint.debug": Refused(_AC, when=_MODE),
    "compile.components": Refused(
        "only the blocks of the model are compiled; the loss is one operator already",
        (["model", "loss"], ["loss", "model"], ["model"]),
        when=("compile.enable",),
    ),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Refused(
        _FLOAT8, when=("model.converters",)
    ),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Refused(
        _FLOAT8, when=("model.converters",)
    ),
    "float8": Refused("see activation_checkpoint.mode", when=("model.converters",)),
    "quantize.linear.mx": Refused(_MX, when=("model.converters", "mx", "quantize.linear.mx")),
    "mx": Refused(_MX, when=("model.converters", "mx", "quantize.linear.mx")),
    "quantize.grouped_mm": Refused(
        _EXPERTS,
        when=("model.converters", "quantize.grouped_mm.mx", "quantize.grouped_mm.float8"),
    ),
    "comm.mode": Refused(
        "process groups are not faked; `torchtitan plan memory --world_size N` plans a job of N "
        "ranks on one CPU",
        ("default",),
    ),
}
VALUES = {
    ("model.hf_assets_path", "./tests/assets/tokenizer"): Refused(_REMOVE),
    **{("training.dataset", name): Refused(_C4) for name in ("c4", "c4_test", "c4_validation")},
    **{
        ("validation.dataset", name): Refused(_C4, when=("validation.enable",))
        for name in ("c4", "c4_test", "c4_validation")
    },
    **{("model.converters", name): Refused(_MX) for name in ("mx", "quantize.linear.mx")},
    **{
        ("model.name", f"{prefix}{name}{suffix}"): Refused(f'write name = "{name}"')
        for name in ("llama3", "deepseek_v3")
        for prefix, suffix in (
            *(("", "_ft"), ("simple_fsdp.", "")),
            *(("compiler_toolkit.", ""), ("autoparallel.", "")),
        )
    },
}
OLD_NAMES = OldNames(RENAMED, REFUSED, VALUES)

OTHER_DEFAULTS: Mapping[str, tuple[str | None, str]] = {
    "optimizer.no_decay_params": (
        "optimizer.weight_decay",
        "norms and biases are decayed; for that write [optimizer] no_decay_params = []",
    ),
    "router.bias_update_rate": (
        "router.bias_update_rate",
        "biases of experts move; for that write [router] bias_update_rate = 1e-3",
    ),
    "model.tokenizer_path": (None, 'the tokenizer is another one; here it is "bpe_2048"'),
    "training.dataset": (None, 'the data are "c4_test"; here they are "python_stdlib"'),
    "training.mixed_precision_param": (
        None,
        "layers compute in bfloat16; here only if the device multiplies it natively; to be sure "
        'write [training] mixed_precision_param = "bfloat16"',
    ),
    "debug.seed": (None, "each start draws another seed; here it is 0; see [debug] seed"),
    "checkpoint.last_save_model_only": (
        "checkpoint.enable",
        "the last checkpoint has weights alone; for that write [checkpoint] last_save_model_only = "
        "true",
    ),
    "validation.dataset": (
        "validation.enable",
        "validation reads c4_validation; here the dataset of [training]",
    ),
    "validation.local_batch_size": ("validation.enable", "validation reads batches of 8"),
    "validation.seq_len": ("validation.enable", "validation reads 2048 tokens"),
}
"""Keys with another default in torchtitan, by the key that switches them on: the difference, told
of a file for torchtitan that leaves the key out."""
