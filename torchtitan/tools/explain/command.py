"""What a run has read: `python -m torchtitan explain RUN`.

    python -m torchtitan explain RUN --step 100 --text
    python -m torchtitan explain RUN --document data/a.jsonl:17

This module has the options, so that `--help` does not import torch. Modules that the run's settings
name are imported only with `--trust_code`, and URLs are read only with `--fetch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import DEFAULT_CACHE
from torchtitan.tools.verbs import build_parser, report_errors


@report_errors
def main(argv: Sequence[str]) -> int:
    """Name the samples and documents of a step, or the steps of a document.

    No log is needed: the position of a step gives the numbers of its samples, the permutation gives
    their places in the data, and both can be inverted.
    """
    parser = build_parser("explain", main.__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="job.dump_folder of the run")
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--step", type=int, metavar="N", help="explain the batch of this step")
    text = "find the steps of a document; FILE finds all of its documents"
    subject.add_argument("--document", metavar="FILE[:ROW]", help=text)
    text = "ranks after the last checkpoint; default: those of the last start"
    add("--world_size", type=int, metavar="N", help=text)
    text = "cache of tokens; default: that of new jobs"
    add("--dataset_cache", metavar="DIR", default=DEFAULT_CACHE, help=text)
    add("--fetch", action="store_true", help="read the URLs that the run's settings name")
    add("--text", action="store_true", help="print the text of each document")
    add("--json", action="store_true", help="print one JSON object")
    add_trust_code(parser)
    options = parser.parse_args(argv)
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world_size must be at least 1, got {options.world_size}")
    if options.document is not None and options.text:
        raise ConfigError("--text requires --step, got --document")
    from torchtitan.tools.explain import report

    with trusting_stored(options.trust_code):
        return report.main(options)
