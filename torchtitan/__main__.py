"""The one command: `torchtitan VERB ...`, or `python -m torchtitan VERB ...`.

Each verb is a module with a `main(arguments)` that returns the exit code. It is imported when it is
asked for, so that the list of verbs needs no torch. `torchtitan VERB --help` tells about one.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from torchtitan.base.errors import ConfigError, UserError, did_you_mean

TRAIN = "torchtitan.train"
VERBS: Mapping[str, tuple[str, str]] = {
    "train": (TRAIN, "train a job; this process is one of its ranks"),
    "config": ("torchtitan.tools.config", "check a job's settings and print them all"),
    "plan": ("torchtitan.tools.plan.command", "tell a job's memory, traffic, layout and step time"),
    "check": ("torchtitan.tools.check.command", "check the machines of a job before it starts"),
    "preview": ("torchtitan.tools.preview", "show what a job learns of its examples"),
    "generate": ("torchtitan.tools.generate", "continue texts, or chat, with a trained model"),
    "evaluate": ("torchtitan.tools.evaluate.command", "measure perplexity, and tasks"),
    "prepare": ("torchtitan.tools.prepare", "tokenize files once, to train from on any machine"),
    "tokenizer": ("torchtitan.tools.tokenizer", "train a byte-pair tokenizer"),
    "convert": ("torchtitan.tools.convert", "convert weights to and from Hugging Face"),
    "average": ("torchtitan.tools.average", "average the weights of a run's checkpoints"),
    "compare": ("torchtitan.tools.compare.command", "compare runs, or layouts of a job"),
    "audit": ("torchtitan.tools.audit.command", "explain, verify or reproduce what a run did"),
    "report": ("torchtitan.tools.report.command", "write a page about runs"),
    "hang": ("torchtitan.tools.hang", "name the rank that the others waited for"),
}
"""The module of each verb, and what it does."""
HELP = ("-h", "--help")


def main(argv: Sequence[str]) -> int:
    """Run a verb and return its exit code; a mistake of the user is printed, with code 2."""
    verb, *arguments = argv or ["--help"]
    try:
        if verb in HELP:
            sys.stdout.write(_usage())
            return 0
        if verb not in VERBS:
            raise ConfigError(
                f"the verb must be one of {', '.join(VERBS)}, got {verb!r:.60}"
                f"{did_you_mean(verb, VERBS)}"
            )
        if verb == "train":
            return _train(arguments)
        code: int = import_module(VERBS[verb][0]).main(arguments)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{error}\n")
        return error.exit_code
    return code


def _usage() -> str:
    lines = [f"  {verb:<10} {summary}" for verb, (_, summary) in VERBS.items()]
    return "\n".join(["usage: torchtitan VERB ... [--help]", "", "verbs:", *lines, ""])


def _train(arguments: Sequence[str]) -> NoReturn:
    if not arguments:
        raise ConfigError(
            "train needs a job: give --job.config_file FILE, for example "
            "train_configs/debug_model.toml, or single settings"
        )
    sys.argv = ["torchtitan train", *arguments]
    runpy.run_module(TRAIN, run_name="__main__", alter_sys=True)
    raise AssertionError("the trainer ends the process")


def run() -> NoReturn:
    """Run the command line of this process, and end it."""
    code = main(sys.argv[1:])
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        from torchtitan.mesh.ranks import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
