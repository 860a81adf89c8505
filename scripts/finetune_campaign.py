"""Compare fine-tuning of a Hugging Face chat model with transformers, TRL and PEFT.

    python scripts/finetune_campaign.py --model SmolLM2-135M-Instruct --out outputs/campaign

The model may be any small chat model: everything runs on a CPU in float32. Rows are generated from
a seed. transformers is required; comparisons with TRL and PEFT are skipped, and reported as
skipped, where these are not installed. Each line shows the largest difference of a figure and its
limit. Exit code 0 if all figures are within their limits, else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

from scripts.chat_rows import SHAPES, Labelled, Message, Row, label_by_prefixes, make_rows
from torchtitan import api
from torchtitan.base.errors import UserError
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.finetune.data import ExampleSource, build_encoder, build_examples
from torchtitan.finetune.sources import find_examples, label_all
from torchtitan.generate.text import answer
from torchtitan.job import load_config
from torchtitan.metrics.rows import read_rows
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.compare.gaps import relative
from torchtitan.tools.compare.launch import train
from torchtitan.tools.compare.words import parse_layout
from torchtitan.tools.convert import to_hf

STEPS, BATCH, NUM_ROWS, SEED = 10, 2, 225, 0
IGNORED = -100
MULTIPLE = 12
"""seq_len is a multiple, so that tensor and context parallelism can split it."""
FIGURES = ("loss", "gradient norm")
LR, LORA_LR = 2e-5, 1e-3
LORA = ("--lora.rank=8", "--lora.alpha=16", f"--optimizer.lr={LORA_LR}")
PP2 = f"pp2 --training.local_batch_size={BATCH}"  # a microbatch for each stage
EXPORTED = ("--checkpoint.last_save_in_hf=true",)
PACKED = (
    "--training.packing=packed",
    "--training.attn_mask_type=block_causal",
    "--training.reset_positions=true",
    "--training.global_batch_size=1",
)
JOB = f"""
[optimizer]
lr = {LR}
beta2 = 0.999
weight_decay = 0.0
[lr_scheduler]
warmup_steps = 0
min_lr_factor = 1.0
[training]
dataset = "examples"
special_tokens_in_examples = "encode"
local_batch_size = 1
global_batch_size = {BATCH}
steps = {STEPS}
max_norm = inf
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = true
initial_load_in_hf = true
"""
QUESTIONS = (
    "What is the capital of France?",
    "Name three colors.",
    "Write a haiku about the sea.",
    "What is 2 + 2?",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a Python function that adds two numbers.",
)


class Result(NamedTuple):
    """One figure of a comparison."""

    against: str
    figure: str
    largest: float | None
    """None: not measured, see `note`."""
    limit: float | None = None
    """None: no limit applies."""
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the figure exceeds its limit or is NaN."""
        if self.largest is None or self.limit is None:
            return self.largest is None and not self.note.startswith("needs")
        return not self.largest <= self.limit


def largest_relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two rows of figures; inf if one is shorter."""
    if len(ours) != len(theirs) or not ours:
        return math.inf
    return max(relative(a, b) for a, b in zip(ours, theirs, strict=True))


def largest_of(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value."""
    width = min(ours.shape[-1], theirs.shape[-1])  # of logits: tokens that both have
    ours, theirs = ours[..., :width].double(), theirs[..., :width].double()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def smallest_divisor(number: int) -> int:
    """Return the smallest divisor above 1; 1 has none but itself."""
    return next((d for d in range(2, number + 1) if number % d == 0), 1)


def to_markdown(results: Mapping[str, Sequence[Result]]) -> str:
    """Return the table of all comparisons."""
    lines = ["| comparison | against | figure | largest | limit |", "|---|---|---|---|---|"]
    for name, rows in results.items():
        for each in rows:
            largest = each.note if each.largest is None else f"{each.largest:.2g}"
            limit = "-" if each.limit is None else f"{each.limit:g}"
            wrong = " **DIFFERS**" if each.is_wrong else ""
            lines.append(
                f"| {name} | {each.against} | {each.figure} | {largest}{wrong} | {limit} |"
            )
    return "\n".join(lines) + "\n"


class Campaign:
    """The model, rows and trainings that the comparisons share.

    Args:
        model: Hugging Face folder.
        folder: Where runs are written.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer

        self.model, self.folder = model, folder
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.config = AutoConfig.from_pretrained(model)
        self.toml = folder / "job.toml"
        self.toml.write_text(JOB)
        self._figures: dict[str, tuple[list[float], list[float]]] = {}
        self.chats = make_rows(SHAPES[-1:], num=3 * STEPS * BATCH, seed=SEED, render=self.render)
        self.chats_file = self.write_rows("chats", self.chats)
        self.labelled = [label_by_prefixes(row, self.tokenizer) for row in self.chats]
        longest = max(len(row.ids) for row in self.labelled)
        self.seq_len = -(-longest // MULTIPLE) * MULTIPLE

    def render(self, messages: list[Message]) -> str:
        """Return the text of messages and the start of an answer, without a BOS token."""
        text: str = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return text.removeprefix(self.tokenizer.bos_token or "")

    def write_rows(self, name: str, rows: Sequence[Row]) -> Path:
        """Write the file of rows."""
        file = self.folder / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(row.value)}\n" for row in rows), encoding="utf-8")
        return file

    def arguments(self, *options: str, file: Path | None = None) -> list[str]:
        """Return the trainer's options for a job on a file of rows."""
        return [
            f"--job.config_file={self.toml}",
            f"--checkpoint.initial_load_path={self.model}",
            f"--training.dataset_path={file or self.chats_file}",
            f"--training.dataset_cache={self.folder / 'cache'}",
            f"--training.seq_len={self.seq_len}",
            *options,
        ]

    def run(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / name

    def train(
        self, name: str, *options: str, layout: str = "single", keep: bool = False
    ) -> tuple[list[float], list[float]]:
        """Train once; return loss and gradient norm of each step. `keep`: checkpoints too."""
        if name not in self._figures:
            ranks, run = parse_layout(layout), self.run(name)
            run.mkdir(parents=True)
            arguments = [*self.arguments(*options), *ranks.arguments, f"--job.dump_folder={run}"]
            if ranks.world_size == 1:
                rows = api.train(load_config(arguments)).rows
            else:
                log = run / "output.txt"
                train(arguments, world_size=ranks.world_size, log=log, what=name)
                rows = list(read_rows(run / "metrics.jsonl"))
            self._figures[name] = [row["loss"] for row in rows], [row["grad_norm"] for row in rows]
            if not keep:
                shutil.rmtree(run / "checkpoint")
        return self._figures[name]

    def train_lora(self) -> Path:
        """Train an adapter once; return the folder of the last step, beside which it is merged."""
        self.train("lora", *LORA, *EXPORTED, keep=True)
        return self.run("lora") / "checkpoint" / f"step-{STEPS}"

    def first_adapter(self) -> Path:
        """Return PEFT's folder of the adapter before its first step."""
        return self.export("first adapter", *LORA, "--lora.export_format=adapter")

    def export(self, name: str, *options: str) -> Path:
        """Return the Hugging Face folder of a job's initial weights."""
        self.train(name, *options, "--training.steps=0", *EXPORTED, keep=True)
        return self.run(name) / "checkpoint" / "export" / "step-0"

    def data(self, *options: str, file: Path | None = None) -> tuple[TrainingConfig, str, int]:
        """Return a job's settings of the data, the path of its tokenizer, and its seed."""
        config = resolve_model(load_config(self.arguments(*options, file=file)))
        return config.training, config.model.tokenizer_path, config.debug.seed

    def rows_of_steps(self, *options: str) -> list[list[int]]:
        """Return the numbers of the rows that each step trains on."""
        training, path, seed = self.data(*options)
        dataset = build_examples(
            training, tokenizer=build_tokenizer(path), tokenizer_path=path, seed=seed
        )
        [source] = dataset.sources
        assert isinstance(source, ExampleSource)
        size = training.global_batch_size
        samples = [source.samples.document(dataset.place_of(k)[2]) for k in range(STEPS * size)]
        return [
            [int(row) for sample in samples[first : first + size] for row in sample]
            for first in range(0, len(samples), size)
        ]

    def load_theirs(self, folder: Path | None = None, *, adapter: Path | None = None) -> Any:
        """Return a model of `transformers` in float32, with an adapter to train."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder or self.model, dtype=torch.float32)
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
        return model

    def tokens(self) -> Tensor:
        """Return the start of some chats as token ids (4, 32)."""
        ids = [i for row in self.labelled for i in row.ids]
        return torch.tensor(ids[:128]).view(4, 32)


def batch_of(rows: Sequence[Labelled], *, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, labels and attention mask (B, S) of examples, padded at their end."""
    longest = max(len(row.ids) for row in rows)
    tokens = torch.full((len(rows), longest), pad_id)
    labels, attended = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
    for i, (ids, trained) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        labels[i, : len(ids)] = torch.where(torch.tensor(trained), torch.tensor(ids), IGNORED)
        attended[i, : len(ids)] = 1
    return tokens, labels, attended


def train_plain(
    model: nn.Module, steps: Sequence[Sequence[Labelled]], *, lr: float, pad_id: int
) -> tuple[list[float], list[float]]:
    """Train by a loop of ten lines; return loss and gradient norm of each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    losses, norms = [], []
    for rows in steps:
        tokens, labels, attended = batch_of(rows, pad_id=pad_id)
        logits = model(input_ids=tokens, attention_mask=attended, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
        losses.append(loss.item())
        norms.append(torch.stack(squares).sum().sqrt().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def missing(*packages: str) -> str:
    """Return which packages are needed and not installed, "" if none is."""
    names = [name for name in packages if find_spec(name) is None]
    return f"needs {', '.join(names)}" if names else ""


def compare_chats(campaign: Campaign) -> list[Result]:
    """Compare greedy answers."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    generator = api.load_generator(campaign.model, device="cpu", dtype="float32", chats=True)
    ours = answer(generator, chats, max_new_tokens=32, temperature=0.0)
    model, theirs = campaign.load_theirs(), []
    for chat in chats:
        given = campaign.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        [ids] = model.generate(
            **given,
            max_new_tokens=32,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=sorted(generator.answer_stop_ids()),
        )
        new = ids[given["input_ids"].shape[1] :]
        theirs.append(campaign.tokenizer.decode(new, skip_special_tokens=True))
    num_wrong = sum(a != b for a, b in zip(ours, theirs, strict=True))
    return [Result("transformers' generate", f"texts of {len(chats)} that differ", num_wrong, 0)]


def compare_labels(campaign: Campaign) -> list[Result]:
    """Compare tokens and labels of rows of all shapes."""
    rows = make_rows(SHAPES, num=NUM_ROWS, seed=SEED, render=campaign.render)
    training, path, _ = campaign.data(file=campaign.write_rows("shapes", rows))
    encoder = build_encoder(training, tokenizer=build_tokenizer(path), tokenizer_path=path)
    found = label_all(find_examples(training), encoder)
    ours = [Labelled((x >> 1).tolist(), (x & 1).astype(bool).tolist()) for _, x in found]
    theirs = [label_by_prefixes(row, campaign.tokenizer) for row in rows]
    results = []
    for shape_number, shape in enumerate(SHAPES):
        pairs = [*zip(ours, theirs, strict=True)][shape_number :: len(SHAPES)]
        num_wrong = sum(a != b for a, b in pairs)
        figure = f"rows of {len(pairs)} that differ: {shape}"
        results.append(Result("apply_chat_template, prefixes", figure, num_wrong, 0))
    return results


def compare_layouts(campaign: Campaign) -> list[Result]:
    """Compare training in five layouts with one rank."""
    heads = getattr(campaign.config, "num_key_value_heads", campaign.config.num_attention_heads)
    alone, results = campaign.train("padded"), []
    for layout in ("fsdp2", f"tp{smallest_divisor(heads)}", PP2, "cp2", "cp2,fsdp2"):
        name = layout.partition(" ")[0]
        found = campaign.train(name, layout=layout)
        for figure, limit, a, b in zip(FIGURES, (1e-5, 1e-4), found, alone, strict=True):
            results.append(Result("one rank", f"{figure}, {name}", largest_relative(a, b), limit))
    return results


def compare_loss(campaign: Campaign, kind: str) -> list[Result]:
    """Compare loss and gradient norm of a kind of training with a plain loop's and TRL's."""
    is_lora, is_packed = kind == "lora", kind == "packed"
    options: Sequence[str] = LORA if is_lora else ()
    if is_packed:
        options = (*PACKED, f"--training.seq_len={3 * campaign.seq_len}")
    if is_lora:
        campaign.train_lora()
    ours, norms = campaign.train(kind, *options)
    steps = campaign.rows_of_steps(*options)
    if is_lora and (needs := missing("peft")):
        return [Result("a plain loop, TRL", "loss", None, note=needs)]
    adapter = campaign.first_adapter() if is_lora else None
    model = campaign.load_theirs(adapter=adapter)
    model.get_input_embeddings().padding_idx = None  # else the row of that token has no gradient
    lr, pad_id = LORA_LR if is_lora else LR, campaign.tokenizer.eos_token_id
    examples = [[campaign.labelled[row] for row in step] for step in steps]
    plain = train_plain(model, examples, lr=lr, pad_id=pad_id)
    results = [
        Result("a plain loop", "loss of a step", largest_relative(ours, plain[0]), 2e-5),
        Result("a plain loop", "gradient norm", largest_relative(norms, plain[1]), 2e-4),
    ]
    if needs := missing("trl", "datasets"):
        return [*results, Result("SFTTrainer", "loss of a step", None, note=needs)]
    model = campaign.load_theirs(adapter=adapter)
    theirs = train_trl(model, campaign, steps, lr=lr, padding_free=is_packed)
    # where all is trained they leave out a part of the gradient, see above
    limit = 2e-4 if is_lora else None
    return [
        *results,
        Result("SFTTrainer", f"rows of {len(campaign.chats)} that differ", theirs[2], 0),
        Result("SFTTrainer", "loss of a step", largest_relative(ours, theirs[0]), 5e-5),
        Result("SFTTrainer", "gradient norm", largest_relative(norms, theirs[1]), limit),
    ]


def train_trl(
    model: Any,
    campaign: Campaign,
    steps: Sequence[Sequence[int]],
    *,
    lr: float,
    padding_free: bool,
) -> tuple[list[float], list[float], int]:
    """Train by TRL, which tokenizes and masks by itself.

    Returns loss and gradient norm of each step, and how many rows have other tokens or labels.
    """
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class Ordered(SFTTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(
                self.train_dataset, batch_sampler=steps, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            found = super().compute_loss(*arguments, **options)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    settings = SFTConfig(
        output_dir=str(campaign.folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        completion_only_loss=True,
        padding_free=padding_free,
        max_length=None,
    )
    data = Dataset.from_list([row.value for row in campaign.chats])
    trainer = Ordered(
        model=model, args=settings, train_dataset=data, processing_class=campaign.tokenizer
    )
    num_wrong = sum(
        row["labels"] != [i if keep else IGNORED for i, keep in zip(*ours, strict=True)]
        or row["input_ids"] != ours.ids
        for row, ours in zip(trainer.train_dataset, campaign.labelled, strict=True)
    )
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return losses, norms, num_wrong


@torch.no_grad()
def compare_exports(campaign: Campaign) -> list[Result]:
    """Compare what other programs load of an export with the run."""
    step = campaign.train_lora()
    merged, tokens = step.parent / "export" / step.name, campaign.tokens()
    ours = api.load_model(step, device="cpu")(tokens)
    theirs = campaign.load_theirs(merged)(tokens).logits
    figure = "largest logit difference, merged"
    results = [Result("transformers", figure, largest_of(ours, theirs), 1e-5)]
    for name, folder in (("base", campaign.model), ("merged", merged)):
        again = campaign.export(f"again {name}", f"--checkpoint.initial_load_path={folder}")
        num_wrong = count_unequal(again, folder)
        figure = f"tensors that differ, {name} read and written"
        results.append(Result("the folder", figure, num_wrong, 0))
        shutil.rmtree(campaign.run(f"again {name}"))
    if needs := missing("peft"):
        return [*results, Result("PEFT", "logits", None, note=needs)]
    to_hf(step, campaign.folder / "adapter", lora="adapter")
    model = campaign.load_theirs(adapter=campaign.folder / "adapter")
    return [*results, *compare_peft(model, tokens, ours=ours)]


def compare_peft(model: Any, tokens: Tensor, *, ours: Tensor) -> list[Result]:
    """Compare logits with those of PEFT's model, and with the adapter added to its weights."""
    figure = "largest logit difference"
    beside = Result("PEFT", figure, largest_of(ours, model(tokens).logits), 1e-5)
    logits = model.merge_and_unload()(tokens).logits
    return [beside, Result("PEFT's merge_and_unload", figure, largest_of(ours, logits), 1e-5)]


def count_unequal(folder: Path, other: Path) -> int:
    """Return the number of tensors that one folder lacks or that differ in a bit."""
    from safetensors.torch import load_file

    a, b = (
        {name: t for file in each.glob("*.safetensors") for name, t in load_file(file).items()}
        for each in (folder, other)
    )
    shared = a.keys() & b.keys()
    return len(a.keys() ^ b.keys()) + sum(
        not a[name].to(b[name].dtype).equal(b[name]) for name in shared
    )


COMPARISONS: dict[str, Callable[[Campaign], list[Result]]] = {
    "chats": compare_chats,
    "labels": compare_labels,
    "loss_padded": partial(compare_loss, kind="padded"),
    "loss_packed": partial(compare_loss, kind="packed"),
    "loss_lora": partial(compare_loss, kind="lora"),
    "layouts": compare_layouts,
    "exports": compare_exports,
}


def main(argv: Sequence[str]) -> int:
    """Run the campaign, and return the exit code."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder")
    add("--only", nargs="+", choices=COMPARISONS, default=[*COMPARISONS], help="comparisons to run")
    add("--out", type=Path, metavar="DIR", help="write results.md here")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(options.model.resolve(), Path(folder))
        for name in options.only:
            try:
                results[name] = COMPARISONS[name](campaign)
            except UserError as error:
                results[name] = [Result("-", "did not run", None, note=str(error))]
            print(to_markdown({name: results[name]}), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.md").write_text(to_markdown(results), encoding="utf-8")
    return int(any(each.is_wrong for found in results.values() for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
