"""stepmark report: the self-contained page of a run."""

import sys
from pathlib import Path

from stepmark.app.view import view
from stepmark.core.verb_options import ReportOptions
from stepmark.report.page import html
from stepmark.store.files import write_text
from stepmark.store.reader import find_run


def run(options: ReportOptions) -> None:
    """Write the page and print where it is."""
    sys.stdout.write(f"{write(find_run(options.runs, options.run), options.out)}\n")


def write(path: Path, target: Path | None = None) -> Path:
    """Write the page of the run at `path`."""
    seen = view(path)
    target = target or path / "report.html"
    text = html(seen.run, seen.records, seen.rows, seen.device, seen.comm_rows, seen.train_rows)
    write_text(target, text, "out")
    return target
