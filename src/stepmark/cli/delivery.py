"""How a supervised verb ends: what it shows and writes, where the run lies, what to do next."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.cli.options import Values
from stepmark.core.comm_case import CommCase
from stepmark.core.errors import worst
from stepmark.core.train_case import TrainCase

if TYPE_CHECKING:
    from stepmark.app.view import View


def deliver(
    path: Path,
    values: Values,
    code: int,
    *,
    files: "Callable[[View, Values], None]",
    show: "Callable[[View, Values], None]",
) -> int:
    """Write the files that were asked for, show the run; the exit code of it all."""
    from stepmark.app.view import view  # noqa: PLC0415
    from stepmark.cli import session  # noqa: PLC0415

    seen = view(path)
    files(seen, values)
    if "-" not in (values.get("json"), values.get("csv")):
        show(seen, values)
    sys.stdout.flush()
    sys.stderr.write(f"run {path}\n")
    words = {130: "interrupted", 143: "terminated", 3: "not all cases were measured"}
    if word := words.get(code):
        sys.stderr.write(f"{word}; {resume_hint(seen.run.command, path)}\n")
    return worst(code, session.exit_code(seen))


def listed(cases: Sequence[CommCase | TrainCase], notes: Sequence[str] = ()) -> None:
    """--dry-run: the command of each case."""
    for note in notes:
        sys.stderr.write(f"# {note}\n")
    sys.stdout.write("".join(case.command() + "\n" for case in cases))
    sys.stdout.flush()
    count = len(cases)
    sys.stderr.write(f"{count} case{'s' if count != 1 else ''}; none was run\n")


def resume_hint(command: str, path: Path) -> str:
    """What to do after an interrupt. How an outer launcher was called is not known."""
    from stepmark.launch import torchrun  # noqa: PLC0415

    same = "the same command and" if torchrun.is_rank() else command
    return f"finished cases are kept; go on with: {same} --resume {path}"
