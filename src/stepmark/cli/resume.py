"""stepmark resume RUN: what is left of a run, as it was planned."""

from stepmark.cli.flags import verb
from stepmark.core.option_groups import ResumeOptions

command = verb(
    ResumeOptions,
    "stepmark.app.measure:resume",
    "Measure what is left of a run that was cut short; measured cases are skipped.",
)
