"""A measured step in one sentence, whose differences add up to that of the steps."""

from collections import defaultdict

from stepmark.timeline.ledger import RECOMPUTED, WAITING, Group, Idle, Ledger
from stepmark.timeline.ledger_rows import LedgerTable, ledger_table
from stepmark.timeline.ledger_text import (
    UNDER_COMMUNICATION,
    doubt,
    in_ms,
    lines_of,
    percent,
    words_of,
)

_NOTABLE_PCT = 1.0
_MOST_LINES = 2  # of a difference, beside the others together
_REST = "other lines"


def sentence(
    subject: str,
    measured: Ledger,
    predicted: Ledger | None = None,
    *,
    interval: str = "",
    mfu_pct: float | None = None,
    validity: str = "",
) -> str:
    """Return how long the step takes, where the prediction differs, and what is avoidable.

    subject: model, strategy and devices. interval: of the prediction, as text. validity: what
    speaks against the measurement.
    """
    parts = [f"{subject}: measured {in_ms(measured.window_ns)} ms"]
    if validity:
        parts[0] += f" (doubtful: {validity})"
    unknown = doubt(measured)
    if predicted is not None:
        error = percent(predicted.window_ns - measured.window_ns, measured.window_ns)
        off = f"{abs(error):.1f} % too {'high' if error > 0 else 'low'}"
        facts = [off if abs(error) >= 0.05 else "within 0.05 %", *filter(None, [interval])]
        parts[0] += f", predicted {in_ms(predicted.window_ns)} ms ({'; '.join(facts)})"
        if not unknown:
            parts += filter(None, [difference_text(predicted, measured)])
    if mfu_pct is not None:
        parts.append(f"{mfu_pct:.0f} % MFU")
    return "; ".join([*parts, unknown or avoidable_text(measured)])


def difference_text(predicted: Ledger, measured: Ledger) -> str:
    """Return the difference of the steps and of its largest lines, as their table has them.

    "": there is none. Work counts alone and under communication together.
    """
    table = ledger_table([predicted, measured])
    lines_ms: defaultdict[str, float] = defaultdict(float)
    for row in table.rows:
        name = _REST if row.group is None else row.words.removesuffix(UNDER_COMMUNICATION)
        lines_ms[name] += _difference_ms(row.times_ms, table)
    names = [name for name in lines_ms if name != _REST]
    largest = sorted(names, key=lambda name: -abs(lines_ms[name]))[:_MOST_LINES]
    shown_ms = {name: lines_ms[name] for name in largest}
    shown_ms[_REST] = round(sum(lines_ms.values()) - sum(shown_ms.values()), table.places)
    shown = [f"{name} {table.signed(ms)} ms" for name, ms in shown_ms.items() if ms]
    if not shown:
        return ""
    step_ms = _difference_ms(table.steps_ms, table)
    than = f"{table.shown(abs(step_ms))} ms {'longer' if step_ms > 0 else 'shorter'} than"
    return f"{than if step_ms else 'as long as'} predicted: {', '.join(shown)}"


def _difference_ms(times_ms: tuple[float, ...], table: LedgerTable) -> float:
    predicted_ms, measured_ms = times_ms
    return round(measured_ms - predicted_ms, table.places)


def avoidable_text(measured: Ledger) -> str:
    """Return the largest time that is no necessary work, with its share of the step."""
    idle = {
        cause: measured.lines.get((Group.IDLE, str(cause)), 0)
        for cause in (Idle.HOST, Idle.LAUNCH_GAP, Idle.DATA, Idle.RANK)
    }
    times = {
        "exposed communication": measured.total(Group.COMM),
        "copies": measured.total(Group.COPIES),
        "recomputation": measured.within.get(RECOMPUTED, 0),
        "idle time between kernels": idle[Idle.HOST] + idle[Idle.LAUNCH_GAP],
        **{words_of((Group.IDLE, str(each))): idle[each] for each in (Idle.DATA, Idle.RANK)},
    }
    name, time_ns = max(times.items(), key=lambda item: item[1])
    share = percent(time_ns, measured.window_ns)
    if share < _NOTABLE_PCT:
        return f"no avoidable time above {_NOTABLE_PCT:.0f} % of the step"
    if name == "exposed communication":
        is_waiting = 2 * measured.within.get(WAITING, 0) > time_ns
        name += f", mostly {WAITING if is_waiting else lines_of([measured], Group.COMM)[0][1]}"
    return f"largest avoidable time: {name}, at most {in_ms(time_ns)} ms ({share:.1f} %)"
