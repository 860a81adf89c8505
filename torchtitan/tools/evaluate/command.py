"""Evaluate a checkpoint: perplexity of held-out files, and tasks of lm-evaluation-harness.

    torchtitan evaluate --checkpoint outputs --perplexity web=a.jsonl code='*.py'
    torchtitan evaluate --checkpoint Qwen3-0.6B --tasks hellaswag,arc_easy --limit 9
    torchrun --nproc_per_node 2 -m torchtitan evaluate --checkpoint Qwen3-8B --tasks gsm8k

The checkpoint is a run, a step or a Hugging Face folder, as for `torchtitan generate`. Under
torchrun the ranks share the model's matrices (tensor parallelism), and rank 0 reports.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan.base.custom import trusting_stored
from torchtitan.base.errors import ConfigError, Mistakes
from torchtitan.base.urls import local_path
from torchtitan.tools.verbs import (
    add_model_options,
    at_least,
    build_parser,
    format_table,
    report_errors,
)

NEEDED = {
    "tasks": ("num_fewshot", "limit", "include_path", "apply_chat_template", "chat_template"),
    "perplexity": ("dataset_text_key", "dataset_text_template", "dataset_cache"),
    "apply_chat_template": ("chat_template",),
}
"""Options that need another one."""
Files = dict[str, tuple[str, ...]]
"""Files of each domain."""


@report_errors
def main(argv: Sequence[str]) -> int:
    """Report the figures and return 0; return 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    files = check(args)
    from torchtitan.mesh.faults import refuse_exits
    from torchtitan.tools.evaluate.model import evaluate

    with trusting_stored(args.trust_code), refuse_exits():
        report = evaluate(args, files)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write("\n".join([*_lines(report), ""]))
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def check(args: argparse.Namespace) -> Files:
    """Return the files of each domain; raise ConfigError that lists all options that are invalid or
    in conflict."""
    mistakes, files = Mistakes(), Files()
    with mistakes:
        files = parse_domains(args.perplexity, key="--perplexity")
    if not args.perplexity and not args.tasks:
        mistakes.add("--perplexity", "or --tasks must be given")
    for needed, keys in NEEDED.items():
        for key in () if getattr(args, needed) else keys:
            if getattr(args, key) not in (None, False):
                mistakes.add(f"--{key}", f"needs --{needed}")
    if args.include_path is not None and not args.include_path.is_dir():
        mistakes.add("--include_path", f"must be a folder of YAML tasks, got {args.include_path}")
    if args.output is not None and (args.output.is_dir() or not args.output.parent.is_dir()):
        mistakes.add("--output", f"must be a file in an existing folder, got {args.output}")
    if args.tasks and find_spec("lm_eval") is None:
        mistakes.add("--tasks", "needs the package lm-eval: pip install -e '.[eval]'")
    mistakes.report()
    return files


def parse_domains(texts: Sequence[str], *, key: str) -> Files:
    """Return the files of each domain, given texts of the form NAME=FILES; raise ConfigError if a
    text has another form. `key` names the setting in the message."""
    files = Files()
    for text in texts:
        name, _, pattern = text.partition("=")
        if not name or not pattern:
            rule = f"must be NAME=FILES, such as web='data/*.jsonl', got {text!r}"
            raise ConfigError.at(key, rule)
        files[name] = (*files.get(name, ()), pattern)
    return files


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield tables of the figures, after the step or folder of the model."""
    yield f"checkpoint: {report['checkpoint']}"
    if report["perplexity"]:
        rows = [["domain", "loss", "perplexity", "bits/byte", "tokens", "documents", "bytes"]]
        for name, row in report["perplexity"].items():
            figures = (f"{row[key]:.4f}" for key in ("loss", "perplexity", "bits_per_byte"))
            counts = (f"{row[key]:,}" for key in ("num_tokens", "num_documents", "num_bytes"))
            rows.append([name, *figures, *counts])
        yield from format_table(rows)
    if report["tasks"]:
        rows = [["task", "metric", "value", "stderr", "examples", "shots"]]
        for name, task in report["tasks"].items():
            examples, shots = str(task["num_examples"]), str(task["num_fewshot"])
            for metric, figure in task["figures"].items():
                error = "" if figure["stderr"] is None else f"± {figure['stderr']:.4f}"
                rows.append([name, metric, f"{figure['value']:.4f}", error, examples, shots])
        yield from format_table(rows)


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("evaluate", __doc__)
    add_model_options(parser)
    add = parser.add_argument
    text = "held-out files of a domain, as in training.dataset_path; a repeated name adds files"
    files: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    add("--perplexity", metavar="NAME=FILES", help=text, **files)
    add("--dataset_text_key", metavar="KEY", help="as in [training]")
    add("--dataset_text_template", metavar="TEXT", help="as in [training]")
    add("--dataset_cache", metavar="DIR", help="as in [training]")
    add("--tasks", type=_names, default=[], metavar="A,B", help="tasks of lm-evaluation-harness")
    add("--include_path", type=Path, metavar="DIR", help="folder of custom YAML tasks")
    text = "examples per question; default: the task's"
    add("--num_fewshot", type=at_least(0), metavar="N", help=text)
    add("--limit", type=at_least(1), metavar="N", help="examples per task")
    add("--apply_chat_template", action="store_true", help="render the tasks as chats")
    text = "tokens per sequence; default: the model's"
    add("--seq_len", type=at_least(1), metavar="N", help=text)
    add("--batch_size", type=at_least(1), default=8, metavar="N", help="sequences per batch (8)")
    add("--output", type=local_path, metavar="FILE", help="write all figures as JSON")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
