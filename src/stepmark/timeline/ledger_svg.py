"""The ledger of a step as an SVG picture: each line begins where the one above ends."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from stepmark.tables.page import Html
from stepmark.timeline.ledger import Group, Ledger
from stepmark.timeline.ledger_rows import LedgerRow, LedgerTable, ledger_table

# Colours of Okabe and Ito, which colour-blind readers distinguish.
_COLOURS: Mapping[Group | None, str] = {
    Group.COMPUTE: "#0072B2",
    Group.OVERLAPPED: "#56B4E9",
    Group.COMM: "#D55E00",
    Group.COPIES: "#E69F00",
    Group.IDLE: "#8a94a0",
    None: "#b9a3cc",
}
# of a screen, and of a phone
_WIDE = 920
_NARROW = 350
_CELL = 78  # of a wide picture: a column of numbers
_LETTER = 7.2  # at most, on average: browsers have different fonts
_ROW = 30
_BAR = 9
_TEXT = 13
_HEAD = 30
_AXIS = 34
_LEGEND = 20
_ARROW = " \N{RIGHTWARDS ARROW} "


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

    SVG does not flow: a phone's rows have two lines, which no style sheet makes of one.
    """
    wide = svg(ledgers, names, title=title)
    narrow = svg(ledgers, names, title=title, is_narrow=True)
    return Html(f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>')


def svg(
    ledgers: Sequence[Ledger],
    names: Sequence[str],
    *,
    title: str,
    theme: Theme = PAGE,
    is_narrow: bool = False,
    is_file: bool = False,
) -> str:
    """Return the picture of one ledger, or of two beside each other.

    is_file: draw the title, too, since the picture stands alone.
    """
    drawing = _Drawing(
        table=ledger_table(ledgers),
        names=tuple(names),
        theme=theme,
        is_narrow=is_narrow,
        top=34 if is_file else 0,
    )
    width = drawing.width
    height = drawing.height
    heading = ""
    namespace = ""
    if is_file:
        heading = drawing.text(8, 22, title, size=15, weight=600)
        namespace = 'xmlns="http://www.w3.org/2000/svg" '
    return (
        f'<svg {namespace}viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{width}" height="{height}" fill="{theme.paper}"/>'
        f"{heading}{''.join(drawing.parts())}</svg>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    table: LedgerTable
    names: tuple[str, ...]
    theme: Theme
    is_narrow: bool
    top: int

    @property
    def width(self) -> int:
        return _NARROW if self.is_narrow else _WIDE

    @property
    def row_height(self) -> int:
        return _ROW + 18 if self.is_narrow else _ROW

    @property
    def height(self) -> int:
        legends = len(self._legend_rows()) + len(self._legend_notes())
        return round(self._bottom + _AXIS + legends * _LEGEND + 6)

    @property
    def _bottom(self) -> float:
        """Return the lower edge of the rows, the one of the step included."""
        return self.top + _HEAD + (len(self.table.rows) + 1) * self.row_height + 4

    @property
    def _plot(self) -> tuple[float, float]:
        """Return the left and right edge of the bars."""
        if self.is_narrow:
            return 8, self.width - 14
        longest = max(len(row.words) for row in self.table.rows)
        return 24 + _LETTER * max(longest, 16), self.width - 16 - _CELL * len(self._columns) - 8

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*self.names, "difference") if len(self.names) == 2 else self.names

    def _x(self, time_ms: float) -> float:
        left, right = self._plot
        low, high = self._range
        return left + (right - left) * (time_ms - low) / (high - low)

    @property
    def _range(self) -> tuple[float, float]:
        """Return the times at the edges: where any bar begins or ends, in ms."""
        ends = [0.0, *self.table.steps_ms]
        for place in range(len(self.names)):
            now = 0.0
            for row in self.table.rows:
                now += row.times_ms[place]
                ends.append(now)
        return min(ends), max(ends) or 1.0

    def text(
        self,
        x: float,
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
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
        )

    def parts(self) -> Iterator[str]:
        yield from self._heads()
        yield from self._axis()
        starts = [0.0] * len(self.names)
        for index, row in enumerate(self.table.rows):
            yield from self._row(index, row, starts)
            starts = [now + ms for now, ms in zip(starts, row.times_ms, strict=True)]
        step = LedgerRow(words="step = sum", group=None, times_ms=self.table.steps_ms)
        y = self.top + _HEAD + len(self.table.rows) * self.row_height
        yield self._rule(8, self.width - 8, y + 1, y + 1, self.theme.ink)
        yield from self._row(len(self.table.rows), step, [0.0] * len(self.names), is_step=True)
        yield from self._legend()

    def _heads(self) -> Iterator[str]:
        y = self.top + 18
        yield self.text(8, y, "ms", is_quiet=True, size=12)
        if not self.is_narrow:
            for place, name in enumerate(self._columns):
                yield self.text(
                    self._cell(place), y, name, anchor="end", is_quiet=True, size=12
                )
        elif len(self.names) == 2:
            words = _ARROW.join(self.names)
            yield self.text(self.width - 8, y, words, anchor="end", is_quiet=True, size=12)

    def _cell(self, place: int) -> float:
        return self.width - 16 - _CELL * (len(self._columns) - 1 - place)

    def _row(
        self, index: int, row: LedgerRow, starts: Sequence[float], *, is_step: bool = False
    ) -> Iterator[str]:
        y = self.top + _HEAD + index * self.row_height + (4 if is_step else 0)
        weight = 600 if is_step else 400
        shown = [self.table.shown(ms) for ms in row.times_ms]
        apart = (
            [self.table.signed(row.times_ms[1] - row.times_ms[0])] if len(shown) == 2 else []
        )
        words = row.words
        if self.is_narrow and row.group is Group.OVERLAPPED:
            words = words.replace(" under communication", ", overlapped")
        yield self.text(8, y + 19, words, weight=weight)
        if self.is_narrow:
            numbers = _ARROW.join(shown)
            yield self.text(
                self.width - 8, y + 19, numbers, anchor="end", weight=weight, size=12
            )
        else:
            for place, number in enumerate([*shown, *apart]):
                yield self.text(self._cell(place), y + 19, number, anchor="end", weight=weight)
        bars = y + (26 if self.is_narrow else 5)
        colour = self.theme.ink if is_step else _COLOURS[row.group]
        for place, (start, ms) in enumerate(zip(starts, row.times_ms, strict=True)):
            is_pale = place < len(self.names) - 1
            left, right = sorted((self._x(start), self._x(start + ms)))
            yield (
                f'<rect x="{left:.1f}" y="{bars + place * (_BAR + 1)}" height="{_BAR}" '
                f'width="{max(right - left, 0.8 if ms else 0.0):.1f}" fill="{colour}" '
                f'fill-opacity="{0.4 if is_pale else 1}"/>'
            )

    def _axis(self) -> Iterator[str]:
        low, high = self._range
        last = float("-inf")
        for tick in _ticks(low, high, 4 if self.is_narrow else 7):
            x = self._x(tick)
            yield self._rule(x, x, self.top + _HEAD, self._bottom, self.theme.line)
            if x - last > 40:
                last = x
                yield self.text(
                    x, self._bottom + 16, f"{tick:,g}", anchor="middle", is_quiet=True, size=12
                )
        x = self._x(self.table.steps_ms[-1])
        yield self._rule(x, x, self.top + _HEAD, self._bottom, self.theme.quiet, dash="4 3")

    def _rule(
        self, x1: float, x2: float, y1: float, y2: float, colour: str, dash: str = ""
    ) -> str:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return (
            f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}"{dashed}/>'
        )

    def _legend_rows(self) -> list[list[tuple[str, str]]]:
        """Return the names and colours of the groups by line of the legend."""
        groups = [group for group in Group if any(r.group is group for r in self.table.rows)]
        entries = [(str(group), _COLOURS[group]) for group in groups]
        if any(row.group is None for row in self.table.rows):
            entries.append(("other", _COLOURS[None]))
        most = 2 if self.is_narrow else len(entries)
        return [entries[i : i + most] for i in range(0, len(entries), most)]

    def _legend_notes(self) -> list[str]:
        """Return what the bars and the dashed line are, by line of the legend."""
        notes = [f"dashed: the {self.names[-1]} step"]
        if len(self.names) == 2:
            notes.insert(0, f"pale: {self.names[0]}, solid: {self.names[1]}")
        return notes if self.is_narrow else ["; ".join(notes)]

    def _legend(self) -> Iterator[str]:
        y = self._bottom + _AXIS
        for entries in self._legend_rows():
            x = 8.0
            for name, colour in entries:
                yield f'<rect x="{x}" y="{y - 2}" width="11" height="11" fill="{colour}"/>'
                yield self.text(x + 16, y + 8, name, size=12, is_quiet=True)
                x += 32 + 6.6 * len(name)
            y += _LEGEND
        for note in self._legend_notes():
            yield self.text(8, y + 8, note, size=12, is_quiet=True)
            y += _LEGEND


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round times from low to high, at most so many and at least two."""
    raw = (high - low) / most
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [round(n * step, 9) for n in range(ceil(low / step), floor(high / step) + 1)]
