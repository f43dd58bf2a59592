"""What a feature does with its cases and plans; `stepmark.kinds` fills the tables.

Folders below the features look here, because they may not import what stands above them. Names
are "module:name", which `options.load` imports on first use: benches import torch.
"""

from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of case.

    options_of(case): the options of its verb that measure the case alone. columns: of its rows.
    rows(records, run, device=...): the rows. print_rows(rows, console): prints them where they
    are more than a table. bench(context, how, budget_s=...): measures its cases on ranks.
    """

    options_of: str
    columns: str
    rows: str
    bench: str
    print_rows: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerb:
    """A verb that makes plans.

    show(run, options, code): shows a run, writes its files, returns the exit code.
    list_plan(plan, machine, json, csv): prints the plan for --dry-run.
    commit(run, plan): writes the predictions of later launches before these are measured.
    """

    show: str
    list_plan: str
    commit: str = ""


KINDS: dict[str, Kind] = {}  # by kind of case
PLAN_VERBS: dict[str, PlanVerb] = {}  # by the command of a plan

# By its name: what fills the tables stands above, and whoever reads them gets them full.
import_module("stepmark.kinds")
