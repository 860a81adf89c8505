"""Names of torchtitan 0.1 and 0.2 that differ here.

A setting that is silently ignored is the worst mistake a trainer can make. Refusing a file that
only spells out a default is the second worst. So a key that is not built is dropped at a value that
requests nothing (`OFF`). Others are refused with a remedy (`REFUSED`), or, if they
change no result or belong to a feature whose switch is refused, get a notice (`UNUSED`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.settings import Layer, Path, keys, literal, spell

OFF: tuple[object, ...] = (None, False, "", [], (), 0, 1, "none", "default", "standard")
"""Values of a switch, list, number, degree, mode or choice that request nothing."""


@dataclass(frozen=True)
class OldNames:
    """Names of another version: a dotted key, a section, or a key with a value, `key = value`."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why, and what to write instead."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Why it has no effect."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Keys with another default there, and what differs."""

    def rename(self, layer: Layer, mistakes: list[str], notices: list[str]) -> Layer:
        """Return a layer by today's names.

        Layers are translated before they are merged, so that a later one with today's name
        overrides an earlier one with the old name.
        """
        result: Layer = {}
        for path, setting in layer.items():
            name = self.renamed.get(".".join(path))
            if name is None:
                result[path] = setting
                continue
            target = tuple(name.split("."))
            today = spell(target, origin=setting.origin)
            if target in layer and layer[target].value != setting.value:
                rule = f"is the old name of {today}, which is {literal(layer[target].value)}"
                mistakes.append(f"{setting.where()}: {rule}; remove one")
            else:
                notices.append(f"{setting.where()}: is torchtitan's name; here it is {today}")
                result.setdefault(target, setting)
        return result

    def refuse(
        self, layer: Layer, mistakes: list[str], notices: list[str], *, tree: type
    ) -> tuple[Layer, set[Path]]:
        """Return the settings without names that are not built here, and those it refuses."""
        kept, wrong = Layer(), set[Path]()
        for path, setting in layer.items():
            refused = _find(self.refused, path, setting.value)
            unused = _find(self.unused, path, setting.value)
            is_off = any(type(x) is type(setting.value) and x == setting.value for x in OFF)
            if refused is None and unused is None:
                kept[path] = setting
            elif is_off and path not in keys(tree):
                continue
            elif refused is not None:
                wrong.add(path)
                mistakes.append(f"{setting.where()}: {refused}")
            else:
                notices.append(f"{setting.where()}: has no effect: {unused}")
        return kept, wrong

    def differences(self, layers: Sequence[Layer], values: Mapping[Path, Any]) -> Iterator[str]:
        """Yield what differs by default for a file with old names, unless it is set or off."""
        tables = (self.renamed, self.refused, self.unused)
        written = [pair for layer in layers for pair in layer.items()]
        old = [x for path, x in written if x.is_in_file and any(_find(t, path) for t in tables)]
        names = {self.renamed.get(".".join(path), ".".join(path)) for path, _ in written}
        for key, difference in self.defaults.items() if old else ():
            switch = (*key.split(".")[:-1], "enable")
            if key not in names and values.get(switch, True):
                file = old[0].origin
                yield f"{file}: written for torchtitan 0.2, where by default {difference}"


def _find(table: Mapping[str, str], path: Path, value: object = None) -> str | None:
    """Return the entry of a value, a key or its sections."""
    items = value if isinstance(value, list) else [value]
    names = [f"{'.'.join(path)} = {item}" for item in items]
    names += [".".join(path[:end]) for end in range(len(path), 0, -1)]
    return next((table[name] for name in names if name in table), None)


_CUSTOM = "custom code is named by import path where it is used (docs/extend.md)"
_FLOAT8 = "weights are gathered in bfloat16, and each rank converts them to float8 after that"
_AC = "this option of recomputation is not built; see activation_checkpoint.mode"
_MX = 'MX formats are not built; write model.converters = ["float8"], or train in bfloat16'
_ESTIMATE = "`torchtitan plan memory --world_size N` estimates the memory of N ranks, on one CPU"
_TORCHFT = "TorchFT is not built in; save often (checkpoint.interval) and restart"
_C4 = 'is not downloaded; save it as JSONL and write dataset = "files" with dataset_path'

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
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "float8.emulate": "quantize.linear.float8.emulate",
}
REFUSED = {
    "job.custom_config_module": _CUSTOM,
    "job.save_config_file": "the resolved settings are always in job.dump_folder",
    "experimental": _CUSTOM,
    "optimizer.early_step_in_backward": "the optimizer runs after the backward pass",
    **{f"training.dataset = {name}": _C4 for name in ("c4", "c4_test", "c4_validation")},
    "parallelism.pipeline_parallel_split_points": "list the modules of each stage in "
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_schedule_csv": "name a schedule: "
    "parallelism.pipeline_parallel_schedule",
    "parallelism.expert_tensor_parallel_degree": "experts are not split; "
    "parallelism.expert_parallel_degree places whole ones on each rank",
    "parallelism.enable_compiled_autograd": "compiled autograd is not built in; compile.enable "
    "compiles the backward of each block",
    "debug.moe_force_load_balance": "routers are not overridden; router.bias_update_rate balances "
    "the experts",
    "checkpoint.load_only": "to try a checkpoint without changing its run, set another "
    "job.dump_folder and checkpoint.initial_load_path, with initial_load_model_only = false",
    "checkpoint.create_seed_checkpoint": "initial weights are equal in every layout, so no seed "
    "checkpoint is needed",
    "fault_tolerance.enable": _TORCHFT,
    "memory_estimation.enable": _ESTIMATE,
    "comm.mode": "process groups are not faked; `torchtitan plan memory --world_size N` plans a "
    "job of N ranks on one CPU",
    "model.converters = mx": _MX,
    "model.converters = quantize.linear.mx": _MX,
}
UNUSED = {
    "job.use_for_integration_test": "remove the line",
    "model.tokenizer_path = ./tests/assets/tokenizer": 'the default is "bpe_2048"',
    "model.print_after_conversion": "the converted model is not printed",
    "training.gc_debug": "training.gc_freq sets how often garbage is collected",
    "parallelism.enable_async_tensor_parallel": "asynchronous tensor parallelism is not built",
    "parallelism.expert_parallel_comm_backend": "tokens are sent by torch's all-to-all",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "remove the line",
    "checkpoint.initial_load_in_hf_quantized": "quantized files are recognized",
    "checkpoint.enable_ft_dataloader_checkpoints": _TORCHFT,
    "fault_tolerance": _TORCHFT,
    "memory_estimation": _ESTIMATE,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": _AC,
    "activation_checkpoint.visualize_memory_budget_pareto": _AC,
    **{
        f"activation_checkpoint.{name}": _AC
        for name in ("early_stop", "preserve_rng_state", "determinism_check", "debug")
    },
    **{f"validation.dataset = {name}": _C4 for name in ("c4", "c4_test", "c4_validation")},
    "quantize.linear.float8.enable_fsdp_float8_all_gather": _FLOAT8,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": _FLOAT8,
    "float8": _FLOAT8,
    "quantize.linear.mx": _MX,
    "mx": _MX,
    "quantize.grouped_mm": "the products of experts are not quantized",
}
OTHER_DEFAULTS = {
    "optimizer.no_decay_params": "norms and biases are decayed; for that write [optimizer] "
    "no_decay_params = []",
    "model.tokenizer_path": 'the tokenizer is another one; here it is "bpe_2048"',
    "training.dataset": 'the data are "c4_test"; here they are "python_stdlib"',
    "training.mixed_precision_param": "layers compute in bfloat16; here only if the device "
    'multiplies it natively; to be sure write [training] mixed_precision_param = "bfloat16"',
    "debug.seed": "each start draws another seed; here it is 0; see [debug] seed",
    "checkpoint.last_save_model_only": "the last checkpoint has only weights; for that write "
    "[checkpoint] last_save_model_only = true",
    "validation.dataset": "validation reads c4_validation; here the dataset of [training]",
    "validation.local_batch_size": "validation reads batches of 8",
    "validation.seq_len": "validation reads 2048 tokens",
}
"""Told of a file for torchtitan that leaves the key out. Validation's only if it is enabled."""
OLD_NAMES = OldNames(RENAMED, REFUSED, UNUSED, OTHER_DEFAULTS)
