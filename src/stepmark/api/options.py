"""What can be given to the other functions."""

from stepmark.api.keywords import OPTION_COLUMNS, describe, spells_keywords
from stepmark.api.run import VERBS, class_of
from stepmark.comparison.compare_options import CompareOptions
from stepmark.comparison.sweep_options import SweepOptions
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.log_options import LogsOptions
from stepmark.layouts.plan_options import PlanOptions
from stepmark.predictions import framework_job
from stepmark.predictions.predict_options import PredictOptions
from stepmark.runs.run_options import RunOptions
from stepmark.tables.table import Table
from stepmark.traces.trace_options import BreakdownOptions
from stepmark.workloads import workload_flags
from stepmark.workloads.rules import find_rule

_CLASSES: dict[str, type] = {
    "predict": PredictOptions,
    "plan": PlanOptions,
    "compare": CompareOptions,
    "trace": BreakdownOptions,
    "logs": LogsOptions,
    "run": RunOptions,
    "sweep": SweepOptions,
}


@spells_keywords
def options(verb: str, which: str = "") -> Table:
    """Return the keywords of a verb: their values, defaults and meanings.

    verb: op, comm, train, replay, run, sweep, predict, plan, compare, trace, logs or workload.
    which: of "op" a family such as gemm, of "workload" and "predict" a framework. Raises
    ConfigError.
    """
    cls: type
    if verb == "workload":
        cls = workload_flags.options_class(find_rule(which or "megatron"), has_ignored=False)
    elif verb == "predict" and which:
        cls = framework_job.options_class(find_rule(which))
    elif verb in _CLASSES:
        cls = _CLASSES[verb]
    elif verb in VERBS:
        cls = class_of(verb, [which] if which else [])
    else:
        raise ConfigError("verb", verb, f"one of {', '.join((*VERBS, *_CLASSES))}, workload")
    return Table(describe(cls), OPTION_COLUMNS)
