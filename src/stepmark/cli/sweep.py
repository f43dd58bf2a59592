"""stepmark sweep: one measuring command under several settings, in rounds, compared."""

from stepmark.cli.flags import verb
from stepmark.core.verb_options import SweepOptions

command = verb(
    SweepOptions,
    "stepmark.app.sweep:run",
    "Measure the same command under several settings, in interleaved rounds, and compare.",
)
