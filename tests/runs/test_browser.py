"""The page in a browser: on a phone and a screen, light and dark, and on paper."""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path

import pytest
from tests import browser
from tests.collectives.comm_records import comm_device, comm_run, full_comm_run
from tests.tables.records import full_run
from tests.training.train_records import full_train_run

from stepmark.collectives.comm_columns import rows as comm_rows
from stepmark.operators.op_columns import rows as operator_rows
from stepmark.runs import run_page
from stepmark.runs.runs import write_page
from stepmark.training.train_columns import rows as train_rows

MOST_BYTES = 2_000_000
RESULTS = Path(__file__).parents[2] / "results"
# The last has all that a page can have.
PAGES = PREDICTED, OF_PAIRS, EVERYTHING = (
    "h200-predictions-2",
    "h200-x4-comm-pairs",
    "everything",
)

pytestmark = pytest.mark.skipif(
    browser.PROGRAM is None, reason="needs chromium, chromium-browser or google-chrome"
)


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Tab]:
    with browser.tab() as opened:
        yield opened


# The fullest page has what the others have; each of those is seen once.
OF_FULLEST = [
    pytest.param(name, marks=() if name == EVERYTHING else pytest.mark.slow) for name in PAGES
]
FAST_VIEWS = (
    (PREDICTED, 390, "light"),
    (OF_PAIRS, 1280, "dark"),
    (EVERYTHING, 390, "light"),
    (EVERYTHING, 1280, "dark"),
)
VIEWS = [
    pytest.param(*view, marks=() if view in FAST_VIEWS else pytest.mark.slow)
    for view in itertools.product(PAGES, (390, 768, 1280), ("light", "dark"))
]


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp("page") / "report.html"
    if request.param != "everything":
        return write_page(RESULTS / request.param, target)
    run, device = comm_run(), comm_device()
    records = [*full_run(), *full_comm_run(), *full_train_run()]
    rows = operator_rows(full_run(), run, device=device)
    of_comm = comm_rows(full_comm_run(), run, device)
    of_train = train_rows(full_train_run(), run, device)
    shown = run_page.page(run, records, rows, device, of_comm, of_train)
    target.write_text(shown.html(), encoding="utf-8")
    return target


def test_a_page_is_small(page: Path) -> None:
    assert page.stat().st_size < MOST_BYTES


@pytest.mark.parametrize(("page", "width", "scheme"), VIEWS, indirect=["page"])
def test_a_page_fits_and_has_no_error(
    tab: browser.Tab, page: Path, width: int, scheme: str
) -> None:
    tab.problems.clear()
    tab.open(page, width=width, scheme=scheme)
    assert tab.problems == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    # What does not fit scrolls in a box of its own.
    beyond = tab.value(
        "Array.from(document.querySelectorAll('main *')).filter(e => "
        "!e.closest('.box, .plot, pre, svg, .wide, .narrow') && "
        f"e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    plots = "document.querySelectorAll('.js-plotly-plot')"
    drawn = f"Array.from({plots}).every(p => p.querySelector('.trace, .barlayer, .points'))"
    assert tab.value(f"{plots}.length > 0 && {drawn}")
    dark = tab.value("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    ink = tab.value("getComputedStyle(document.body).color")
    text = f"{plots}[0].querySelector('.xtick text').style.fill"
    assert tab.value(text) == ink  # ticks are as readable as the text


@pytest.mark.parametrize("page", OF_FULLEST, indirect=True)
def test_contents_lead_to_sections(tab: browser.Tab, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r'<a href="#([^"]+)">(.*?)</a>', text)
    assert len(links) >= 3
    assert len({name for name, _ in links}) == len(links)
    tab.show(page, width=1280, scheme="dark")
    for name, title in links:
        heading = tab.value(f"document.getElementById({name!r}).firstChild.textContent")
        assert heading == unescape(title)


@pytest.mark.parametrize("page", [PREDICTED], indirect=True)
def test_the_answer_comes_first(tab: browser.Tab, page: Path) -> None:
    top = "document.querySelector('{}').getBoundingClientRect().top + scrollY"
    for width, picture in ((390, ".narrow svg"), (1280, ".wide svg")):
        tab.show(page, width=width, scheme="light")
        assert "measured 184 ms" in tab.value("document.querySelector('h1').textContent")
        value = partial(top.format)
        order = [tab.value(value(each)) for each in ("h1", picture, "nav", "section table")]
        assert order == sorted(order)
        assert order[1] < 500  # pixels: on the first screen


def test_a_button_shows_all_of_a_figure_that_begins_at_a_block(
    tab: browser.Tab, tmp_path: Path
) -> None:
    tab.open(write_page(RESULTS / "h100-run", tmp_path / "report.html"), width=1280)
    plot = (
        "document.querySelector('.whole').closest('section').querySelector('.js-plotly-plot')"
    )
    click = (
        "document.querySelector('.whole').click(), document.querySelector('.whole').textContent"
    )
    limits = f"{plot}.layout.xaxis.range.slice()"
    first, last = tab.value(limits)
    assert tab.value(click) == "Show one block"
    start, end = tab.value(limits)
    assert 0 == start < first < last < end
    assert last - first < 0.05 * end
    assert tab.value(click) == "Show all"
    assert tab.value(limits) == [first, last]


@pytest.mark.parametrize("width", [768, 1280])
def test_the_picture_is_as_wide_as_the_text(tab: browser.Tab, page: Path, width: int) -> None:
    tab.show(page, width=width, scheme="light")
    widths = tab.value(
        "Array.from(document.querySelectorAll('.wide .ledger'), e => "
        "[e.getBoundingClientRect().width, e.scrollWidth, e.parentNode.clientWidth])"
    )
    text = tab.value("document.querySelector('h1').getBoundingClientRect().width")
    assert all(own == inside == whole == text for own, inside, whole in widths)
    assert bool(widths) == ('class="ledger"' in page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", OF_FULLEST, indirect=True)
def test_on_paper_nothing_is_hidden_in_a_box(tab: browser.Tab, page: Path) -> None:
    tab.show(page, width=1280, scheme="dark")
    tab.call("Emulation.setEmulatedMedia", media="print")
    hidden = (
        "Array.from(document.querySelectorAll('.box'))"
        ".some(box => box.scrollHeight > box.clientHeight + 1)"
    )
    assert tab.value(hidden) is False
    assert tab.value("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.pdf().startswith(b"%PDF")
    tab.call("Emulation.setEmulatedMedia", media="")
