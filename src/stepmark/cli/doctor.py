"""stepmark doctor: what this machine is; what would be measured, what not, and why."""

from stepmark.cli.flags import verb
from stepmark.core.verb_options import DoctorOptions

command = verb(
    DoctorOptions,
    "stepmark.app.doctor:run",
    "What this machine is; what would be measured, what not, and why.",
)
