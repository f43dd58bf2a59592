"""The kinds of cases and the verbs that plan them: which feature measures and shows what.

`core.kind`, which has the tables, imports this module: they are full wherever they are read.
"""

from stepmark.core.kind import KINDS, PLAN_VERBS, Kind, PlanVerb

KINDS |= {
    "op": Kind(
        options_of="stepmark.core.op_options:options_of",
        columns="stepmark.report.op_columns:OP_COLUMNS",
        rows="stepmark.report.op_columns:rows",
        bench="stepmark.bench.operators.bench:OperatorBench",
    ),
    "comm": Kind(
        options_of="stepmark.core.comm_options:options_of",
        columns="stepmark.report.comm_columns:COMM_COLUMNS",
        rows="stepmark.report.comm_columns:rows",
        bench="stepmark.bench.collectives.bench:CollectiveBench",
    ),
    "train": Kind(
        options_of="stepmark.core.train_options:options_of",
        columns="stepmark.report.train_columns:TRAIN_COLUMNS",
        rows="stepmark.report.train_columns:rows",
        print_rows="stepmark.report.training_printing:print_training",
        bench="stepmark.bench.training.bench:TrainingBench",
        largest_mbs="stepmark.app.train_plan:largest_mbs",
    ),
    "replay": Kind(
        options_of="stepmark.core.replay_options:options_of",
        columns="stepmark.report.replay_columns:REPLAY_COLUMNS",
        rows="stepmark.report.replay_columns:rows",
        bench="stepmark.bench.replay.bench:ReplayBench",
    ),
}

_LIST = "stepmark.app.dry_run:show"
PLAN_VERBS |= {
    "op": PlanVerb(show="stepmark.app.op:show", list_plan=_LIST),
    "check": PlanVerb(show="stepmark.app.check:show", list_plan=_LIST),
    "comm": PlanVerb(show="stepmark.app.comm:show", list_plan=_LIST),
    "train": PlanVerb(show="stepmark.app.train:show", list_plan=_LIST),
    "run": PlanVerb(
        show="stepmark.app.run:show", list_plan=_LIST, commit="stepmark.app.step_report:commit"
    ),
    "calibrate": PlanVerb(show="stepmark.app.calibrate:show", list_plan=_LIST),
    "replay": PlanVerb(show="stepmark.app.replay:show", list_plan=_LIST),
    "fill": PlanVerb(show="stepmark.app.workload_fill:show", list_plan=_LIST),
}
