"""The settings of a whole job: one frozen dataclass for each TOML section, each in its room.

Names and meanings follow torchtitan 0.2 wherever they are the same. The docstring under a field is
its documentation: `--help` prints it. Types are strict: 2.5 is not a batch size. What ties settings
together stands where it can: on the field (`Needs`), in the section's `violations`, and only where
sections of several rooms are tied to each other, here. What needs the number of ranks or the
model's sizes is checked at assembly.

What modules of the user's own add to the settings of a job that names them.

A model has sizes of its own: keys of [model], as those of our families are. And any module may
bring sections, by a dictionary `SECTIONS` from a name to a dataclass.
"""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.base.custom import (
    convert_errors,
    is_import_path,
    is_trusted,
    load_module,
    load_object,
    note_stored,
    trust,
)
from torchtitan.base.errors import ConfigError, Violation
from torchtitan.checkpoint.settings import WEIGHT_FILES, CheckpointConfig
from torchtitan.config.fields import fields, section_fields, values_of
from torchtitan.config.foreign import Foreign, read_foreign
from torchtitan.config.layers import Layer, Path
from torchtitan.config.load import Loaded, load
from torchtitan.config.needs import Needs
from torchtitan.config.overrides import strict_section, with_sections
from torchtitan.config.types import STRICT, InnerFile, LocalPath, Seed, Text
from torchtitan.data.settings import READS_FILES, TrainingConfig, ValidationConfig
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.mesh.settings import CommConfig, ElasticConfig, ParallelismConfig
from torchtitan.metrics.settings import MetricsConfig, ProfilingConfig
from torchtitan.models.settings import HF, ModelSection, model_section
from torchtitan.optim.settings import LRSchedulerConfig, OptimizerConfig, RouterConfig, SpikesConfig
from torchtitan.parallel.settings import (
    MULTIPLE,
    ActivationCheckpointConfig,
    CompileConfig,
    QuantizeConfig,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JobConfig:
    """The job as a whole: where its settings come from and where its output goes."""

    config_file: Text | None = None
    """TOML file to read; without one every setting has its default. Command line only."""
    dump_folder: LocalPath = "./outputs"
    """Folder that receives everything the run writes: config, metrics, logs, checkpoints."""
    description: str = "default job"
    """Free text, shown in the log and sent to W&B as the run's name."""
    time_limit_seconds: Annotated[PositiveInt | None, Needs("checkpoint.enable", True)] = None
    """Save and end the job this many seconds after its start. Choose the scheduler's time limit
    less the duration of a step and a save. Not given: no limit."""
    print_config: bool = False
    """Log the resolved settings at start."""
    save_config_file: InnerFile | None = None
    """Also write the resolved settings to this path, relative to dump_folder."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DebugConfig:
    """Reproducibility."""

    seed: Seed = 0
    """Seed of the initial weights, the order of the data and every random generator."""
    deterministic: bool = False
    """Refuse operators that are not reproducible bit for bit."""
    deterministic_warn_only: Annotated[bool, Needs("deterministic", True, is_notice=True)] = False
    """Warn of such operators instead."""
    log_sample_hashes: bool = False
    """Write step, number and hash of every sample drawn to samples/rank_N.jsonl."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A whole job."""

    job: JobConfig = Field(default_factory=JobConfig)
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    model: ModelSection = Field(default_factory=ModelSection)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = Field(default_factory=LRSchedulerConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    spikes: SpikesConfig = Field(default_factory=SpikesConfig)
    lora: LoRAConfig = Field(default_factory=LoRAConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    activation_checkpoint: ActivationCheckpointConfig = Field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = Field(default_factory=CompileConfig)
    quantize: QuantizeConfig = Field(default_factory=QuantizeConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    elastic: ElasticConfig = Field(default_factory=ElasticConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)

    def violations(self) -> Iterator[Violation]:
        """Check what ties sections to each other."""
        if self.training.num_epochs is None:  # else assembly does, which knows the steps
            yield from self.schedule_violations()
        yield from self._batches()
        yield from self._float8_tokens()
        yield from self._of_their_own()
        if self.validation.enable:
            yield from self._validation_data()
        option = self.activation_checkpoint.selective_ac_option
        by_operator = self.activation_checkpoint.mode == "selective" and option == "op"
        if self.compile.enable and by_operator:
            yield Violation(
                ("activation_checkpoint.selective_ac_option", "compile.enable"),
                "chooses operators one by one, and a compiled block is one operator; write "
                '"2" for every second block, or compile.enable = false',
            )

    def schedule_violations(self) -> Iterator[Violation]:
        """Check the learning rate over training.steps."""
        schedule, steps, peak = self.lr_scheduler, self.training.steps, self.optimizer.lr
        total, decays_to_zero = schedule.total_steps, schedule.min_lr_factor == 0
        decays = schedule.decay_ratio is None or schedule.decay_ratio > 0
        if total is not None and total < steps and decays and decays_to_zero:
            yield Violation(
                ("lr_scheduler.total_steps", "training.steps", "lr_scheduler.min_lr_factor"),
                f"must be at least training.steps ({steps}), got {total}: the learning rate would "
                "be 0 from there on; raise it, or set min_lr_factor",
            )
        num_warmup = schedule.num_warmup_steps(total or steps)
        if num_warmup > steps > 0:
            yield Violation(
                ("lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps", "training.steps"),
                f"the warmup takes {num_warmup} steps and the run {steps}, so the learning rate "
                f"ends at {peak * steps / num_warmup:.3g} and never reaches optimizer.lr = "
                f"{peak:g}; lower warmup_steps, or write warmup_ratio = 0.1",
                is_notice=True,
            )

    def _batches(self) -> Iterator[Violation]:
        """Check that sequences and batches can be cut as the layout asks."""
        parallelism, training, validation = self.parallelism, self.training, self.validation
        if wrong := parallelism.microbatch_violation(training.local_batch_size):
            yield wrong
        lengths = {"training.seq_len": training.seq_len}
        if validation.enable and validation.seq_len is not None:
            lengths["validation.seq_len"] = validation.seq_len
        for key, seq_len in lengths.items():
            if wrong := parallelism.sequence_violation(seq_len, key=key):
                yield wrong
        size = validation.local_batch_size
        microbatch = parallelism.microbatch_size(training.local_batch_size)
        is_cut = validation.enable and parallelism.pipeline_parallel_degree > 1
        if is_cut and size is not None and size % microbatch:
            yield Violation(
                (
                    "validation.local_batch_size",
                    "parallelism.pipeline_parallel_degree",
                    "parallelism.pipeline_parallel_microbatch_size",
                    "parallelism.pipeline_parallel_num_microbatches",
                ),
                f"must be a multiple of the {microbatch} samples of a pipeline's microbatch, got "
                f"{size}; try {max(size // microbatch, 1) * microbatch}",
            )

    def _float8_tokens(self) -> Iterator[Violation]:
        """Check what the gradient of a weight adds up over: the tokens of a product."""
        training, cp = self.training, self.parallelism.context_parallel_degree
        num_tokens = training.local_batch_size * training.seq_len // cp
        multiplies = self.model.converters and not self.quantize.linear.float8.emulate
        if multiplies and num_tokens % MULTIPLE:
            yield Violation(
                (
                    "model.converters",
                    "training.local_batch_size",
                    "training.seq_len",
                    "parallelism.context_parallel_degree",
                ),
                f"needs a number of tokens per rank that is a multiple of {MULTIPLE}, got "
                f"{num_tokens} (local_batch_size x seq_len / context_parallel_degree); try seq_len "
                f"= {max(training.seq_len // (MULTIPLE * cp), 1) * MULTIPLE * cp}",
            )

    def _of_their_own(self) -> Iterator[Violation]:
        """Check what a loss and data of the user's own cannot be combined with."""
        training, parallelism = self.training, self.parallelism
        is_split = parallelism.tensor_parallel_degree > 1 and not parallelism.disable_loss_parallel
        if is_import_path(training.loss) and is_split:
            yield Violation(
                (
                    "training.loss",
                    "parallelism.disable_loss_parallel",
                    "parallelism.tensor_parallel_degree",
                ),
                "takes the logits of the whole vocabulary, and tensor parallelism splits them; "
                "write parallelism.disable_loss_parallel = true",
            )
        if is_import_path(training.dataset) and self.validation.holdout_fraction is not None:
            yield Violation(
                ("validation.holdout_fraction", "training.dataset"),
                "holds out documents of text that is read here, and training.dataset is of your "
                "own; remove it, and name a validation.dataset",
            )

    def _validation_data(self) -> Iterator[Violation]:
        validation, default = self.validation, self.training.dataset
        kind, files = validation.dataset or default, validation.dataset_path
        keys = ("validation.dataset", "validation.dataset_path", "validation.enable")
        ties = (*keys, "training.dataset")
        if validation.holdout_fraction is not None:
            return
        if kind == default == "python_stdlib":
            yield Violation(
                ties,
                'needs data of its own: training reads all of "python_stdlib"; hold out a part of '
                'it with validation.holdout_fraction = 0.05 and no dataset, or write "files" with '
                "dataset_path",
            )
        elif kind in READS_FILES and not files:
            yield Violation(
                ties,
                f'"{kind}" needs validation.dataset_path, the files to read; or hold out a part of '
                "the training's documents with validation.holdout_fraction = 0.05 and no dataset",
            )
        elif kind not in READS_FILES and files:
            yield Violation(
                (keys[1], keys[0], "training.dataset"),
                f'needs dataset = "files" or "examples", got "{kind}"; set that, or remove this',
            )


def load_job(argv: Sequence[str] | Layer) -> Loaded[Config]:
    """Read the file that --job.config_file names, apply the other options, check everything.

    Raises ConfigError with every mistake of files and command line; prints the help and raises
    SystemExit(0) on --help. Old spellings are logged as warnings.
    """
    extend = functools.partial(with_own, Config)
    loaded = of_folder(load(Config, argv, foreign=torchtitans_keys(), extend=extend))
    trust(text for _, text in find_own(loaded.config))  # those in another spelling too
    if loaded.foreign_file is not None:
        given = {".".join(path) for path in loaded.given}
        for meaning in other_meanings(given, loaded.config):
            file = loaded.foreign_file
            logger.warning("%s: written for torchtitan 0.2, where %s", file, meaning)
    return loaded


def of_folder(loaded: Loaded[Config]) -> Loaded[Config]:
    """Let a job that starts from a Hugging Face folder and names no flavor have its model.

    `model.flavor = "hf"` from whoever starts the job wins over a file's family and tokenizer. The
    folder is read at assembly: by `resolve_model`.
    """
    config = loaded.config
    model, checkpoint = config.model, config.checkpoint
    path = checkpoint.initial_load_path
    if path is None or not checkpoint.initial_load_in_hf or path.endswith(WEIGHT_FILES):
        return loaded
    given = dict(loaded.given)
    flavor = given.get(("model", "flavor"))
    if flavor is None or flavor.value is None:
        flavor, model = None, replace(model, flavor=HF)
    if model.flavor != HF:
        return replace(loaded, config=replace(config, model=model))
    theirs: dict[str, Any] = {"name": HF, "tokenizer_path": path}
    for key in [*theirs]:
        setting = given.get(("model", key))
        if setting is None or setting.value is None:
            continue
        if flavor is None or flavor.is_in_file or not setting.is_in_file:
            del theirs[key]
            continue
        del given["model", key]  # no message should point there
        logger.warning("%s: has no effect, %s: it is the folder's", setting.where(), flavor.where())
    model = replace(model, **theirs)
    return replace(loaded, config=replace(config, model=model), given=given)


def load_config(argv: Sequence[str]) -> Config:
    """Do as `load_job`, for who needs the settings alone."""
    return load_job(argv).config


def torchtitans_keys() -> Foreign:
    """Return what is known of files for torchtitan 0.1 and 0.2."""
    return read_foreign(pathlib.Path(__file__).with_name("torchtitan_0_2.toml"), name="torchtitan")


OTHER_DEFAULTS: Mapping[str, str] = {
    "optimizer.no_decay_params": "norms and biases are decayed; here they are not; to decay them "
    "write [optimizer] no_decay_params = []",
    "router.bias_update_rate": "experts' biases move by 1e-3 a step; here they stay; to do the "
    "same write [router] bias_update_rate = 1e-3",
    "model.tokenizer_path": "the default tokenizer is a file of its tests; here it is "
    '"bpe_2048", with other ids; to choose one write [model] tokenizer_path',
    "training.dataset": 'the default data are "c4_test"; here they are "python_stdlib"',
    "training.mixed_precision_param": "layers compute in bfloat16 by default; here only where the "
    "device multiplies it by itself; to be sure write [training] mixed_precision_param = "
    '"bfloat16"',
    "debug.seed": "each start draws another seed; here it is 0; to choose one write [debug] seed",
    "checkpoint.last_save_model_only": "the last checkpoint is of weights alone by default; here "
    "it is a full one; for the weights beside it write [checkpoint] last_save_model_only = true",
    "validation.dataset": "validation reads c4_validation by default; here the dataset of "
    "[training]",
    "validation.local_batch_size": "validation reads batches of 8 by default; here those of "
    "[training]",
    "validation.seq_len": "validation reads 2048 tokens by default; here as many as [training]",
}
"""Settings with another default in torchtitan, and what a job that leaves them out gets there."""


def other_meanings(given: Collection[str], config: Config) -> Iterator[str]:
    """Say what would be another training in torchtitan, of a job with a file written for that.

    `given`: the keys that the job names, in today's spelling.
    """
    is_used = {
        "optimizer": config.optimizer.weight_decay > 0,
        "checkpoint": config.checkpoint.enable,
        "router": config.model.name == "deepseek_v3",
        "validation": config.validation.enable,
    }
    for key, meaning in OTHER_DEFAULTS.items():
        if key not in given and is_used.get(key.partition(".")[0], True):
            yield meaning
    total = config.lr_scheduler.total_steps or config.training.steps
    if 0 <= total < config.lr_scheduler.num_warmup_steps(total):
        yield (
            f"a warmup is cut to the length of the schedule; here it is not; to do the same write "
            f"[lr_scheduler] warmup_steps = {total}"
        )


T = TypeVar("T")
MODEL = ("model", "name")


def with_own(tree: type[T], given: Layer) -> type[T]:
    """Return the tree of a job: `tree`, with what the modules that its settings name add to it.

    Raises:
        ConfigError: A module cannot be imported, or what it brings is no section.
    """
    named = list(_find_given(tree, given))
    trust(text for _, text in named)
    return _with(tree, named)


def with_stored_own(tree: type[T], stored: Layer, *, file: str) -> tuple[type[T], Layer]:
    """Do the same for the settings stored in `file`; return them too, without what is not known.

    Modules that are not trusted are not imported, so their sections and sizes are left out.

    Raises:
        ConfigError: The model's module is trusted and cannot be imported.
    """
    named = list(_find_given(tree, stored))
    note_stored((text for _, text in named), file=file)
    made, found = tree, list[tuple[Path, str]]()
    for path, text in named:
        if not is_trusted(text):
            continue
        try:
            made = _with(tree, [*found, (path, text)])
            found.append((path, text))
        except ConfigError:  # a callback that is gone, say, is no matter
            if path == MODEL:
                raise
    if not named:  # then an unknown section is a mistake
        return made, stored
    ours = {*section_fields(tree)}
    if any(path == MODEL and not is_trusted(text) for path, text in named):
        ours.remove("model")
    return made, {
        path: one for path, one in stored.items() if path[0] in ours or path in fields(made)
    }


def _with(tree: type[T], named: Iterable[tuple[Path, str]]) -> type[T]:
    added: dict[str, type] = {}
    brought: dict[str, type] = {}
    for path, text in named:
        key = ".".join(path)
        found = load_object(text, key=key)
        # without flavors it is refused at assembly, with what it has to be
        if path == MODEL and getattr(found, "flavors", None):
            added["model"] = model_section(found.sizes)
        for name, section in sections_of(text, key=key).items():
            if (
                hasattr(tree, name)
                or name in section_fields(tree)
                or brought.setdefault(name, section) is not section
            ):
                rule = f"'{text}' brings a section [{name}], and there is another; rename one"
                raise ConfigError.at(key, rule)
            try:
                added[name] = strict_section(
                    section, running=partial(convert_errors, text, key=key)
                )
            except (TypeError, NameError) as error:
                rule = f"'{text}' brings a section [{name}] that cannot be one: {error}; mend it"
                raise ConfigError.at(key, rule) from error
    return with_sections(tree, added) if added else tree


def find_own(config: object) -> list[tuple[Path, str]]:
    """Return each import path in settings, after the key that holds it."""
    return list(_find(type(config), values_of(config)))


def sections_of(text: str, *, key: str) -> Mapping[str, type]:
    """Return the sections that the module of an import path brings, by name."""
    found = getattr(load_module(text, key=key), "SECTIONS", {})
    if not isinstance(found, dict) or not all(map(str.isidentifier, map(str, found))):
        rule = f"'{text}': SECTIONS must be a dictionary from names to dataclasses, got {found!r}"
        raise ConfigError.at(key, f"{rule}; mend it")
    return found


def watching_sections(config: object, *, is_watcher: Callable[[Path], bool]) -> set[str]:
    """Return the sections in a job's settings that only modules of watchers bring, by the key that
    names them."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for path, text in find_own(config):
        if is_trusted(text):  # the others' sections were left out
            found[is_watcher(path)] |= sections_of(text, key=".".join(path)).keys()
    return found[True] - found[False]


def own_sections(config: object) -> dict[str, Any]:
    """Return the values of all such sections that a job has, by name."""
    named = [(path, text) for path, text in find_own(config) if is_trusted(text)]
    names = {name for path, text in named for name in sections_of(text, key=".".join(path))}
    return {name: getattr(config, name) for name in sorted(names)}


def _find_given(tree: type, given: Layer) -> Iterator[tuple[Path, str]]:
    return _find(tree, {path: setting.value for path, setting in given.items()})


def _find(tree: type, values: Mapping[Path, object]) -> Iterator[tuple[Path, str]]:
    for path, facts in fields(tree).items():
        value = values.get(path)
        texts = value if isinstance(value, (list, tuple)) else [value]
        for text in texts if facts.may_be_own else ():
            if isinstance(text, str) and is_import_path(text):
                yield path, text
