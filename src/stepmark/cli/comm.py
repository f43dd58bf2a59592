"""stepmark comm NAME...: collectives, with nccl-tests' flags and table."""

from stepmark.cli.flags import verb
from stepmark.core.comm_options import CommOptions

command = verb(
    CommOptions,
    "stepmark.app.comm:run",
    "Measure collectives: nccl-tests' flags, table and figures; no MPI.",
)
