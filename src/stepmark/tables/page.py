"""A page: one HTML file that needs no network, to mail, to archive, to open offline.

A page is plain data, a title and sections; `Page.html` alone writes HTML, and escapes all text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Literal

from stepmark.tables.figures import Figure, draw

_FEW_SECTIONS = 3
_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text, quiet beside other text or as a warning."""

    text: str
    tone: Literal["", "quiet", "warning"] = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading within a section, which the table of contents omits."""

    text: str
    level: Literal[2, 3] = 3


@dataclass(frozen=True, slots=True)
class Definitions:
    """Names and their values beside each other."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Lines with their line breaks; those of a table scroll and are not folded."""

    lines: Sequence[str]
    is_table: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A list of texts with the commands below each; it is numbered if there are any."""

    pairs: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Details:
    """A status and its reason, which unfold to blocks of text."""

    status: str
    reason: str
    blocks: Sequence[str]


@dataclass(frozen=True, slots=True)
class Html:
    """A table or picture that is HTML or SVG already."""

    html: str


Content = Paragraph | Heading | Definitions | Preformatted | Items | Details | Figure | Html


@dataclass(frozen=True, slots=True)
class Section:
    """Content under a title, then sections of their own; without any it is left out.

    A section of sections is a part of the page. A figure stands for a section under its title.
    """

    title: str
    content: Sequence[Content] = ()
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
    opening: Sequence[Content] = ()
    sections: Sequence[Section | Figure]

    def html(self) -> str:
        """Return the whole document."""
        above = _html(Paragraph(self.title, "quiet")) if self.headline else ""
        command = f" &middot; <code>{escape(self.command)}</code>" if self.command else ""
        opening = "\n".join(map(_html, self.opening))
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


def plotly_js() -> str:
    """Return plotly.js with lines and bars alone: a quarter of the whole library."""
    return _data("plotly-basic.min.js")


@cache
def _data(name: str) -> str:
    return files("stepmark").joinpath("data", name).read_text(encoding="utf-8")


def _with_contents(sections: Sequence[Section | Figure]) -> str:
    """Return the sections one after the other, below links to them if they are several."""
    links: dict[str, str] = {}
    body = []
    for section in _listed(sections):
        name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
        if name in links:
            name += f"-{len(links)}"
        kind = ' class="part"' if section.sections else ""
        title = escape(section.title)
        links[name] = f'<li{kind}><a href="#{name}">{title}</a></li>'
        content = "\n".join(_html(each, name) for each in section.content)
        body.append(f'<section id="{name}"><h2{kind}>{title}</h2>\n{content}</section>')
    if len(links) >= _FEW_SECTIONS:
        body.insert(0, f"<nav><h3>Contents</h3><ul>{''.join(links.values())}</ul></nav>")
    return "\n".join(body)


def _listed(sections: Sequence[Section | Figure]) -> Iterator[Section]:
    """Yield the sections that are not empty, each before those within it."""
    for section in sections:
        if isinstance(section, Figure):
            yield Section(section.title, [section])
            continue
        inside = list(_listed(section.sections))
        if section.content or inside:
            yield Section(section.title, section.content, inside)
            yield from inside


def _html(content: Content, section: str = "") -> str:
    """Return content as HTML. section: the name of its section."""
    match content:
        case Paragraph(text, tone):
            html = f'<p class="{tone}">{escape(text)}</p>'
        case Heading(text, level):
            html = f"<h{level}>{escape(text)}</h{level}>"
        case Definitions(pairs):
            cells = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
            html = f"<dl>{''.join(cells)}</dl>"
        case Preformatted(lines, is_table):
            kind = ' class="table"' if is_table else ""
            html = f"<pre{kind}>{escape(chr(10).join(lines))}</pre>"
        case Items(pairs):
            items = (f"<li>{escape(text)}{_blocks(commands)}</li>" for text, commands in pairs)
            kind = "ol" if any(commands for _, commands in pairs) else "ul"
            html = f"<{kind}>{''.join(items)}</{kind}>"
        case Details(status, reason, blocks):
            summary = f"<summary><b>{escape(status)}</b> {escape(reason)}</summary>"
            html = f"<details>{summary}{_blocks(blocks)}</details>"
        case Figure():
            html = _plot(content, f"plot-{section}")
        case Html(html):
            pass
    return html


def _blocks(texts: Sequence[str]) -> str:
    return "".join(f"<pre>{escape(text)}</pre>" for text in texts)


def _plot(figure: Figure, name: str) -> str:
    """Return a note and a figure. name: of its element in the document."""
    drawn = json.dumps(draw(figure) | {"config": _CONFIG}, separators=(",", ":"))
    drawn = drawn.replace("<", r"\u003c")  # no tag within a script
    return (
        f'{_html(Paragraph(figure.note, "quiet"))}<div class="plot">'
        f'<div style="height:{figure.height}px"><div id="{name}" style="height:100%"></div>'
        f'</div><script>Plotly.newPlot("{name}",{drawn})</script></div>'
    )
