"""The short ledger and its picture: what is shown adds up to the step that is shown."""

import random
import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

import pytest

from stepmark.timeline import ledger_svg
from stepmark.timeline.ledger import Group, Idle, Ledger, Work
from stepmark.timeline.ledger_rows import ledger_table, short_lines
from stepmark.timeline.step_sentence import difference_text

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


Column = tuple[ElementTree.Element, float]


def drawn(ledgers: Sequence[Ledger], kind: str) -> Iterator[Column]:
    """Yield the columns of a picture and their widths in pixels. kind: a file, or of a page."""
    names = ("predicted", "measured")[-len(ledgers) :]
    if kind == "file":
        text = ledger_svg.svg(ledgers, names, title="a < b", theme=ledger_svg.DARK)
        for column in ElementTree.fromstring(text).iter(f"{SVG}svg"):
            if "x" in column.attrib and "width" in column.attrib:
                yield column, float(column.attrib["width"])
        return
    html = ledger_svg.html(ledgers, names, "a < b").replace("<svg", f'<svg xmlns="{SVG[1:-1]}"')
    (picture,) = [
        each
        for each in ElementTree.fromstring(f"<p>{html}</p>")
        if each.attrib["class"] == kind
    ]
    columns = list(picture.iter(f"{SVG}svg"))
    widths = [each.attrib["width"] for each in columns]
    fixed = sum(float(width) for width in widths if width != "100%")
    for column, width in zip(columns, widths, strict=True):
        whole = 360.0 if kind == "narrow" else 700.0
        is_in_row = kind == "wide" and column is not columns[-1]
        room = whole - fixed if is_in_row else whole
        yield column, room if width == "100%" else float(width)


def place(value: str, width: float) -> float:
    """Return a coordinate in pixels."""
    if value.endswith("%"):
        return float(value[:-1]) / 100 * width
    return float(value)


def is_bar(rect: ElementTree.Element) -> bool:
    return rect.attrib["width"].endswith("%")


KINDS = pytest.mark.parametrize("kind", ["file", "wide", "narrow"])


@KINDS
@pytest.mark.parametrize("count", [1, 2])
def test_bars_of_a_picture_are_as_long_as_the_step(count: int, kind: str) -> None:
    lines = {(Group.COMPUTE, "matmul"): 60_000_000, (Group.COMM, "all_reduce"): 30_000_000}
    ledgers = [Ledger(window_ns=90_000_000, lines=lines)] * count
    rects = [rect for column, _ in drawn(ledgers, kind) for rect in column.iter(f"{SVG}rect")]
    bars = [rect for rect in rects if is_bar(rect)]
    assert len(bars) == 3 * count  # two lines and the step
    widths = [place(bar.attrib["width"], 100) for bar in bars]
    for number in range(count):
        product, reduction, step = widths[number::count]
        assert product + reduction == pytest.approx(step, abs=0.02)
        assert product == pytest.approx(2 * reduction, abs=0.02)
    starts = [place(bar.attrib["x"], 100) for bar in bars]
    assert starts[count] == pytest.approx(starts[0] + widths[0], abs=0.02)
    assert widths[-1] == pytest.approx(100)  # of the plot, thus of the page


@KINDS
@pytest.mark.parametrize("seed", range(5))
def test_all_of_a_picture_is_inside_it(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    for column, width in drawn([some_ledger(rng, 1e9), some_ledger(rng, 1e9)], kind):
        height = float(column.attrib["height"])
        for bar in column.iter(f"{SVG}rect"):
            left = place(bar.attrib["x"], width)
            assert 0 <= left <= left + place(bar.attrib["width"], width) <= width + 0.2
            assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
        for text in column.iter(f"{SVG}text"):
            x, letters = place(text.attrib["x"], width), len(text.text or "")
            anchor = text.attrib["text-anchor"]
            size = float(text.attrib["font-size"])
            wide = 0.56 * size * letters * (0.5 if anchor == "middle" else 1)
            assert x - wide >= 0 or anchor == "start", text.text
            assert x + wide <= width or anchor == "end", text.text
            assert 0 < float(text.attrib["y"]) < height


@KINDS
def test_unexplained_time_has_its_own_mark(kind: str) -> None:
    """However short it is, it is neither one of the other lines nor drawn as a line."""
    lines = {(Group.COMPUTE, f"a{n}"): 50_000_000 for n in range(20)}
    lines |= {(Group.IDLE, str(Idle.UNEXPLAINED)): -200_000, (Group.IDLE, "host"): 90_000}
    own = Ledger(window_ns=sum(lines.values()), lines=lines)
    table = ledger_table([own])
    assert (table.rows[-1].words, table.rows[-1].group) == (
        "unexplained time",
        Idle.UNEXPLAINED,
    )
    assert table.rows[-1].times_ms == (-0.2,)
    rects = [rect for column, _ in drawn([own], kind) for rect in column.iter(f"{SVG}rect")]
    dashed = [rect for rect in rects if "stroke-dasharray" in rect.attrib]
    assert [is_bar(rect) for rect in dashed] == [True, False]  # the bar, and in the legend
    assert all(rect.attrib["fill"] == "none" for rect in dashed)


def test_a_page_has_the_picture_in_the_colours_of_the_reader() -> None:
    own = some_ledger(random.Random(2), 1e9)
    page = ledger_svg.html([own], ["measured"], "step")
    assert page.count('role="img" aria-label="step"') == 2
    assert "var(--ink)" in page
    assert "xmlns" not in page


def test_the_largest_differences_have_rows_although_their_lines_are_short() -> None:
    host, data = (Group.IDLE, str(Idle.HOST)), (Group.IDLE, str(Idle.DATA))
    copies = (Group.COPIES, "copy")
    times = {(Group.COMPUTE, str(Work.MATMUL)): 110_800_000, host: 100_000, data: 0}
    times |= {copies: 1_000_000, (Group.COMPUTE, str(Work.LOSS)): 900_000}
    predicted = Ledger(window_ns=sum(times.values()), lines=times)
    longer = times | {host: 874_000, data: 535_000}
    measured = Ledger(window_ns=sum(longer.values()), lines=longer)
    rows = {row.words: row.times_ms for row in ledger_table([predicted, measured]).rows}
    assert list(rows) == ["matmul", "idle time (host)", "idle time (data)", "2 other lines"]
    assert rows["idle time (host)"] == pytest.approx((0.1, 0.9))
    text = "1.3 ms longer than predicted: idle time (host) +0.8 ms, idle time (data) +0.5 ms"
    assert difference_text(predicted, measured) == text
    assert "idle time (host)" not in str(ledger_table([measured, measured]).rows)
