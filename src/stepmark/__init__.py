"""stepmark: how fast should this model train on this cluster, and how fast does it?

From Python: `import stepmark as sm`, then `sm.workload`, `sm.measure`, `sm.predict`,
`sm.compare`, `sm.read_trace` do what the verbs of the command line do, and return objects with
figures as attributes, rows, `to_pandas()` and `show()`. docs/python.md has an example of each.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepmark.api.comparison import Comparison, compare
    from stepmark.api.ledger import Ledger
    from stepmark.api.logs import Logs, logs
    from stepmark.api.main_job import run
    from stepmark.api.model import Model
    from stepmark.api.options import options
    from stepmark.api.plan import Plan, plan
    from stepmark.api.prediction import Prediction, Predictions, predict
    from stepmark.api.run import Replay, Run, measure, read_run, replay
    from stepmark.api.step import Step
    from stepmark.api.sweep import Sweep, sweep
    from stepmark.api.trace import Trace, read_trace
    from stepmark.api.workload import Workload, read_workload, workload
    from stepmark.ground.errors import ConfigError, NothingToMeasureError, StepmarkError
    from stepmark.operators.custom_op import CustomOp
    from stepmark.tables.table import Table

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "ConfigError",
    "CustomOp",
    "Ledger",
    "Logs",
    "Model",
    "NothingToMeasureError",
    "Plan",
    "Prediction",
    "Predictions",
    "Replay",
    "Run",
    "Step",
    "StepmarkError",
    "Sweep",
    "Table",
    "Trace",
    "Workload",
    "__version__",
    "compare",
    "logs",
    "measure",
    "options",
    "plan",
    "predict",
    "read_run",
    "read_trace",
    "read_workload",
    "replay",
    "run",
    "sweep",
    "workload",
]

# Modules of the names above, imported when a name is used.
_MODULES = {
    "stepmark.api.comparison": ("Comparison", "compare"),
    "stepmark.api.ledger": ("Ledger",),
    "stepmark.api.logs": ("Logs", "logs"),
    "stepmark.api.main_job": ("run",),
    "stepmark.api.model": ("Model",),
    "stepmark.api.options": ("options",),
    "stepmark.api.plan": ("Plan", "plan"),
    "stepmark.api.prediction": ("Prediction", "Predictions", "predict"),
    "stepmark.api.run": ("Replay", "Run", "measure", "read_run", "replay"),
    "stepmark.api.step": ("Step",),
    "stepmark.api.sweep": ("Sweep", "sweep"),
    "stepmark.tables.table": ("Table",),
    "stepmark.api.trace": ("Trace", "read_trace"),
    "stepmark.api.workload": ("Workload", "read_workload", "workload"),
    "stepmark.operators.custom_op": ("CustomOp",),
    "stepmark.ground.errors": ("ConfigError", "NothingToMeasureError", "StepmarkError"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
