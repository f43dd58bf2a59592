"""The ledger of a step as an SVG picture: each line begins where the one above ends."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import ceil, floor, log10

from stepmark.tables.figures import COLOURS, GREY
from stepmark.tables.page import Html
from stepmark.timeline.ledger import Group, Idle, Ledger
from stepmark.timeline.ledger_rows import LedgerRow, LedgerTable, ledger_table
from stepmark.timeline.ledger_text import UNDER_COMMUNICATION

# Colours that stand out from white and from black paper (tables/figures.py).
_COLOURS: Mapping[Group | Idle | None, str] = {
    Group.COMPUTE: COLOURS[0],
    Group.OVERLAPPED: COLOURS[5],
    Group.COMM: COLOURS[1],
    Group.COPIES: COLOURS[4],
    Group.IDLE: GREY,
    None: COLOURS[6],
}
_WIDE = 920  # of a file
_CELL = 74  # a column of numbers
_LETTER = 7.2  # at most, on average: browsers have different fonts
_ROW = 30
_NARROW_ROW = 48
_BAR = 9
_BAR_ALONE = 14
_LEAST = 0.15  # of the plot, in percent: the shortest bar that is seen
_TEXT = 13
_HEAD = 30
_AXIS = 24
_LEGEND = 20
_LEGEND_WIDTHS = {False: 640, True: 340}  # by whether the picture is narrow
_ARROW = " \N{RIGHTWARDS ARROW} "
_RIGHT = "100%"
_LEAST_PLOT = 260  # pixels, between words and numbers of a page that is not a phone's
_EDGE = 8  # in percent: a number nearer to an edge is inside
_FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
_OUTLINED = 'fill="none" stroke="{}" stroke-width="1.5"'
_DASHED = 'fill="none" stroke="{}" stroke-width="1.5" stroke-dasharray="3 2"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of a picture besides those of its bars."""

    ink: str
    quiet: str
    line: str
    paper: str


PAGE = Theme(ink="var(--ink)", quiet="var(--quiet)", line="var(--line)", paper="none")
LIGHT = Theme(ink="#1b1f24", quiet="#5a6470", line="#d9dee4", paper="#ffffff")
DARK = Theme(ink="#e4e7eb", quiet="#9aa5b1", line="#30363d", paper="#0d1117")


def html(ledgers: Sequence[Ledger], names: Sequence[str], title: str) -> Html:
    """Return the picture for a page, once for a screen and once for a phone.

    SVG does not flow: a phone's rows have two lines, which no style sheet makes of one. The
    plot grows with the page, and columns of text beside it keep their width.
    """
    wide, narrow = (
        _Drawing(ledger_table(ledgers), tuple(names), PAGE, is_narrow)
        for is_narrow in (False, True)
    )
    label = f'role="img" aria-label="{escape(title)}"'
    columns = [wide.column(width, parts) for width, parts in wide.columns()]
    return Html(
        f'<div class="wide" {label}><div class="ledger">{"".join(columns)}</div>'
        f"{wide.column(None, wide.legend(), wide.legend_height)}</div>"
        f'<div class="narrow" {label}>{narrow.column(None, narrow.parts())}'
        f"{narrow.column(None, narrow.legend(), narrow.legend_height)}</div>"
    )


def svg(
    ledgers: Sequence[Ledger], names: Sequence[str], *, title: str, theme: Theme = LIGHT
) -> str:
    """Return the picture of one ledger, or of two beside each other, as a file."""
    drawing = _Drawing(ledger_table(ledgers), tuple(names), theme, is_narrow=False)
    top = 34
    height = top + drawing.height + drawing.legend_height + 6
    columns = []
    left = 8.0
    for width, parts in drawing.columns():
        own = width or _WIDE - 16 - drawing.label_width - drawing.number_width
        columns.append(
            f'<svg x="{left:.1f}" y="{top}" width="{own:.1f}" height="{drawing.height}">'
            f"{''.join(parts)}</svg>"
        )
        left += own
    legend = (
        f'<svg x="8" y="{top + drawing.height}" width="{_WIDE - 8}" '
        f'height="{drawing.legend_height}">{"".join(drawing.legend())}</svg>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {height}" '
        f'width="{_WIDE}" height="{height}" role="img" font-family="{_FONT}">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{_WIDE}" height="{height}" fill="{theme.paper}"/>'
        f"{drawing.text(8, 22, title, size=15, weight=600)}{''.join(columns)}{legend}</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The parts of a picture: columns side by side, or rows of two lines where it is narrow.

    Places along the plot are in percent of its width.
    """

    table: LedgerTable
    names: tuple[str, ...]
    theme: Theme
    is_narrow: bool

    @property
    def height(self) -> int:
        return self._bottom + _AXIS

    @property
    def legend_height(self) -> int:
        return 10 + _LEGEND * (len(self._legend_rows()) + len(self._legend_notes()))

    @property
    def label_width(self) -> float:
        longest = max(len(self._words(row)) for row in self.table.rows)
        return 12 + _LETTER * max(longest, 16)

    @property
    def number_width(self) -> float:
        return float(_CELL * len(self._heads))

    @property
    def _row_height(self) -> int:
        return _NARROW_ROW if self.is_narrow else _ROW

    @property
    def _bottom(self) -> int:
        """Return the lower edge of the rows, the one of the step included."""
        return _HEAD + (len(self.table.rows) + 1) * self._row_height + 4

    @property
    def _heads(self) -> tuple[str, ...]:
        return (*self.names, "difference") if len(self.names) == 2 else self.names

    @property
    def _range(self) -> tuple[float, float]:
        """Return the times at the edges: where any bar begins or ends, in ms."""
        ends = [0.0, *self.table.steps_ms]
        for place in range(len(self.names)):
            ends += accumulate(row.times_ms[place] for row in self.table.rows)
        return min(ends), max(ends) or 1.0

    def _x(self, time_ms: float) -> float:
        low, high = self._range
        return 100 * (time_ms - low) / (high - low)

    def _words(self, row: LedgerRow) -> str:
        if row.group is Group.OVERLAPPED:
            return row.words.replace(UNDER_COMMUNICATION, ", overlapped")
        return row.words

    def column(
        self, width: float | None, parts: Iterable[str], height: int | None = None
    ) -> str:
        """Return parts as a picture on a page. width: None: what the page has."""
        wide = _RIGHT if width is None else f"{width:.0f}"
        kind = ' class="bars"' if width is None else ""
        return (
            f'<svg{kind} width="{wide}" height="{height or self.height}" '
            f'font-family="{_FONT}">{"".join(parts)}</svg>'
        )

    def columns(self) -> Iterator[tuple[float | None, Iterator[str]]]:
        """Yield words, plot and numbers, with their widths; the plot has what is left."""
        yield self.label_width, self._labels()
        yield None, self._plot()
        yield self.number_width, self._numbers()

    def parts(self) -> Iterator[str]:
        """Yield all parts of a narrow picture, which are above one another."""
        yield from self._labels()
        yield from self._plot()
        yield from self._numbers()

    def text(
        self,
        x: float | str,
        y: float,
        words: str,
        *,
        size: int = _TEXT,
        anchor: str = "start",
        weight: int = 400,
        is_quiet: bool = False,
    ) -> str:
        colour = self.theme.quiet if is_quiet else self.theme.ink
        return (
            f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
        )

    def _placed_rows(self) -> Iterator[tuple[int, LedgerRow, bool]]:
        """Yield the upper edge of each row, the row, and whether it is the step."""
        step = LedgerRow(words="step = sum", group=None, times_ms=self.table.steps_ms)
        for index, row in enumerate((*self.table.rows, step)):
            is_step = index == len(self.table.rows)
            yield _HEAD + index * self._row_height + 4 * is_step, row, is_step

    def _labels(self) -> Iterator[str]:
        yield self.text(0, 18, "ms", is_quiet=True, size=12)
        for y, row, is_step in self._placed_rows():
            yield self.text(0, y + 19, self._words(row), weight=600 if is_step else 400)
        yield self._step_rule()

    def _numbers(self) -> Iterator[str]:
        """Yield a column of each ledger and of the difference; narrow: one for all."""
        if self.is_narrow:
            heads = [(_RIGHT, _ARROW.join(self.names))] if len(self.names) == 2 else []
        else:
            heads = [(str(_CELL * place), name) for place, name in enumerate(self._heads, 1)]
        for x, name in heads:
            yield self.text(x, 18, name, anchor="end", is_quiet=True, size=12)
        for y, row, is_step in self._placed_rows():
            shown = [self.table.shown(ms) for ms in row.times_ms]
            weight = 600 if is_step else 400
            if self.is_narrow:
                words = _ARROW.join(shown)
                yield self.text(_RIGHT, y + 19, words, anchor="end", weight=weight, size=12)
                continue
            if len(shown) == 2:
                shown.append(self.table.signed(row.times_ms[1] - row.times_ms[0]))
            for place, number in enumerate(shown, 1):
                yield self.text(_CELL * place, y + 19, number, anchor="end", weight=weight)
        if not self.is_narrow:
            yield self._step_rule()

    def _plot(self) -> Iterator[str]:
        yield from self._axis()
        now = [0.0] * len(self.names)
        for y, row, is_step in self._placed_rows():
            starts = [0.0] * len(self.names) if is_step else now
            yield from self._bars(y, row, starts, is_step=is_step)
            now = [start + ms for start, ms in zip(now, row.times_ms, strict=True)]
        if not self.is_narrow:
            yield self._step_rule()

    def _step_rule(self) -> str:
        y = _HEAD + len(self.table.rows) * self._row_height + 1
        return self._rule("0", _RIGHT, y, y, self.theme.ink)

    def _bars(
        self, y: int, row: LedgerRow, starts: Sequence[float], *, is_step: bool
    ) -> Iterator[str]:
        """Yield a bar per ledger: the last is solid, the one before it is an outline.

        Unexplained time is no work that was measured: its outline is dashed.
        """
        is_alone = len(starts) == 1
        height = _BAR_ALONE if is_alone else _BAR
        top = y + (26 if self.is_narrow else 8 if is_alone else 5)
        colour = self.theme.ink if is_step else _COLOURS.get(row.group, self.theme.ink)
        for place, (start, ms) in enumerate(zip(starts, row.times_ms, strict=True)):
            if not ms:
                continue
            left, right = sorted((self._x(start), self._x(start + ms)))
            mark = f'fill="{colour}"'
            if row.group is Idle.UNEXPLAINED:
                mark = _DASHED.format(colour)
            elif place < len(starts) - 1:
                mark = _OUTLINED.format(colour)
            length = max(right - left, _LEAST)
            yield (
                f'<rect x="{min(left, 100 - length):.2f}%" y="{top + place * (_BAR + 2)}" '
                f'width="{length:.2f}%" height="{height}" {mark}/>'
            )

    def _axis(self) -> Iterator[str]:
        low, high = self._range
        last = float("-inf")
        for tick in _ticks(low, high, 4 if self.is_narrow else 7):
            place = self._x(tick)
            x = f"{place:.2f}%"
            yield self._rule(x, x, _HEAD, self._bottom, self.theme.line)
            number = f"{tick:,g}"
            side = "start" if place < _EDGE else "end" if place > 100 - _EDGE else "middle"
            apart_px = _LETTER * len(number) * (1.5 if side == "end" else 1) + 6
            if (place - last) * _LEAST_PLOT > 100 * apart_px:
                last = place
                y = self._bottom + 16
                yield self.text(x, y, number, anchor=side, is_quiet=True, size=12)
        if not self.is_narrow:  # it would cross the numbers
            x = f"{self._x(self.table.steps_ms[-1]):.2f}%"
            yield self._rule(x, x, _HEAD, self._bottom, self.theme.quiet, dash="4 3")

    def _rule(self, x1: str, x2: str, y1: float, y2: float, colour: str, dash: str = "") -> str:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" stroke="{colour}"{dashed}/>'

    def _legend_rows(self) -> list[list[tuple[float, str, Group | Idle | None]]]:
        """Return place, name and group of each entry by line of the legend."""
        groups = {row.group for row in self.table.rows}
        entries: list[tuple[str, Group | Idle | None]]
        entries = [(str(group), group) for group in Group if group in groups]
        entries += [("other", None)] if None in groups else []
        if Idle.UNEXPLAINED in groups:
            entries.append((str(Idle.UNEXPLAINED), Idle.UNEXPLAINED))
        rows: list[list[tuple[float, str, Group | Idle | None]]] = [[]]
        x = 0.0
        for name, group in entries:
            width = 32 + 6.6 * len(name)
            if rows[-1] and x + width > _LEGEND_WIDTHS[self.is_narrow]:
                rows.append([])
                x = 0.0
            rows[-1].append((x, name, group))
            x += width
        return rows

    def _legend_notes(self) -> list[str]:
        """Return what the bars and the dashed line are, as one line of the legend or none."""
        notes = []
        if len(self.names) == 2:
            notes.append(f"outline: {self.names[0]}, solid: {self.names[1]}")
        if not self.is_narrow:
            notes.append(f"dashed line: the {self.names[-1]} step")
        return ["; ".join(notes)] if notes else []

    def legend(self) -> Iterator[str]:
        """Yield what the colours and lines are."""
        y = 10
        for entries in self._legend_rows():
            for x, name, group in entries:
                mark = f'fill="{_COLOURS.get(group)}"'
                if group is Idle.UNEXPLAINED:
                    mark = _DASHED.format(self.theme.ink)
                yield f'<rect x="{x + 1:.1f}" y="{y - 2}" width="11" height="11" {mark}/>'
                yield self.text(round(x + 17, 1), y + 8, name, size=12, is_quiet=True)
            y += _LEGEND
        for note in self._legend_notes():
            yield self.text(0, y + 8, note, size=12, is_quiet=True)
            y += _LEGEND


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round times from low to high, at most so many and at least two."""
    raw = (high - low) / most
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [round(n * step, 9) for n in range(ceil(low / step), floor(high / step) + 1)]
