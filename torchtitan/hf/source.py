"""The weights that a job starts from, where another program wrote them.

`checkpoint.initial_load_path` names a checkpoint of this library, a Hugging Face folder, or a DCP
folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.checkpoint.manager import CheckpointIO
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import ParameterFilter, WeightSource
from torchtitan.checkpoint.start import INITIAL_PATH, LoadMode, find_initial, open_step
from torchtitan.hf.folder import is_hf_folder, open_folder
from torchtitan.hf.model import chosen_rotation, missing_folder
from torchtitan.hf.names import Names
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.settings import ModelConfig
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec


def open_initial(
    requested: LoadMode,
    *,
    settings: CheckpointConfig,
    model: ModelConfig,
    spec: ModelSpec,
    architecture: DecoderConfig,
    optional: Callable[[str], bool] | None,
    io: CheckpointIO | None,
) -> WeightSource:
    """Open what `checkpoint.initial_load_path` names.

    `requested` is what is to be loaded; `optional` selects parameters that the source may lack.
    Raises CheckpointError if it does not exist, is damaged, or is of another model or kind than the
    settings name.
    """
    assert io is not None, "a run without checkpoints starts from none"
    group = io.group
    path, settings = find_initial(settings, folder=io.folder, group=group)
    if settings.load_step != -1 and settings.initial_load_in_hf:
        raise ConfigError.at(
            ("checkpoint.load_step", INITIAL_PATH),
            f"chooses among the steps of a run, got {path}, which has none; remove it",
        )
    chosen = ParameterFilter(
        exclude=() if requested == "recover" else settings.exclude_from_loading,
        optional=optional if requested == "finetune" else None,
    )
    options: dict[str, Any] = {"filter": chosen, "group": group}
    sizes: dict[str, Any] = {"spec": spec, "architecture": architecture}
    if settings.initial_load_in_hf:
        if not on_first_rank(path.is_dir, group=group):
            raise missing_folder(path)
        return open_folder(path, may_differ=chosen_rotation(model), **sizes, **options)
    if on_first_rank(lambda: is_hf_folder(path), group=group):
        raise CheckpointError(
            f"{INITIAL_PATH} {path} is a Hugging Face folder; to start from its weights write "
            f"checkpoint.initial_load_in_hf = true"
        )
    heads = Names(spec.hf, architecture).rope_heads
    return open_step(path, settings=settings, spec=spec, rope_heads=heads, **options)
