"""Older spellings: one table from the key that a torchtitan 0.1 or 0.2 file holds to today's.

A file keeps working, and a line in the log says what to write. Each layer is translated on its own
before layers are merged: an override in today's spelling then wins over a base file in the old
one, and only the same file naming both with different values is a contradiction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torchtitan.config.layers import COMMAND_LINE, Layer, Path, Setting, same, spell
from torchtitan.config.unbuilt import UNBUILT, value_refusal
from torchtitan.job import Config

RENAMED: dict[Path, Path] = {
    ("job", "print_args"): ("job", "print_config"),
    ("model", "hf_assets_path"): ("model", "tokenizer_path"),
    ("lr_scheduler", "lr_min"): ("lr_scheduler", "min_lr_factor"),
    ("training", "compile"): ("compile", "enable"),
    ("training", "seed"): ("debug", "seed"),
    ("training", "deterministic"): ("debug", "deterministic"),
    ("checkpoint", "enable_checkpoint"): ("checkpoint", "enable"),
    ("checkpoint", "initial_load_model_weights_only"): ("checkpoint", "initial_load_model_only"),
    ("checkpoint", "last_save_model_weights_only"): ("checkpoint", "last_save_model_only"),
    ("memory_estimation", "enabled"): ("memory_estimation", "enable"),
    ("mx", "recipe_name"): ("quantize", "linear", "mx", "recipe_name"),
    ("mx", "filter_fqns"): ("quantize", "linear", "mx", "filter_fqns"),
    **{
        ("float8", key): ("quantize", "linear", "float8", key)
        for key in (
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "recipe_name",
            "filter_fqns",
            "emulate",
        )
    },
}

# torchtitan 0.2's default names a folder of its own repository: nobody's choice, so no value here.
DEFAULT_ASSETS = "./tests/assets/tokenizer"


DECAY_END = ("lr_scheduler", "decay_end")
FLAVOR = ("model", "flavor")


def as_meant_then(stored: Layer) -> Layer:
    """Give stored settings the meaning that they had in the version that stored them.

    A version stores every setting it has. One without decay_end let the decay end at the last step,
    and its debugmodel is `small` today.
    """
    if DECAY_END in stored:
        return stored
    meant = stored | {DECAY_END: Setting("last_step", "stored settings", DECAY_END, '"last_step"')}
    if FLAVOR in stored and stored[FLAVOR].value == "debugmodel":
        meant[FLAVOR] = replace(stored[FLAVOR], value="small", given='"small"')
    return meant


@dataclass(frozen=True)
class Translated:
    """A layer in today's spelling, with what there is to say about it."""

    layer: Layer
    notices: list[str]
    mistakes: list[str]


def translate(layer: Layer) -> Translated:
    """Rename the old keys of one layer; each renamed setting still tells how it was written."""
    result = Translated({}, [], [])
    for path, setting in layer.items():
        if path not in RENAMED:
            result.layer[path] = setting
        elif (path[-1], setting.value) != ("hf_assets_path", DEFAULT_ASSETS):
            _rename(setting, new=RENAMED[path], given=layer, result=result)
    return result


def _rename(setting: Setting, *, new: Path, given: Layer, result: Translated) -> None:
    today = spell(new, origin=setting.origin)
    other = given.get(new)
    if other is not None and not same(other.value, setting.value):
        result.mistakes.append(
            f"{setting.where()}: is the old name of {today}, which is given as well, with another "
            f"value ({other.given}); remove the old line"
        )
        return
    old = spell(setting.written, origin=setting.origin)
    result.notices.append(f"{setting.origin}: {old} is torchtitan's name; here it is {today}")
    result.layer.setdefault(new, setting)


def other_meanings(
    layers: Sequence[Layer], *, given: Collection[Path], config: Config
) -> list[str]:
    """Say what would be another training in torchtitan, of a job with a file written for that.

    Such a file has a key, or names data, that only torchtitan knows. `given`: the keys that the job
    names, in today's spelling.
    """
    files = [
        setting.origin
        for layer in layers
        for path, setting in layer.items()
        if setting.origin != COMMAND_LINE and _is_torchtitans(path, setting)
    ]
    said = _meanings({".".join(path) for path in given}, config) if files else []
    return [f"{files[0]}: written for torchtitan 0.2, where {meaning}" for meaning in said]


def _is_torchtitans(path: Path, setting: Setting) -> bool:
    return path in RENAMED or path in UNBUILT or bool(value_refusal(path, setting=setting))


def _meanings(given: Collection[str], config: Config) -> Iterator[str]:
    checkpoint, validation, schedule = config.checkpoint, config.validation, config.lr_scheduler
    if config.optimizer.weight_decay and "optimizer.no_decay_params" not in given:
        yield (
            "norms and biases are decayed; here they are not; to decay them write [optimizer] "
            "no_decay_params = []"
        )
    total = schedule.total_steps or config.training.steps
    if schedule.num_warmup_steps(total) > total:
        yield (
            f"a warmup is cut to the length of the schedule; here it is not; to do the same write "
            f"[lr_scheduler] warmup_steps = {total}"
        )
    if "model.tokenizer_path" not in given:
        yield (
            'the default tokenizer is a file of its tests; here it is "bpe_2048", with other ids; '
            "to choose one write [model] tokenizer_path"
        )
    if "training.dataset" not in given:
        yield 'the default data are "c4_test"; here they are "python_stdlib"'
    if "training.mixed_precision_param" not in given:
        yield (
            "layers compute in bfloat16 by default; here only where the device multiplies it by "
            'itself; to be sure write [training] mixed_precision_param = "bfloat16"'
        )
    if "debug.seed" not in given:
        yield "each start draws another seed; here it is 0; to choose one write [debug] seed"
    if checkpoint.enable and "checkpoint.last_save_model_only" not in given:
        yield (
            "the last checkpoint is of weights alone by default; here it is a full one; for the "
            "weights beside it write [checkpoint] last_save_model_only = true"
        )
    keys = {f"validation.{key}" for key in ("dataset", "local_batch_size", "seq_len")}
    if validation.enable and not keys <= set(given):
        yield (
            "validation reads c4_validation in batches of 8 x 2048 tokens by default; here its "
            "dataset, local_batch_size and seq_len are those of [training]"
        )
