"""stepmark runs: list, show, export and query what earlier runs measured."""

from stepmark.cli.commands import Group, builder
from stepmark.runs.runs_options import ExportOptions, ListOptions, ShowOptions, SqlOptions

_HANDLERS = "stepmark.runs.runs"
_LIST = "One row per run, oldest first."
_SHOW = "The rows of one run."
_EXPORT = "Write a run's rows for another tool."
_SQL = "Query all runs."
app = Group(
    "List, show, export and query earlier runs.",
    {
        "list": (_LIST, builder(ListOptions, f"{_HANDLERS}:print_list", _LIST, "runs list")),
        "show": (
            _SHOW,
            builder(
                ShowOptions,
                f"{_HANDLERS}:show",
                _SHOW,
                "runs show",
                "runs show 20260101 --csv -",
            ),
        ),
        "export": (
            _EXPORT,
            builder(
                ExportOptions,
                f"{_HANDLERS}:export_run",
                _EXPORT,
                "runs export latest rows.parquet --to parquet",
            ),
        ),
        "sql": (
            _SQL,
            builder(
                SqlOptions,
                f"{_HANDLERS}:run_query",
                _SQL,
                "runs sql 'SELECT family, min(time_s) FROM rows GROUP BY family'",
            ),
        ),
    },
)
