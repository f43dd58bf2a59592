"""stepmark run: what it shows. Tables, summary and the page of a run."""

from pathlib import Path

from stepmark.app.delivery import Values, ended


def show(path: Path, values: Values, code: int) -> int:
    """Show operators, collectives and training steps; write the page. Returns the exit code."""
    from stepmark.app.report import write  # noqa: PLC0415
    from stepmark.app.view import console, view  # noqa: PLC0415
    from stepmark.report import (  # noqa: PLC0415
        comm_printing,
        comm_summary,
        printing,
        summary,
        training_printing,
        training_summary,
    )

    run = view(path)
    page = write(path)
    printing.print_rows(run.rows, console())
    if run.comm_rows:
        comm_printing.wide(run.comm_rows, console())
    if run.train_rows:
        training_printing.print_training(run.train_rows, console())
    lines = comm_summary.comm_lines(run.comm_rows)
    for line in (*lines, *training_summary.train_lines(run.train_rows)):
        console().print(line, markup=False, highlight=False, soft_wrap=True)
    summary.terminal_summary(run.run, run.rows, console(), report=page)
    return ended(run, path, code)
