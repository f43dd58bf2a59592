"""stepmark check: ten minutes to accept a machine against a reference run."""

from stepmark.cli.flags import verb
from stepmark.core.verb_options import CheckOptions

command = verb(
    CheckOptions,
    "stepmark.app.check:run",
    "Measure a reference run's cases again; exit 1 if any is slower beyond noise.",
)
