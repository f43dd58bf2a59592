"""stepmark run: what it shows. Tables, summary and the page of a run."""

from pathlib import Path

from stepmark.app.delivery import Values, ended


def show(path: Path, values: Values, code: int) -> int:
    """Show operators, collectives and training steps; write the page. Returns the exit code."""
    from stepmark.app.runs import write_page  # noqa: PLC0415
    from stepmark.app.view import console, show_rows, view  # noqa: PLC0415
    from stepmark.report import summary  # noqa: PLC0415

    run = view(path)
    page = write_page(path)
    show_rows(run)
    lines = summary.comm_lines(run.comm_rows)
    for line in (*lines, *summary.train_lines(run.train_rows)):
        console().print(line, markup=False, highlight=False, soft_wrap=True)
    summary.terminal_summary(run.run, run.rows, console(), report=page)
    return ended(run, path, code)
