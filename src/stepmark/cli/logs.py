"""stepmark logs: NCCL logs, flight-recorder dumps, inspector lines and tables of results."""

from stepmark.cli.flags import verb
from stepmark.core.verb_options import LogsOptions

command = verb(
    LogsOptions,
    "stepmark.app.logs:run",
    "Read a job's logs: transports, mistakes, hangs, and how often each message is sent.",
)
