"""One HTML file about one or more runs.

    python -m torchtitan report outputs/a outputs/b --out report.html

Curves of all logged figures side by side, starts, changed settings and spikes on their axes, the
layout, the pipeline's timeline, and what was done to each run. The file needs no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import ConfigError, UserError, printable
from torchtitan.base.urls import local_path
from torchtitan.tools.report.page import build_page
from torchtitan.tools.report.read import name_runs, read_run


def main(argv: Sequence[str]) -> int:
    """Write the page; return 0, or 2 for a mistake, which is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=local_path, default=Path("report.html"), help="file to write")
    add_trust_code(parser)
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    try:
        with trusting_stored(arguments.trust_code):
            runs = [read_run(path, name=name) for name, path in name_runs(arguments.runs).items()]
            page = build_page(runs)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--out must be a file that can be written, got {out} ({error.strerror}); name "
                f"another"
            ) from error
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    size = len(page.encode()) / 2**20
    names = printable(", ".join(run.name for run in runs))
    sys.stdout.write(f"{out}: {names}, {size:.2f} MiB\n")
    return 0
