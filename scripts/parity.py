"""Compare fine-tuning of a Hugging Face chat model with transformers, TRL and PEFT.

    python scripts/parity.py --model SmolLM2-135M-Instruct --out outputs/parity

The model may be any small chat model: everything runs on a CPU in float32. Rows are generated from
a seed. transformers is required; comparisons with TRL and PEFT are skipped, and reported as
skipped, where these are not installed. Each line shows the largest difference of a figure and its
limit. Exit code 0 if all figures are within their limits, else 1.
"""

from __future__ import annotations

import argparse
import json
import math
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
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.compare.gaps import relative

STEPS, BATCH, NUM_ROWS, SEED = 10, 2, 225, 0
IGNORED = -100
LR, LORA_LR = 2e-5, 1e-3
LORA = ("--lora.rank=8", "--lora.alpha=16", f"--optimizer.lr={LORA_LR}")
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


class Bench:
    """The model, rows and trainings that the comparisons share.

    Args:
        model: Hugging Face folder.
        folder: Where runs are written.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.model, self.folder = model, folder
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.toml = folder / "job.toml"
        self.toml.write_text(JOB)
        self.chats = make_rows(SHAPES[-1:], num=3 * STEPS * BATCH, seed=SEED, render=self.render)
        self.chats_file = self.write_rows("chats", self.chats)
        self.labelled = [label_by_prefixes(row, self.tokenizer) for row in self.chats]
        self.seq_len = max(len(row.ids) for row in self.labelled)

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

    def train(self, name: str, *options: str) -> tuple[list[float], list[float]]:
        """Train; return loss and gradient norm of each step."""
        arguments = [*self.arguments(*options), f"--job.dump_folder={self.run(name)}"]
        rows = api.train(load_config(arguments)).rows
        return [row["loss"] for row in rows], [row["grad_norm"] for row in rows]

    def first_adapter(self) -> Path:
        """Return PEFT's folder of the adapter before training: after a step of no length."""
        exported = ("--lora.export_format=adapter", "--checkpoint.last_save_in_hf=true")
        self.train("first", *LORA, *exported, "--training.steps=1", "--optimizer.lr=1e-30")
        return self.run("first") / "checkpoint" / "export" / "step-1"

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

    def load_theirs(self, *, adapter: Path | None = None) -> Any:
        """Return a model of `transformers` in float32, with an adapter to train."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
        return model


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


def compare_chats(bench: Bench) -> list[Result]:
    """Compare greedy answers."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    generator = api.load_generator(bench.model, device="cpu", dtype="float32", chats=True)
    ours = answer(generator, chats, max_new_tokens=32, temperature=0.0)
    model, theirs = bench.load_theirs(), []
    for chat in chats:
        given = bench.tokenizer.apply_chat_template(
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
        theirs.append(bench.tokenizer.decode(new, skip_special_tokens=True))
    num_wrong = sum(a != b for a, b in zip(ours, theirs, strict=True))
    return [Result("transformers' generate", f"texts of {len(chats)} that differ", num_wrong, 0)]


def compare_labels(bench: Bench) -> list[Result]:
    """Compare tokens and labels of rows of all shapes."""
    rows = make_rows(SHAPES, num=NUM_ROWS, seed=SEED, render=bench.render)
    training, path, _ = bench.data(file=bench.write_rows("shapes", rows))
    encoder = build_encoder(training, tokenizer=build_tokenizer(path), tokenizer_path=path)
    found = label_all(find_examples(training), encoder)
    ours = [Labelled((x >> 1).tolist(), (x & 1).astype(bool).tolist()) for _, x in found]
    theirs = [label_by_prefixes(row, bench.tokenizer) for row in rows]
    results = []
    for shape_number, shape in enumerate(SHAPES):
        pairs = [*zip(ours, theirs, strict=True)][shape_number :: len(SHAPES)]
        num_wrong = sum(a != b for a, b in pairs)
        figure = f"rows of {len(pairs)} that differ: {shape}"
        results.append(Result("apply_chat_template, prefixes", figure, num_wrong, 0))
    return results


def compare_loss(bench: Bench, kind: str) -> list[Result]:
    """Compare loss and gradient norm of a kind of training with a plain loop's and TRL's."""
    is_lora, is_packed = kind == "lora", kind == "packed"
    options: Sequence[str] = LORA if is_lora else ()
    if is_packed:
        options = (*PACKED, f"--training.seq_len={3 * bench.seq_len}")
    ours, norms = bench.train(kind, *options)
    steps = bench.rows_of_steps(*options)
    if is_lora and (needs := missing("peft")):
        return [Result("a plain loop, TRL", "loss", None, note=needs)]
    adapter = bench.first_adapter() if is_lora else None
    model = bench.load_theirs(adapter=adapter)
    model.get_input_embeddings().padding_idx = None  # else the row of that token has no gradient
    lr, pad_id = LORA_LR if is_lora else LR, bench.tokenizer.eos_token_id
    examples = [[bench.labelled[row] for row in step] for step in steps]
    plain = train_plain(model, examples, lr=lr, pad_id=pad_id)
    results = [
        Result("a plain loop", "loss of a step", largest_relative(ours, plain[0]), 2e-5),
        Result("a plain loop", "gradient norm", largest_relative(norms, plain[1]), 2e-4),
    ]
    if needs := missing("trl", "datasets"):
        return [*results, Result("SFTTrainer", "loss of a step", None, note=needs)]
    model = bench.load_theirs(adapter=adapter)
    theirs = train_trl(model, bench, steps, lr=lr, padding_free=is_packed)
    # where all is trained they leave out a part of the gradient, see above
    limit = 2e-4 if is_lora else None
    return [
        *results,
        Result("SFTTrainer", f"rows of {len(bench.chats)} that differ", theirs[2], 0),
        Result("SFTTrainer", "loss of a step", largest_relative(ours, theirs[0]), 5e-5),
        Result("SFTTrainer", "gradient norm", largest_relative(norms, theirs[1]), limit),
    ]


def train_trl(
    model: Any,
    bench: Bench,
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
        output_dir=str(bench.folder / "trl"),
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
    data = Dataset.from_list([row.value for row in bench.chats])
    trainer = Ordered(
        model=model, args=settings, train_dataset=data, processing_class=bench.tokenizer
    )
    num_wrong = sum(
        row["labels"] != [i if keep else IGNORED for i, keep in zip(*ours, strict=True)]
        or row["input_ids"] != ours.ids
        for row, ours in zip(trainer.train_dataset, bench.labelled, strict=True)
    )
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return losses, norms, num_wrong


COMPARISONS: dict[str, Callable[[Bench], list[Result]]] = {
    "chats": compare_chats,
    "labels": compare_labels,
    "loss_padded": partial(compare_loss, kind="padded"),
    "loss_packed": partial(compare_loss, kind="packed"),
    "loss_lora": partial(compare_loss, kind="lora"),
}


def main(argv: Sequence[str]) -> int:
    """Run the comparisons, and return the exit code."""
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
        bench = Bench(options.model.resolve(), Path(folder))
        for name in options.only:
            try:
                results[name] = COMPARISONS[name](bench)
            except UserError as error:
                results[name] = [Result("-", "did not run", None, note=str(error))]
            print(to_markdown({name: results[name]}), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.md").write_text(to_markdown(results), encoding="utf-8")
    return int(any(each.is_wrong for found in results.values() for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
