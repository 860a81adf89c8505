"""Check the machines of a job before it starts, with all its ranks.

    python -m torchtitan.launch ... -m torchtitan check JOB [settings]

All ranks take part and look for different versions or code, full disks, and data that differ
between machines. Rank 0 prints a table and each fault. Exit codes: 0 no fault; 2 a fault, or
invalid settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from torchtitan.job import load_config
from torchtitan.tools.verbs import build_parser, report_errors


@report_errors
def main(argv: Sequence[str]) -> int:
    """Check on this rank; return the exit code, which is the same on all ranks."""
    parser = build_parser("check", __doc__)
    text = "also verify the checksums of all checkpoints of the job"
    parser.add_argument("--checksums", action="store_true", help=text)
    options, settings = parser.parse_known_args(argv)
    if os.environ.get("RANK", "0") != "0":
        logging.disable()
    config = load_config(settings)
    from torchtitan.tools.check.ranks import check_job

    return check_job(config, checksums=options.checksums)
