"""The command `torchtitan VERB ...`.

Each verb is a module with a `main(arguments)` that returns the exit code. Only the module of the
given verb is imported, so `torchtitan --help` needs no torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import NoReturn

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.base.log import replace_closed_streams, showing_time
from torchtitan.base.path import drop_current_folder
from torchtitan.tools.verbs import report_errors

TRAIN, LAUNCH = "torchtitan.train", "torchtitan.launch"
VERBS = {
    "train": (TRAIN, "train a job, on NGPU ranks (1)"),
    "config": ("torchtitan.tools.config", "check a job's settings and print them all"),
    "plan": ("torchtitan.tools.plan.command", "plan a job's memory, traffic, layout and step time"),
    "check": ("torchtitan.tools.check.command", "check the machines of a job before it starts"),
    "preview": ("torchtitan.tools.preview", "show the tokens and labels of a job's examples"),
    "generate": ("torchtitan.tools.generate", "continue texts, or chat, with a trained model"),
    "evaluate": ("torchtitan.tools.evaluate.command", "measure perplexity, and tasks"),
    "prepare": ("torchtitan.tools.prepare", "tokenize files once, to train from on any machine"),
    "tokenizer": ("torchtitan.tools.tokenizer", "train a byte-pair tokenizer"),
    "convert": ("torchtitan.tools.convert", "convert weights to and from Hugging Face; average"),
    "compare": ("torchtitan.tools.compare.command", "compare runs, or layouts of a job"),
    "explain": ("torchtitan.tools.explain.command", "name the documents of a step, or its steps"),
    "report": ("torchtitan.tools.report.command", "write a page about runs"),
    "hang": ("torchtitan.tools.hang", "name the rank that other ranks waited for"),
}


@report_errors
def main(argv: Sequence[str]) -> int:
    """Run a verb and return its exit code; return 2 for a user's mistake."""
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        lines = ["usage: torchtitan VERB ... [--help]", "", "verbs:"]
        lines += [f"  {name:<10} {summary}" for name, (_, summary) in VERBS.items()]
        sys.stdout.write("\n".join([*lines, ""]))
        return 0
    if verb not in VERBS:
        rule = f"the verb must be one of {', '.join(VERBS)}, got {verb!r:.60}"
        raise ConfigError(f"{rule}{did_you_mean(verb, VERBS)}")
    if verb == "train":
        _train(argv[1:])
    with nullcontext() if verb == "generate" else showing_time():  # that one may wait for its user
        code: int = import_module(VERBS[verb][0]).main(argv[1:])
    return code


def _train(arguments: Sequence[str]) -> NoReturn:
    from torchtitan.job import load_job

    if not arguments:
        raise ConfigError("train needs a job: a TOML file, a name such as debug_model, or settings")
    if {"-h", "--help"} & {*arguments}:
        load_job(arguments)  # prints the settings and exits; the trainer would import torch
    sys.argv, module = ["torchtitan train", *arguments], TRAIN
    ranks = os.environ.get("NGPU", "1")
    if not (ranks.isascii() and ranks.isdecimal() and int(ranks) > 0):
        raise ConfigError(f"NGPU must be the number of ranks, 1 or more, got {ranks!r:.60}")
    if int(ranks) > 1 and "RANK" not in os.environ:
        from torchtitan.data.prepare import num_cores

        # ranks that share the cores of one machine must not each start a thread per core
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // int(ranks))))
        options = ["--standalone", "--nproc_per_node", ranks, "-m", "torchtitan", "train"]
        sys.argv, module = [LAUNCH, *options, *arguments], LAUNCH
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise AssertionError("the trainer ends the process")


def run() -> NoReturn:
    """Run the command line of this process, and end it."""
    drop_current_folder()
    replace_closed_streams()
    code = main(sys.argv[1:])
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        from torchtitan.mesh.ranks import leave

        leave(code)
    sys.exit(code)
