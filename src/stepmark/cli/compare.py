"""stepmark compare: runs, files of nccl-tests, CSVs and tables of slides, with verdicts."""

from stepmark.cli.flags import verb
from stepmark.core.verb_options import CompareOptions

command = verb(
    CompareOptions,
    "stepmark.app.compare:run",
    "Ratio of speeds per size or shape, its 99 % interval over launches, and a verdict.",
)
