"""stepmark report: the self-contained page of a run."""

from stepmark.cli.flags import verb
from stepmark.core.verb_options import ReportOptions

command = verb(
    ReportOptions,
    "stepmark.app.runs:run_report",
    "Write report.html of a run: roofline, tables, curves, commands, environment.",
)
