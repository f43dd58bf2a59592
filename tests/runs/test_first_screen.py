"""The end of `stepmark run`: short, with the answer, and with what went wrong."""

import shlex
from dataclasses import replace
from pathlib import Path

from tests.tables.records import full_run
from tests.training.train_records import full_train_run, train_device, train_run

from stepmark.operators.op_columns import rows as operator_rows
from stepmark.predictions.predicted_steps import Step, StepReport, Suggestion
from stepmark.runs import first_screen
from stepmark.runs.first_screen import WIDTH
from stepmark.tables.columns import Row
from stepmark.timeline.ledger import Group, Idle, Ledger, Line, MeasuredLedger, StepPower, Work
from stepmark.training.train_columns import rows as train_rows

PAGE = Path("runs/20261126-174052-16f3/report.html")
COMMAND = (
    "stepmark train llama-3.1-8b --seq-len 8192 --strategy fsdp --nproc 8 --mbs 2 --workers 2 "
    "--schedule step --grad-accum 1 --precision amp --reduce-dtype bf16 --compile "
    "--compile-scope block --device cuda"
)


def large_ledger(add_ns: int = 0) -> Ledger:
    """Return a ledger in which no line is short."""
    groups = (Group.COMPUTE, Group.OVERLAPPED)
    lines: dict[Line, int] = {(g, str(w)): 10**8 + add_ns for g in groups for w in Work}
    lines |= {(Group.COMM, f"collective_{n}"): 10**8 for n in range(4)}
    lines |= {(Group.IDLE, str(cause)): 10**8 - add_ns for cause in Idle}
    return Ledger(window_ns=sum(lines.values()), lines=lines)


def long_report() -> StepReport:
    words = "The largest difference is norm and elementwise under communication, 205 ms longer"
    suggestion = Suggestion(text=f"{words} than predicted", command=COMMAND)
    step = Step(
        case_id="a",
        name="llama-3.1-8b fsdp x8",
        predicted=large_ledger(10**6),
        measured=MeasuredLedger(ledger=large_ledger(), rank=0),
        power=(StepPower(), StepPower()),
        sentence="; ".join(["llama-3.1-8b fsdp on 8 x NVIDIA H100 80GB HBM3: words"] * 5),
        suggestions=(suggestion,) * 3,
    )
    return StepReport(steps=(step,), notes=(), commitment="prediction committed")


def screen(report: StepReport | None) -> list[str]:
    records, run, device = full_train_run(), train_run(), train_device()
    operators: list[Row] = operator_rows(full_run(), run, device=device)
    steps: list[Row] = train_rows(records, run, device)
    text = first_screen.lines(run, operators, [], steps, report, PAGE)
    return "\n".join(text).splitlines()


def test_the_longest_answer_is_a_screen() -> None:
    lines = screen(long_report())
    assert len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("machine   8 x ")
    assert lines[-2:] == [f"page      {PAGE}", f"details   stepmark runs show {PAGE.parent}"]


def test_a_folded_command_is_one_for_a_shell() -> None:
    lines = screen(long_report())
    first = next(i for i, line in enumerate(lines) if line.startswith("     stepmark train"))
    text = lines[first]
    while text.endswith("\\"):
        first += 1
        text = text[:-1] + lines[first]
    assert shlex.split(text) == COMMAND.split()


def test_what_went_wrong_is_above_the_answer() -> None:
    (problems,) = [line for line in screen(long_report()) if line.startswith("problems")]
    for words in ("2 wrong", "2 failed", "2 skipped"):
        assert words in problems


def test_without_a_ledger_the_steps_and_the_reason_are_shown() -> None:
    report = replace(long_report(), steps=(), notes=("no prediction: no calibration",))
    text = "\n".join(screen(report))
    assert "note: no prediction: no calibration" in text
    assert "tokens/s/GPU" in text
    assert "tokens/s/GPU" in "\n".join(screen(None))
