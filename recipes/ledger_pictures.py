"""The ledger of a step of a run as two pictures, for a light and a dark page.

    python recipes/ledger_pictures.py results/h100-run docs/images
    python recipes/ledger_pictures.py results/h100-x4-predictions-1 docs/images \\
        --step 3 --name ledger-fsdp

--step: number of the step, of a run with several. docs/images has those of the commands above.
"""

import argparse
import sys
from pathlib import Path

from stepmark.ground.errors import StepmarkError
from stepmark.predictions import ledger_page
from stepmark.runs.step_report import step_report
from stepmark.store.view import view
from stepmark.timeline import ledger_svg
from stepmark.timeline.ledger_text import NAMES

THEMES = {"light": ledger_svg.LIGHT, "dark": ledger_svg.DARK}


def main() -> int:
    """Write the pictures. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--name", default="ledger", help="beginning of the files' names")
    arguments = parser.parse_args()
    try:
        report = step_report(arguments.run, view(arguments.run))
    except StepmarkError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    steps = report.steps if report else ()
    if not 1 <= arguments.step <= len(steps):
        sys.stderr.write(f"--step {arguments.step}: {arguments.run} has {len(steps)} steps\n")
        return 2
    step = steps[arguments.step - 1]
    ledgers = [own for own in (step.predicted, step.measured.ledger) if own is not None]
    for name, theme in THEMES.items():
        path = arguments.folder / f"{arguments.name}-{name}.svg"
        title = ledger_page.clauses(step.sentence)[0]
        names = NAMES[-len(ledgers) :]
        picture = ledger_svg.svg(ledgers, names, title=title, theme=theme)
        path.write_text(f"{picture}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
