"""What `import torchtitan` offers: jobs, training and trained models from Python (docs/config.md).

The same job trains the same model from a shell, a script under torchrun and a notebook. The only
difference is who ends: a command reports a mistake and exits, a function raises it and leaves the
process as it was. There is no trainer object to hold on to: a run is its folder, from which it
resumes and from which its model is loaded.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.base.custom import trusting_stored
from torchtitan.base.device import local_device
from torchtitan.base.errors import CheckpointError, ConfigError, UserError
from torchtitan.base.log import note_in_file
from torchtitan.callbacks import check_callback
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.config.settings import (
    CONFIG_FILE,
    PYTHON,
    Layer,
    Setting,
    checked,
    flatten,
)
from torchtitan.data.settings import SUPERVISED
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.lora import apply_lora
from torchtitan.generate.generator import DTYPES, Generator, Pretrained, build_generator, read_model
from torchtitan.generate.sampling import Sampling
from torchtitan.generate.text import answer, complete
from torchtitan.hf.config import architecture_of, family_of, read_config
from torchtitan.hf.folder import open_folder
from torchtitan.hf.names import CONFIG, eos_ids, read_stop_ids, tokenizer_file
from torchtitan.job import Config, load_job
from torchtitan.mesh.ranks import on_first_rank, read_rank_info
from torchtitan.mesh.stop import interrupt, watch_signals
from torchtitan.metrics.rows import RECORD, Row, read_rows
from torchtitan.models.families import MODELS, find_model
from torchtitan.optim.loss import build_loss
from torchtitan.resume_rules import find_run_step, read_settings
from torchtitan.train import prepare_process, train_job

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Config",
    "Result",
    "UserError",
    "chat",
    "generate",
    "load_config",
    "load_generator",
    "load_model",
    "load_tokenizer",
    "train",
]
logger = logging.getLogger(__name__)
_has_trained_ranks = Event()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `train`, the same on every rank."""

    step: int
    """The last finished step."""
    loss: float | None
    """The loss of the last logged step; None if none was logged, or it had no labels."""
    validation_loss: float | None
    """The last that was measured; None if none was."""
    tokens: int
    """Tokens seen, by earlier starts of the run too."""
    folder: Path
    """The run's folder, job.dump_folder."""
    reason: str | None
    """Why the run was stopped before its last step; None if it was not."""
    rows: list[Row] = field(repr=False)
    """The figures of each logged step, those of earlier starts of the run too: the lines of its
    metrics.jsonl."""


def load_config(path: str | os.PathLike[str] | None = None, **overrides: object) -> Config:
    """Return the settings of a TOML file, or the defaults, with `overrides` over them.

    An override is a section, `training={"steps": 20}`, or one key, `**{"training.steps": 20}`. Its
    value is a TOML value, a path or a tuple. None restores the default.

    Raises:
        UserError: Lists every mistake in the file and the overrides, with its remedy.
    """
    layer: Layer = {}
    if path is not None:
        file = os.fspath(path)
        layer[CONFIG_FILE] = Setting(file, PYTHON, ("path",))
    for name, value in overrides.items():
        *section, last = name.split(".")
        values = {last: _as_toml(value)}
        layer |= flatten(values, origin=PYTHON, tree=Config, prefix=tuple(section))
    return load_job(layer).config


def _as_toml(value: object) -> object:
    """Turn what Python has more types for into what TOML holds."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _as_toml(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_toml(item) for item in value]
    return value


def train(config: Config, *, callbacks: Sequence[object] = ()) -> Result:
    """Train a job in this process, until its end or until it is asked to stop.

    `callbacks` follow the run, after those of the settings: objects with any of the methods of
    `torchtitan.callbacks.Callbacks`, the same on every rank.

    Alone it is one rank; under torchrun each rank calls it, once. Ctrl-C (SIGINT), SIGTERM and
    SIGUSR1 stop the run after the step and save it; a second one, or one before the first step,
    raises KeyboardInterrupt. Only the main thread gets signals. Another call with the same `config`
    resumes where the run was stopped.

    Raises:
        UserError: A setting, a file or a checkpoint must be fixed, or the loss is not finite.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"train needs a Config, got a {type(config).__name__}; write "
            f"train(load_config(path, training={{...}}))"
        )
    if dist.is_initialized() or _has_trained_ranks.is_set():
        # a second process group of several ranks would find the first one's addresses
        raise ConfigError(
            "train makes its own process group, with several ranks only once per process; call "
            "torch.distributed.destroy_process_group() first, or train in another process"
        )
    config = checked(config)
    for number, callback in enumerate(callbacks):
        check_callback(callback, path=f"callbacks[{number}]")
    with watch_signals(leave=interrupt) as stop, ExitStack() as cleanup, torch.enable_grad():
        launch = prepare_process(cleanup)
        if launch.world_size > 1:
            _has_trained_ranks.set()
        try:
            trainer, stopped = train_job(
                config,
                launch=launch,
                stop=stop,
                cleanup=cleanup,
                wording=nullcontext(),
                callbacks=callbacks,
            )
            progress, folder = trainer.run.progress, trainer.run.folder
            rows = on_first_rank(
                lambda: [dict(row) for row in read_rows(folder / f"{RECORD}.jsonl")],
                group=dist.group.WORLD,
            )
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            is_known = isinstance(error, UserError)
            note_in_file(str(error) if is_known else traceback.format_exc())
            raise
        if stopped is not None:
            logger.warning(stopped)
        validated = [loss for row in rows if (loss := row.get("validation_loss")) is not None]
        return Result(
            step=progress.step,
            loss=rows[-1]["loss"] if rows else None,
            validation_loss=validated[-1] if validated else None,
            tokens=progress.tokens_seen,
            folder=folder,
            reason=stopped,
            rows=rows,
        )


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    trust_code: bool = False,
) -> nn.Module:
    """Return the full model of a run, a step or a Hugging Face folder, on one device.

    `model(tokens)` returns the logits (B, S, V) of the tokens (B, S). With `labels=` (B, S) it
    returns the summed cross-entropy, without labels of -100.

    Args:
        path: The folder. A run means its newest complete step.
        device: Default: a GPU if there is one.
        dtype: Default: that of the stored weights.
        trust_code: Import the module of a custom model that the folder names.

    Raises:
        UserError: The folder is damaged, holds no model, or names code that is not trusted.
    """
    with trusting_stored(trust_code):
        pretrained = find_pretrained(Path(path).expanduser())
    model = read_model(pretrained, device=_device(device), dtype=_dtype_name(dtype))
    assert model.output is not None
    model.output.loss = build_loss(None)
    return model.eval()


def find_pretrained(
    path: Path, *, verify: bool = True, group: dist.ProcessGroup | None = None
) -> Pretrained:
    """Return the model of a folder, on the meta device, and where its weights are.

    Args:
        path: A run, a step or a Hugging Face folder.
        verify: Compare the checksums of a step.
        group: Ranks that call this together.

    Raises:
        UserError: The folder is damaged or holds no model.
    """
    if not (path / CONFIG).is_file():
        step = find_run_step(path, verify=verify, group=group)
        job = read_settings(step)
        spec, architecture = find_model(job.model)
        model, lora = spec.build_meta(architecture), job.lora
        if lora.rank:
            apply_lora(model, settings=lora, names=spec.hf.names)
        return Pretrained(
            spec=spec,
            model=model,
            weights=Checkpoint(path=step, group=group),
            dtype=job.training.dtype,
            tokenizer=job.model.tokenizer_path,
            chat_template=job.training.chat_template,
            stop_ids=frozenset(),
            begins=job.training.dataset in SUPERVISED,  # text has no begin token
        )
    config = read_config(path)
    spec = family_of(config, models=MODELS)
    architecture = architecture_of(config, spec=spec)
    dtype = config.get("dtype", config.get("torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{config.path}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.60}"
        )
    return Pretrained(
        spec=spec,
        model=spec.build_meta(architecture),
        weights=open_folder(path, spec=spec, architecture=architecture, group=group),
        dtype=dtype,
        tokenizer=str(path),
        chat_template=None,
        stop_ids=read_stop_ids(path) or eos_ids(config),
        begins=True,
    )


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a run, a step or a folder of Hugging Face, or the one of a file or a
    name, as model.tokenizer_path takes it.

    Raises:
        UserError: There is none.
    """
    name, folder = os.fspath(path), Path(path).expanduser()
    if folder.is_dir() and not any((folder / n).exists() for n in ("tokenizer.json", CONFIG)):
        name = read_settings(find_run_step(folder, verify=False)).model.tokenizer_path
    return build_tokenizer(name)


def load_generator(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    chats: bool = False,
    trust_code: bool = False,
    mesh: DeviceMesh | None = None,
    verify: bool = True,
    tokenizer: str | None = None,
    chat_template: str | None = None,
) -> Generator:
    """Return the model of `load_model` with its tokenizer, to generate from it more than once.

    Args:
        path: A run, a step or a Hugging Face folder.
        device: This rank's device. Default: a GPU if there is one.
        dtype: Default: that of the stored weights.
        chats: Look for a chat template too, for `chat`.
        trust_code: Import the module of a custom model that the folder names.
        mesh: Ranks that share the model's matrices. None: this rank holds the model.
        verify: Compare the checksums of a step.
        tokenizer: As model.tokenizer_path. Default: the folder's.
        chat_template: Jinja file. Default: the folder's.

    Raises:
        UserError: The folder is damaged or holds no model, its tokenizer is missing, or the model
            cannot be split over so many ranks.
    """
    group = None if mesh is None else mesh.get_group()
    with trusting_stored(trust_code):
        pretrained = find_pretrained(Path(path).expanduser(), verify=verify, group=group)
    tokenizer = tokenizer or pretrained.tokenizer
    file = tokenizer_file(tokenizer)
    pretrained = replace(
        pretrained,
        tokenizer=tokenizer,
        chat_template=chat_template or pretrained.chat_template,
        stop_ids=pretrained.stop_ids | (read_stop_ids(file.parent) if file else frozenset()),
    )
    return build_generator(
        pretrained, device=_device(device), mesh=mesh, chats=chats, dtype=_dtype_name(dtype)
    )


def generate(
    source: str | os.PathLike[str] | Generator,
    prompts: Sequence[str],
    *,
    special: bool = False,
    **sampling: Unpack[Sampling],
) -> list[str]:
    """Return each prompt with its continuation, by the model of a folder or of `load_generator`.

    A text ends at an end token, or after `max_new_tokens` (200). Each prompt is drawn with the same
    `seed`, independently of the other prompts.

    Args:
        source: A folder as in `load_model`, or the result of `load_generator`.
        prompts: Texts.
        special: Names of special tokens in a prompt mean these tokens, not plain text.
        sampling: `max_new_tokens`, `seed`, `temperature` (0: the likeliest token), `top_k`.

    Raises:
        UserError: The folder holds no model or no tokenizer, or an argument is invalid.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts must be a list of texts, got one text")
    generator = source if isinstance(source, Generator) else load_generator(source)
    return complete(generator, prompts, special=special, **sampling)


def chat(
    source: str | os.PathLike[str] | Generator,
    messages: Sequence[Mapping[str, object]],
    **sampling: Unpack[Sampling],
) -> str:
    """Return the next message of the assistant, by the model of a folder or of `load_generator`.

    `messages` are the chat so far, each as {"role": "user", "content": "Hi"}. Other arguments are
    those of `generate`.

    Raises:
        UserError: As `generate`, or the chat template is missing, or a message is invalid.
    """
    generator = source if isinstance(source, Generator) else load_generator(source, chats=True)
    if generator.template is None:
        raise ConfigError("chat needs a chat template; load it: load_generator(path, chats=True)")
    return answer(generator, [messages], **sampling)[0]


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return local_device(read_rank_info(os.environ).local_rank)


def _dtype_name(dtype: torch.dtype | str | None) -> str | None:
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    return name
