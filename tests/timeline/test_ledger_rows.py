"""The short ledger and its picture: what is shown adds up to the step that is shown."""

import random
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from stepmark.timeline import ledger_svg
from stepmark.timeline.ledger import Group, Idle, Ledger, Work
from stepmark.timeline.ledger_rows import ledger_table, short_lines

SVG = "{http://www.w3.org/2000/svg}"
LINES = [(group, str(work)) for group in (Group.COMPUTE, Group.OVERLAPPED) for work in Work]
LINES += [(Group.COMM, "all_gather"), (Group.COMM, "reduce_scatter"), (Group.COPIES, "copy")]
LINES += [(Group.IDLE, str(cause)) for cause in Idle]


def some_ledger(rng: random.Random, scale: float) -> Ledger:
    """Return a ledger of some lines; unexplained time may be negative."""
    lines = {line: int(scale * rng.random() ** 4) for line in LINES if rng.random() < 0.8}
    lines[Group.COMPUTE, Work.MATMUL] = int(scale)
    lines[Group.IDLE, Idle.UNEXPLAINED] = int(-0.1 * scale * rng.random())
    return Ledger(window_ns=sum(lines.values()), lines=lines)


def numbers(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"[+-]?[\d,]+\.\d+", text)]


@pytest.mark.parametrize("seed", range(30))
def test_shown_times_add_up_to_the_shown_step(seed: int) -> None:
    rng = random.Random(seed)
    scale = 10 ** rng.uniform(5, 10)
    ledgers = some_ledger(rng, scale), some_ledger(rng, scale)
    table = ledger_table(ledgers)
    unit = 10**-table.places
    assert 2 <= len(table.rows) <= 11
    for place, own in enumerate(ledgers):
        shown = [row.times_ms[place] for row in table.rows]
        assert sum(shown) == pytest.approx(table.steps_ms[place], abs=unit / 100)
        assert table.steps_ms[place] == pytest.approx(own.window_ns / 1e6, abs=unit)
    by_words = {row.words: row.times_ms for row in table.rows}
    for place, own in enumerate(ledgers):
        product_ms = own.lines[Group.COMPUTE, Work.MATMUL] / 1e6
        assert by_words["matmul"][place] == pytest.approx(product_ms, abs=unit)
    *rows, _, step = [numbers(line) for line in list(short_lines(*ledgers))[1:]]
    for column in range(3):  # predicted, measured, difference
        total = sum(row[column] for row in rows)
        assert total == pytest.approx(step[column], abs=unit / 100)
    for row in (*rows, step):
        assert row[1] - row[0] == pytest.approx(row[2], abs=unit / 100)


def test_a_measured_ledger_alone_has_no_difference() -> None:
    own = some_ledger(random.Random(1), 1e9)
    lines = list(short_lines(None, own))
    assert "predicted" not in lines[0]
    assert lines[-1].split()[-2:] == ["100.0", "%"]


def drawn(ledgers: Sequence[Ledger], *, is_narrow: bool = False) -> ElementTree.Element:
    names = ("predicted", "measured")[-len(ledgers) :]
    theme = ledger_svg.DARK
    text = ledger_svg.svg(
        ledgers, names, title="a < b", theme=theme, is_narrow=is_narrow, is_file=True
    )
    return ElementTree.fromstring(text)


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_bars_of_a_picture_are_as_long_as_the_step(count: int, is_narrow: bool) -> None:
    lines = {(Group.COMPUTE, "matmul"): 60_000_000, (Group.COMM, "all_reduce"): 30_000_000}
    ledgers = [Ledger(window_ns=90_000_000, lines=lines)] * count
    root = drawn(ledgers, is_narrow=is_narrow)
    bars = [each for each in root.iter(f"{SVG}rect") if "fill-opacity" in each.attrib]
    assert len(bars) == 3 * count  # two lines and the step
    widths = [float(bar.attrib["width"]) for bar in bars]
    for place in range(count):
        product, reduction, step = widths[place::count]
        assert product + reduction == pytest.approx(step, abs=0.2)
        assert product == pytest.approx(2 * reduction, abs=0.2)
    starts = [float(bar.attrib["x"]) for bar in bars]
    assert starts[count] == pytest.approx(starts[0] + widths[0], abs=0.1)


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_all_of_a_picture_is_inside_it(seed: int, is_narrow: bool) -> None:
    rng = random.Random(seed)
    root = drawn([some_ledger(rng, 1e9), some_ledger(rng, 1e9)], is_narrow=is_narrow)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for bar in root.iter(f"{SVG}rect"):
        left = float(bar.attrib.get("x", 0))
        assert 0 <= left <= left + float(bar.attrib["width"]) <= width
        assert float(bar.attrib.get("y", 0)) + float(bar.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        x, letters = float(text.attrib["x"]), len(text.text or "")
        size = float(text.attrib["font-size"])
        wide = 0.56 * size * letters * (0.5 if text.attrib["text-anchor"] == "middle" else 1)
        assert 0 <= x <= width
        assert x - wide >= 0 or text.attrib["text-anchor"] != "end", text.text
        assert x + wide <= width or text.attrib["text-anchor"] != "start", text.text
        assert 0 < float(text.attrib["y"]) < height


def test_a_page_has_the_picture_in_the_colours_of_the_reader() -> None:
    own = some_ledger(random.Random(2), 1e9)
    page = ledger_svg.html([own], ["measured"], "step")
    assert page.count("<svg") == 2
    assert "var(--ink)" in page
    assert "xmlns" not in page
