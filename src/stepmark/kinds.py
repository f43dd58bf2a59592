"""The kinds of cases and the verbs that plan them: which feature measures and shows what.

`core.kind`, which has the tables, imports this module: they are full wherever they are read.
"""

from stepmark.cases.kind import KINDS, PLAN_VERBS, Kind, PlanVerb

KINDS |= {
    "op": Kind(
        options_of="stepmark.operators.op_options:options_of",
        columns="stepmark.operators.op_columns:OP_COLUMNS",
        rows="stepmark.operators.op_columns:rows",
        print_rows="stepmark.operators.op_printing:print_operators",
        bench="stepmark.operators.bench.bench:OperatorBench",
    ),
    "comm": Kind(
        options_of="stepmark.collectives.comm_options:options_of",
        columns="stepmark.collectives.comm_columns:COMM_COLUMNS",
        rows="stepmark.collectives.comm_columns:rows",
        bench="stepmark.collectives.bench.bench:CollectiveBench",
    ),
    "train": Kind(
        options_of="stepmark.training.train_options:options_of",
        columns="stepmark.training.train_columns:TRAIN_COLUMNS",
        rows="stepmark.training.train_columns:rows",
        print_rows="stepmark.training.training_printing:print_training",
        bench="stepmark.training.bench:TrainingBench",
    ),
    "replay": Kind(
        options_of="stepmark.replays.replay_options:options_of",
        columns="stepmark.replays.replay_columns:REPLAY_COLUMNS",
        rows="stepmark.replays.replay_columns:rows",
        bench="stepmark.replays.bench.bench:ReplayBench",
    ),
}

_LIST = "stepmark.runs.dry_run:show"
PLAN_VERBS |= {
    "op": PlanVerb(show="stepmark.runs.op_run:show", list_plan=_LIST),
    "check": PlanVerb(show="stepmark.comparison.check:show", list_plan=_LIST),
    "comm": PlanVerb(show="stepmark.collectives.comm:show", list_plan=_LIST),
    "train": PlanVerb(show="stepmark.training.train:show", list_plan=_LIST),
    "run": PlanVerb(
        show="stepmark.runs.run:show",
        list_plan=_LIST,
        commit="stepmark.runs.step_report:commit",
    ),
    "calibrate": PlanVerb(show="stepmark.predictions.calibrate:show", list_plan=_LIST),
    "replay": PlanVerb(show="stepmark.replays.replay_verb:show", list_plan=_LIST),
    "fill": PlanVerb(show="stepmark.replays.workload_fill:show", list_plan=_LIST),
}
