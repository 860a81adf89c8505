"""The model card of an export: what it is, what it was trained on, its figures, how it is loaded.

It is README.md with a head in YAML, as Hugging Face's Hub reads it
(https://huggingface.co/docs/hub/model-cards). Nothing in it is guessed: the license is the one that
the card of the base names, the base's name on the Hub is known where the base lies in the cache of
downloads, and figures that are not found are left out. The base's card itself is not copied, since
it describes other weights. Of absolute paths only the last names are written (`shown`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.checkpoint.files import read_json
from torchtitan.checkpoint.storage import STATE
from torchtitan.metrics.rows import RECORD, read_rows

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank may be."""
_LICENSE = re.compile(r"(license(?:_name|_link)?):\s+(['\"]?)([\w.:/+-]+)\2\s*")
_IN_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")
_ABSOLUTE = re.compile(r'"([\w.-]+=)?([~/](?:[^"\\\n]|\\.)*/[^"/\n]+/?)"')
_STEP = re.compile(r"step-(\d+)")
_OF_CHECKPOINTS = ("checkpoint", "export")
_HOMES = ("home", "Users")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run has come to at a step."""

    step: int
    tokens: int
    losses: Mapping[str, tuple[int, float]]
    """Each with the step where it was logged last."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the card of a job's exports says at any step."""

    name: str
    description: str
    base: str | None
    """The weights that it began from."""
    base_id: str | None
    """The name of these on the Hub."""
    license: Mapping[str, str]
    data: Sequence[str]
    template: str | None
    tokenizer: str
    has_tokenizer: bool
    has_chat: bool
    """There is a chat template beside the tokenizer."""
    has_generation: bool
    """There is a generation_config.json."""
    seq_len: int
    lr: float
    decay: str
    optimizer: str
    rank: int
    """Of its LoRA adapter; 0: none."""
    alpha: float
    alone: bool
    """Only the adapter is written."""
    settings: str
    """Those that have not their default, as TOML."""
    checkpoint_folder: Path
    """Of the steps in the run's folder."""

    def text(self, step: Path) -> str:
        """Return the card of a step's export.

        Raises:
            CheckpointError: A file of the run's figures is damaged.
        """
        environment = Environment(
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
            {
                **asdict(self),
                "settings": without_folders(self.settings).strip(),
                "figures": find_figures(step, checkpoint_folder=self.checkpoint_folder),
                "vllm_rank": next((rank for rank in VLLM_RANKS if rank >= self.rank), self.rank),
            }
        )


def find_figures(step: Path, *, checkpoint_folder: Path) -> Figures:
    """Return the figures of a step: from its own state, and from metrics.jsonl in its run's folder,
    if it lies there.

    Raises:
        CheckpointError: A file of them is damaged.
    """
    state = read_json(step / "train_state" / STATE)
    whole, parts = step.resolve(), checkpoint_folder.parts
    is_at_home = whole.parent.parts[-len(parts) :] == parts
    record = whole.parents[len(parts)] / f"{RECORD}.jsonl" if is_at_home else None
    try:
        rows = read_rows(record) if record is not None and record.is_file() else []
    except DataError as error:
        raise CheckpointError(str(error)) from error
    losses = {
        name: (row["step"], row[key])
        for row in sorted(rows, key=lambda row: row["step"])  # of a step done twice the last one
        for key, name in (("loss", "loss"), ("validation_loss", "validation loss"))
        if row["step"] <= state["step"] and isinstance(row.get(key), float)
    }
    return Figures(step=state["step"], tokens=state["tokens_seen"], losses=losses)


def find_license(folder: Path) -> dict[str, str]:
    """Return what the card in a folder says of its license; empty if it has none, or one that is
    no plain name."""
    file = folder / CARD
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    head = lines[1 : lines.index("---", 1)]
    found = [match for line in head if (match := _LICENSE.fullmatch(line))]
    return {match[1]: match[3] for match in found}


def find_hub_id(path: Path) -> str | None:
    """Return the name on the Hub of a folder in the cache of downloads; None: it is not known."""
    found = _IN_CACHE.search(path.absolute().as_posix() + "/")
    return f"{found[1]}/{found[2]}" if found else None


def base_name(path: Path, *, checkpoint_folder: str) -> str:
    """Return what a card calls a base: its name on the Hub, run and step, or its path."""
    if (hub_id := find_hub_id(path)) is not None:
        return hub_id
    whole = path.expanduser().absolute()
    if step := _STEP.fullmatch(whole.name):
        between = {*Path(checkpoint_folder).parts, *_OF_CHECKPOINTS}
        run = next((folder.name for folder in whole.parents if folder.name not in between), "")
        return f"{run}, step {step[1]}" if run else whole.name
    return shown(str(path))


def shown(path: str, *, num_names: int = 1) -> str:
    """Return a path as a card names it: of an absolute one the last names, begun at no pattern,
    and without the name of a home."""
    if not path.startswith(("/", "~")):
        return path
    first, *parts = Path(path).parts
    if first == "/" and parts[:1] in [[home] for home in _HOMES]:
        first, parts = "~", parts[2:]
    parts = ["~" if first.startswith("~") else "", *parts]
    begin = max(len(parts) - num_names, 0)
    while begin > 0 and set(parts[begin]) & set("*?["):
        begin -= 1
    return "/".join(parts[begin:]).lstrip("/")


def without_folders(toml: str) -> str:
    """Return TOML with the last name in place of each absolute path."""
    return _ABSOLUTE.sub(lambda found: f'"{found[1] or ""}{shown(found[2])}"', toml)
