"""stepmark runs: list, show, export and query what earlier runs measured."""

from stepmark.cli.flags import add, group, verb
from stepmark.core.verb_options import ExportOptions, ListOptions, ShowOptions, SqlOptions

app = group("List, show, export and query earlier runs.")
add(
    app,
    "list",
    verb(ListOptions, "stepmark.app.runs:print_list", "One row per run, oldest first."),
)
add(app, "show", verb(ShowOptions, "stepmark.app.runs:show", "The rows of one run."))
add(
    app,
    "export",
    verb(ExportOptions, "stepmark.app.runs:export_run", "Write a run's rows for another tool."),
)
add(
    app,
    "sql",
    verb(
        SqlOptions,
        "stepmark.app.runs:run_query",
        'Query all runs: "SELECT family, min(median_s) FROM records GROUP BY family".',
    ),
)
