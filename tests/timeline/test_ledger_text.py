"""Two ledgers beside each other: what cancels shows, and the sentence says what they say."""

import random
import re

import pytest

from stepmark.predictions import ledger_page
from stepmark.tables.page import Page, plotly_js
from stepmark.timeline.ledger import (
    RECOMPUTED,
    WAITING,
    Group,
    Idle,
    Ledger,
    Line,
    MeasuredLedger,
    StepPower,
    Work,
)
from stepmark.timeline.ledger_text import (
    absolute_ns,
    difference_lines,
    differences,
    largest_difference,
    power_lines,
    power_rows,
    source_line,
)
from stepmark.timeline.step_sentence import avoidable_text, difference_text, sentence

PRODUCT, UNDER = (Group.COMPUTE, "matmul"), (Group.OVERLAPPED, "matmul")
GATHER, SCATTER = (Group.COMM, "all_gather"), (Group.COMM, "reduce_scatter")
HOST, COPY = (Group.IDLE, "host"), (Group.COPIES, "copy")


def ledger(lines_ms: dict[Line, float], **within_ms: float) -> Ledger:
    lines = {line: round(ms * 1e6) for line, ms in lines_ms.items()}
    within = {name: round(ms * 1e6) for name, ms in within_ms.items()}
    return Ledger(window_ns=sum(lines.values()), lines=lines, within=within)


PREDICTED = ledger({PRODUCT: 300, UNDER: 50, GATHER: 20, SCATTER: 40, COPY: 1, HOST: 8})
MEASURED = ledger({PRODUCT: 296, UNDER: 50, GATHER: 20, SCATTER: 49, COPY: 1, HOST: 11})


@pytest.mark.parametrize("seed", range(20))
def test_lines_add_up_and_do_not_cancel(seed: int) -> None:
    rng = random.Random(seed)
    names = [(Group.COMPUTE, str(work)) for work in Work]
    names += [(Group.COMM, "a"), (Group.COMM, "b"), (Group.COPIES, "copy")]
    names += [(Group.IDLE, str(cause)) for cause in Idle]

    def some() -> Ledger:
        lines = {name: rng.randrange(-5, 99) for name in names if rng.random() < 0.7}
        return Ledger(window_ns=sum(lines.values()), lines=lines)

    a, b = some(), some()
    rows = differences(a, b)
    assert sum(row.first_ns for row in rows) == a.window_ns
    assert sum(row.second_ns for row in rows) == b.window_ns
    apart = [row.ns for row in rows]
    assert sum(apart) == b.window_ns - a.window_ns
    assert sum(map(abs, apart)) == absolute_ns(a, b) >= abs(b.window_ns - a.window_ns)
    groups = [str(row.line[0]) for row in rows]
    assert groups == sorted(groups, key=[str(group) for group in Group].index)


def test_the_table_has_groups_lines_and_both_sums() -> None:
    lines = list(difference_lines(PREDICTED, MEASURED))
    cells = {re.split(" {2,}", line.strip())[0]: line.split()[-4:] for line in lines}
    assert lines[0].split("  ")[-1].strip() == "% of measured"
    assert cells["step"] == ["419.000", "427.000", "+8.000", "+1.9"]
    assert cells["exposed communication"] == ["60.000", "69.000", "+9.000", "+2.1"]
    assert cells["reduce_scatter"] == ["40.000", "49.000", "+9.000", "+2.1"]
    assert lines[-1].split()[-2:] == ["16.000", "3.7"]
    titles = [line.strip().split("  ")[0] for line in lines]
    assert titles.index("reduce_scatter") < titles.index("all_gather")  # the larger one first


def test_unexplained_time_is_not_idle() -> None:
    own = ledger({PRODUCT: 90, HOST: 10, (Group.IDLE, "unexplained"): -20})
    lines = [line.split() for line in difference_lines(PREDICTED, own)]
    (idle,) = (line for line in lines if line[0] == "idle")
    (rest,) = (line for line in lines if line[0] == "unexplained")
    assert (idle[1:3], rest[1:3]) == (["8.000", "10.000"], ["0.000", "-20.000"])


def test_work_that_communication_covers_more_of_is_no_difference() -> None:
    """Of products 30 ms more are covered, since a rank came late; the gather is the finding."""
    covered = ledger({PRODUCT: 270, UNDER: 80, GATHER: 25, SCATTER: 40, COPY: 1, HOST: 8})
    largest = largest_difference(PREDICTED, covered)
    assert (largest.line, largest.ns) == (GATHER, 5_000_000)
    longer = ledger({PRODUCT: 270, UNDER: 90, GATHER: 25, SCATTER: 40, COPY: 1, HOST: 8})
    largest = largest_difference(PREDICTED, longer)
    assert (largest.line, largest.first_ns, largest.ns) == (PRODUCT, 350 * 10**6, 10**7)


def test_the_largest_difference_is_in_the_direction_of_the_steps() -> None:
    """The host is 20 ms faster, but the step is 4 ms longer: that is not due to the host."""
    own = ledger({PRODUCT: 310, UNDER: 50, GATHER: 34, SCATTER: 40, COPY: 1, HOST: -12})
    largest = largest_difference(PREDICTED, own)
    assert (largest.line, largest.ns) == (GATHER, 14_000_000)
    assert largest_difference(own, PREDICTED).line == GATHER


def test_a_part_that_one_ledger_lacks_is_no_zero() -> None:
    waiting = ledger({PRODUCT: 80, GATHER: 20}, **{WAITING: 12})
    lines = list(difference_lines(ledger({PRODUCT: 80, GATHER: 18}), waiting))
    assert lines[-2].split() == [*f"of which {WAITING}".split(), "12.000"]


def test_the_sentence() -> None:
    interval = "90 % interval 405 to 433 ms"
    text = sentence(
        "llama-3.1-8b FSDP on 4 x H200", MEASURED, PREDICTED, interval=interval, mfu_pct=48.2
    )
    assert text == (
        "llama-3.1-8b FSDP on 4 x H200: measured 427 ms, predicted 419 ms (1.9 % too low; 90 % "
        "interval 405 to 433 ms); 8.0 ms longer than predicted: exposed reduce_scatter +9.0 "
        "ms, matmul -4.0 ms, other lines +3.0 ms; 48 % MFU; largest avoidable time: exposed "
        "communication, mostly reduce_scatter, at most 69 ms (16.2 %)"
    )
    faster = sentence("x", PREDICTED, MEASURED)
    assert "predicted 427 ms (1.9 % too high); " in faster
    assert "8.0 ms shorter than predicted: exposed reduce_scatter -9.0 ms, matmul" in faster
    assert "MFU" not in faster
    assert "predicted 427 ms (within 0.05 %); largest" in sentence("x", MEASURED, MEASURED)
    assert sentence("x", MEASURED).startswith("x: measured 427 ms; largest avoidable")
    busy = sentence("x", MEASURED, PREDICTED, validity="busy host")
    assert busy.startswith("x: measured 427 ms (doubtful: busy host), predicted 419 ms (")


@pytest.mark.parametrize("rest_ms", [-80, 80])
def test_lines_that_do_not_explain_the_step_are_no_answer(rest_ms: int) -> None:
    """A profile twice as long as the step once had 168.7 % of it in communication to gain."""
    profile = {PRODUCT: 50, GATHER: 120}
    own = ledger({**profile, (Group.IDLE, "unexplained"): rest_ms})
    text = sentence("x", own, PREDICTED)
    step_ms = 170 + rest_ms
    assert text.startswith(f"x: measured {step_ms} ms, predicted 419 ms (")
    share = f"{100 * rest_ms / step_ms:.1f} %"
    why = f"the profile leaves {rest_ms} ms ({share}) of the step unexplained"
    if rest_ms < 0:
        more = f"{-rest_ms} ms ({share.removeprefix('-')})"
        why = f"what was profiled takes {more} longer than the step without the profiler"
    assert text.endswith(f"); {why}: its lines, and what there is to gain, are not known")


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (
            ledger({PRODUCT: 99.5, HOST: 0.5}),
            "no avoidable time above 1 % of the step",
        ),
        (
            ledger({PRODUCT: 90, HOST: 10}),
            "largest avoidable time: idle time between kernels, at most 10 ms (10.0 %)",
        ),
        (
            ledger({PRODUCT: 80, COPY: 8, HOST: 6, (Group.IDLE, "launch gap"): 6}),
            "largest avoidable time: idle time between kernels, at most 12 ms (12.0 %)",
        ),
        (
            ledger({PRODUCT: 90, COPY: 10}),
            "largest avoidable time: copies, at most 10 ms (10.0 %)",
        ),
        (
            ledger({PRODUCT: 90, HOST: 10}, **{RECOMPUTED: 30}),
            "largest avoidable time: recomputation, at most 30 ms (30.0 %)",
        ),
        (
            ledger({PRODUCT: 80, GATHER: 20}, **{WAITING: 12}),
            "largest avoidable time: exposed communication, mostly waiting for other ranks, "
            "at most 20 ms (20.0 %)",
        ),
        (
            ledger({PRODUCT: 95, (Group.IDLE, "unexplained"): 5}),
            "no avoidable time above 1 % of the step",
        ),
    ],
)
def test_what_is_avoidable(own: Ledger, text: str) -> None:
    assert avoidable_text(own) == text


@pytest.mark.parametrize("seed", range(20))
def test_differences_in_the_sentence_add_up_to_that_of_the_steps(seed: int) -> None:
    rng = random.Random(seed)
    names = [PRODUCT, UNDER, GATHER, SCATTER, COPY, HOST, (Group.IDLE, "unexplained")]
    a, b = (ledger({name: rng.uniform(-3, 40) for name in names}) for _ in range(2))
    step, _, lines = difference_text(a, b).partition(": ")
    shown = [float(number) for number in re.findall(r"([+-][\d.]+) ms", lines)]
    assert 2 <= len(shown) <= 3
    sign = -1 if "shorter" in step else 1
    assert sum(shown) == pytest.approx(sign * float(step.split()[0]), abs=1e-9)
    assert sum(shown) == pytest.approx((b.window_ns - a.window_ns) / 1e6, abs=0.11)


def test_differences_that_cancel_are_shown() -> None:
    moved = ledger({PRODUCT: 296, UNDER: 50, GATHER: 24, SCATTER: 40, COPY: 1, HOST: 8})
    text = "as long as predicted: matmul -4.0 ms, exposed all_gather +4.0 ms"
    assert difference_text(PREDICTED, moved) == text


def test_power_that_is_unknown_is_no_number() -> None:
    predicted = StepPower(clock_hz=1.6e9, power_w=690.0)
    measured = StepPower(clock_hz=1.68e9)
    rows = {row["quantity"]: row for row in power_rows(predicted, measured)}
    assert rows["SM clock"]["difference_pct"] == pytest.approx(100 * 0.08 / 1.68)
    assert rows["power"]["difference_pct"] is rows["energy"]["measured"] is None
    lines = [line.split() for line in power_lines(predicted, measured)]
    assert lines[1:] == [
        ["SM", "clock", "(MHz)", "1600", "1680", "+4.8"],
        ["power", "(W)", "690", "n/a"],
    ]
    assert list(power_lines(StepPower(), StepPower())) == []


def test_the_source_has_the_profilers_cost() -> None:
    profiled = ledger({PRODUCT: 296, HOST: 138})
    closed = ledger({PRODUCT: 296, (Group.IDLE, "unexplained"): -3})
    own = MeasuredLedger(
        ledger=closed, profiled=profiled, rank=3, num_ranks=4, step=2, num_steps=3
    )
    assert source_line(own) == (
        "measured: step 2, the median of 3, of rank 3, which works the longest of 4: 434.000 "
        "ms with the profiler, 141.000 ms more than without it; -3.000 ms are unexplained"
    )


def test_a_page_of_two_ledgers_has_their_picture_and_their_lines() -> None:
    sections = ledger_page.sections(PREDICTED, MEASURED, text=["<b>"])
    page = Page(title="two", sections=sections).html().replace(plotly_js(), "")
    assert "&lt;b&gt;" in page
    assert page.count('role="img"') == 2  # for a screen, and for a phone
    assert "sum of absolute differences" in page
