"""A page: one HTML file that needs no network, to mail, to archive, to open offline.

A page is a title and sections, whose content the functions of this file make of text, which
they escape. Nothing but a table or a picture is given as HTML.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import zip_longest
from typing import Literal, NewType

from stepmark.ground.package_data import data_text
from stepmark.tables.figures import Figure, draw

_FEW_SECTIONS = 3
_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}

Html = NewType("Html", str)


@dataclass(frozen=True, slots=True)
class Section:
    """Content under a title, then sections of their own; without any it is left out.

    A section of sections is a part of the page. A figure stands for a section under its title.
    """

    title: str
    content: Sequence[Html] = ()
    sections: "Sequence[Section | Figure]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A title and sections.

    lead, command: what is small below the title. headline: stands in for the title on the page.
    opening: what is above the table of contents.
    """

    title: str
    lead: str = ""
    command: str = ""
    headline: str = ""
    opening: Sequence[Html] = ()
    sections: Sequence[Section | Figure]

    def html(self) -> str:
        """Return the whole document."""
        above = paragraph(self.title, "quiet") if self.headline else ""
        command = f" &middot; <code>{_with_flags(self.command)}</code>" if self.command else ""
        opening = "\n".join(self.opening)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{escape(self.title)}</title>\n"
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<style>{_data('page.css')}</style>\n<script>{plotly_js()}</script></head>\n"
            f"<body><main>{above}<h1>{escape(self.headline or self.title)}</h1>\n"
            f'<p class="quiet">{escape(self.lead)}{command}</p>\n{opening}\n'
            f"{_with_contents(self.sections)}\n</main>\n"
            f"<script>{_data('page.js')}</script></body></html>\n"
        )


def paragraph(text: str, tone: Literal["", "quiet", "warning"] = "") -> Html:
    """Return text, quiet beside other text or as a warning."""
    return Html(f'<p class="{tone}">{_with_flags(text)}</p>')


def _with_flags(text: str) -> str:
    """Return text of HTML in which no line ends within a flag."""
    return re.sub(r"(?<![\w-])--\w[\w-]*", r"<i>\g<0></i>", escape(text))


def heading(text: str, level: Literal[2, 3] = 3) -> Html:
    """Return a heading within a section, which the table of contents omits."""
    return Html(f"<h{level}>{escape(text)}</h{level}>")


def definitions(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return names and their values beside each other."""
    cells = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return Html(f"<dl>{''.join(cells)}</dl>")


def preformatted(*lines: str, is_table: bool = False) -> Html:
    """Return lines as they are; those of a table scroll and are not folded."""
    kind = ' class="table"' if is_table else ""
    text = "\n".join(lines)
    return Html(f"<pre{kind}>{escape(text) if is_table else _with_flags(text)}</pre>")


def items(texts: Iterable[str], commands: Iterable[str] = ()) -> Html:
    """Return a list; it is numbered if there are commands, one below each text."""
    blocks = list(map(preformatted, commands))
    pairs = zip_longest(texts, blocks, fillvalue="")
    entries = (f"<li>{_with_flags(text)}{block}</li>" for text, block in pairs)
    kind = "ol" if blocks else "ul"
    return Html(f"<{kind}>{''.join(entries)}</{kind}>")


def details(status: str, reason: str, blocks: Iterable[str]) -> Html:
    """Return a status and its reason, which unfold to blocks of text."""
    summary = f"<summary><b>{escape(status)}</b> {escape(reason)}</summary>"
    return Html(f"<details>{summary}{''.join(map(preformatted, blocks))}</details>")


def plotly_js() -> str:
    """Return plotly.js with lines and bars alone: a quarter of the whole library."""
    return _data("plotly-basic.min.js")


_data = cache(data_text)


def _with_contents(sections: Sequence[Section | Figure]) -> str:
    """Return the sections one after the other, below links to them if they are several."""
    links: dict[str, str] = {}
    body = []
    for section in _listed(sections):
        name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
        if name in links:
            name += f"-{len(links)}"
        is_part = isinstance(section, Section) and section.sections
        kind = ' class="part"' if is_part else ""
        title = escape(section.title)
        links[name] = f'<li{kind}><a href="#{name}">{title}</a></li>'
        content = _plot(section, name) if isinstance(section, Figure) else section.content
        body.append(f'<section id="{name}"><h2{kind}>{title}</h2>\n')
        body += [*content, "</section>\n"]
    if len(links) >= _FEW_SECTIONS:
        body.insert(0, f"<nav><h3>Contents</h3><ul>{''.join(links.values())}</ul></nav>\n")
    return "".join(body)


def _listed(sections: Sequence[Section | Figure]) -> Iterator[Section | Figure]:
    """Yield the sections that are not empty, each before those within it."""
    for section in sections:
        inside = [] if isinstance(section, Figure) else list(_listed(section.sections))
        if isinstance(section, Figure) or section.content or inside:
            yield section
            yield from inside


def _plot(figure: Figure, section: str) -> list[str]:
    """Return the note of a figure and the figure. section: its name."""
    drawn = json.dumps(draw(figure) | {"config": _CONFIG}, separators=(",", ":"))
    drawn = drawn.replace("<", r"\u003c")  # no tag within a script
    button = ""
    if figure.x.whole and figure.x.limits:
        ranges = escape(json.dumps([figure.x.limits, figure.x.whole]))
        button = (
            f'<p class="tools"><button type="button" class="whole" data-ranges="{ranges}">'
            "Show all</button></p>"
        )
    return [
        paragraph(figure.note, "quiet"),
        button,
        f'<div class="plot"><div style="height:{figure.height}px">'
        f'<div id="plot-{section}" style="height:100%"></div></div>'
        f'<script>Plotly.newPlot("plot-{section}",{drawn})</script></div>',
    ]
