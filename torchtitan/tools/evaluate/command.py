"""Evaluate a checkpoint: perplexity of held-out files, and tasks of lm-evaluation-harness.

    python -m torchtitan evaluate --checkpoint outputs --perplexity web=a.jsonl code='*.py'
    python -m torchtitan evaluate --checkpoint Qwen3-0.6B --tasks hellaswag,arc_easy --limit 9
    torchrun --nproc_per_node 2 -m torchtitan evaluate --checkpoint Qwen3-8B --tasks gsm8k

The checkpoint is whatever `torchtitan generate` takes: a run, a step, a folder of Hugging Face.
Under torchrun the ranks share the model's matrices (tensor parallelism), and rank 0 reports.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan import __version__
from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import ConfigError, Mistakes, UserError
from torchtitan.base.urls import local_path
from torchtitan.data.settings import TrainingConfig
from torchtitan.generate.generator import DTYPES, join_tensor_parallel
from torchtitan.hf.names import CONFIG
from torchtitan.mesh.faults import refuse_exits
from torchtitan.mesh.ranks import let_rank_0_report
from torchtitan.tools.evaluate.perplexity import measure, open_domain, parse_domains
from torchtitan.tools.evaluate.report import is_first_rank, show
from torchtitan.tools.evaluate.subject import Subject, open_subject
from torchtitan.tools.verbs import build_parser

OF_TASKS = ("num_fewshot", "limit", "include_path", "apply_chat_template", "chat_template")
OF_PERPLEXITY = ("dataset_text_key", "dataset_text_template", "dataset_cache")
CUTTING = ("seq_len", *OF_PERPLEXITY)
logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Report the figures; 2 with one message for what the user can mend."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        with trusting_stored(args.trust_code), refuse_exits():
            report = evaluate(args)
    except (UserError, OSError) as error:
        let_rank_0_report()
        sys.stderr.write(f"error: {error}\n")
        return UserError.exit_code
    if is_first_rank():
        show(report)
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, and what they depend on.

    Raises:
        UserError: An argument, a file, a task or the model has to be another.
    """
    files = _check(args)
    device, mesh = join_tensor_parallel()
    if args.tasks:
        from torchtitan.tools.evaluate.harness import Adapter, find_tasks, run_tasks

        manager = find_tasks(args.tasks, include_path=args.include_path)
    subject = open_subject(
        args.checkpoint,
        device=device,
        mesh=mesh,
        verify=not args.skip_verify,
        tokenizer=args.tokenizer,
        chats=args.apply_chat_template,
        chat_template=args.chat_template,
        dtype=args.dtype,
    )
    cut = _cut(args, subject)
    tokenizer, size = subject.generator.tokenizer, args.batch_size
    # all are read before the first is measured
    domains = [open_domain(n, f, cut=cut, tokenizer=tokenizer) for n, f in files.items()]
    perplexity = {
        domain.name: asdict(
            measure(subject.generator.model, domain, tokenizer=tokenizer, batch_size=size)
        )
        for domain in domains
    }
    tasks: dict[str, Any] = {}
    if args.tasks:
        tasks = run_tasks(
            Adapter(
                subject,
                max_length=args.seq_len or subject.positions,
                batch_size=size,
                chats=args.apply_chat_template,
            ),
            args.tasks,
            manager=manager,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            apply_chat_template=args.apply_chat_template,
        )
    return {
        "checkpoint": str(subject.folder),
        "step": subject.step,
        "perplexity": perplexity,
        "tasks": tasks,
        "settings": {
            **{key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()},
            **_settings(args, subject=subject, cut=cut),
            "perplexity": files,
            "num_ranks": 1 if mesh is None else mesh.size(),
        },
    }


def _settings(args: argparse.Namespace, *, subject: Subject, cut: TrainingConfig) -> dict[str, Any]:
    """Return what the figures depend on beside the arguments as they were given."""
    dtype = next(subject.generator.model.parameters()).dtype
    return {
        "seq_len": cut.seq_len if args.perplexity else None,
        "seq_len_of_tasks": (args.seq_len or subject.positions) if args.tasks else None,
        "attn_mask_type": cut.attn_mask_type,
        "reset_positions": cut.reset_positions,
        "dtype": str(dtype).removeprefix("torch."),
        "version": __version__,
    }


def _cut(args: argparse.Namespace, subject: Subject) -> TrainingConfig:
    """Return how text is cut: as the checkpoint says, but for what the arguments do.

    Raises:
        ConfigError: A sequence is longer than the model takes, or the template of text or the chat
            template is missing or wrong.
    """
    mistakes = Mistakes()
    if (args.seq_len or 0) > subject.positions:
        if subject.step is None:
            mistakes.add(
                "--seq_len",
                f"must be at most {subject.positions}, max_position_embeddings of {CONFIG}, got "
                f"{args.seq_len}; lower it",
            )
        else:
            logger.warning(
                "--seq_len %d is longer than the %d tokens of the training: later positions were "
                "never trained",
                args.seq_len,
                subject.positions,
            )
    if args.apply_chat_template and subject.generator.template is None:
        mistakes.add(
            "--apply_chat_template",
            "needs a chat template, and there is none beside the tokenizer; give a Jinja file with "
            "--chat_template",
        )
    mistakes.report()
    given = {key: v for key in CUTTING if (v := getattr(args, key)) is not None}
    cut = replace(subject.cut, dataset="files", dataset_path=(".",), **given)
    if wrong := [*cut.violations()]:
        raise ConfigError(wrong)
    return cut


def _check(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return the files of each domain.

    Raises:
        ConfigError: Arguments are wrong, or not of use together.
    """
    mistakes = Mistakes()
    files = mistakes.of(partial(parse_domains, args.perplexity, key="--perplexity"))
    if not args.perplexity and not args.tasks:
        mistakes.add("--perplexity", "or --tasks must be given; say what to evaluate")
    for needed, keys in (("tasks", OF_TASKS), ("perplexity", OF_PERPLEXITY)):
        if not getattr(args, needed):
            for key in keys:
                if getattr(args, key) not in (None, False):
                    mistakes.add(f"--{key}", f"is for --{needed}; give that, or remove it")
    if args.chat_template is not None and not args.apply_chat_template:
        mistakes.add("--chat_template", "is read for --apply_chat_template; give it too")
    for key, least in (("batch_size", 1), ("seq_len", 1), ("num_fewshot", 0)):
        if (value := getattr(args, key)) is not None and value < least:
            mistakes.add(f"--{key}", f"must be at least {least}, got {value}")
    if args.limit is not None and not (0 < args.limit < 1 or args.limit % 1 == 0 < args.limit):
        mistakes.add(
            "--limit",
            f"must be a number of examples, or a part of them between 0 and 1, got {args.limit:g}",
        )
    if args.include_path is not None and not args.include_path.is_dir():
        mistakes.add(
            "--include_path", f"must be a folder of YAML tasks, {args.include_path} is none"
        )
    if args.output is not None and (args.output.is_dir() or not args.output.parent.is_dir()):
        mistakes.add(
            "--output",
            f"must be a file in a folder that exists, got {args.output}; make the folder",
        )
    if args.tasks and find_spec("lm_eval") is None:
        mistakes.add(
            "--tasks",
            "needs the package lm-eval, which is not installed; install it, in the repository, "
            "with: pip install -e '.[eval]'",
        )
    mistakes.report()
    return files or {}


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("evaluate", __doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="of a run or Hugging Face")
    add(
        "--perplexity",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=FILES",
        help="a domain's held-out files, as training.dataset_path; a name again adds files",
    )
    add("--dataset_text_key", metavar="KEY", help="as in training")
    add("--dataset_text_template", metavar="TEXT", help="as in training")
    add("--dataset_cache", metavar="DIR", help="as in training")
    add("--tasks", type=_names, default=[], metavar="A,B", help="of lm-evaluation-harness")
    add("--include_path", type=Path, metavar="DIR", help="of YAML tasks of your own")
    add("--num_fewshot", type=int, metavar="N", help="examples before each; the task's own")
    add("--limit", type=float, metavar="N", help="examples of each task, or a part below 1")
    add("--apply_chat_template", action="store_true", help="ask the tasks as chats")
    add("--chat_template", metavar="FILE", help="in place of the tokenizer's or the run's")
    add("--seq_len", type=int, metavar="N", help="tokens at a time; as trained, or the model's")
    add("--batch_size", type=int, default=8, metavar="N", help="sequences at a time")
    add("--tokenizer", metavar="PATH", help="in place of the checkpoint's")
    add("--dtype", choices=DTYPES, help="to compute in; as the weights are stored if not given")
    add("--skip_verify", action="store_true", help="do not verify checksums")
    add_trust_code(parser)
    add("--output", type=local_path, metavar="FILE", help="write all figures as JSON")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
