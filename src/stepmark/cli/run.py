"""stepmark run: the main job. What this machine is, what it does, and a report."""

from stepmark.cli.flags import verb
from stepmark.core.option_groups import RunOptions

command = verb(
    RunOptions,
    "stepmark.app.run:run",
    "Doctor, operators of a model's layer, collectives, training steps, summary, HTML.",
)
