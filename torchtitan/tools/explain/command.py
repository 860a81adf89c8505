"""What a run has read: `torchtitan explain RUN`.

    torchtitan explain RUN --step 100 --text
    torchtitan explain RUN --document data/a.jsonl:17

This module has the options, so that `--help` does not import torch. Nothing that the run's settings
name is imported, and URLs are read only with `--fetch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    text = "cache of tokens; default: that of new jobs"
    add("--dataset_cache", metavar="DIR", default=DEFAULT_CACHE, help=text)
    add("--fetch", action="store_true", help="read the URLs that the run's settings name")
    add("--text", action="store_true", help="print the text of each document")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.document is not None and options.text:
        raise ConfigError("--text requires --step, got --document")
    from torchtitan.tools.explain import report

    return report.main(options)
