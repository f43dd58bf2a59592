"""A page: one HTML file that needs no network, to mail, to archive, to open offline."""

import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files

from plotly.graph_objects import Figure

_FEW_SECTIONS = 3


def document(title: str, lead: str, body: str, *, headline: str = "", opening: str = "") -> str:
    """Return a page that needs nothing else.

    `title` and `headline`, which stands in for it on the page, are text; the others are HTML.
    opening: what stands above the table of contents.
    """
    above = f'<p class="quiet">{escape(title)}</p>' if headline else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>{_data('page.css')}</style>\n<script>{plotly_js()}</script></head>\n"
        f"<body><main>{above}<h1>{escape(headline or title)}</h1>\n"
        f'<p class="quiet">{lead}</p>\n{opening}\n{_with_contents(body)}\n</main>\n'
        f"<script>{_data('page.js')}</script></body></html>\n"
    )


def plotly_js() -> str:
    """Return plotly.js with lines and bars alone: a quarter of the whole library."""
    return _data("plotly-basic.min.js")


@cache
def _data(name: str) -> str:
    return files("stepmark").joinpath("data", name).read_text(encoding="utf-8")


def _with_contents(body: str) -> str:
    """Return the sections, which get names, below a table of contents if there are several."""
    links: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        kind, title = match.groups()
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        if name in links:
            name += f"-{len(links)}"
        links[name] = f'<li{kind}><a href="#{name}">{title}</a></li>'
        return f'<section id="{name}"><h2{kind}>{title}</h2>'

    body = re.sub(r'<section><h2( class="part"|)>(.*?)</h2>', named, body)
    if len(links) < _FEW_SECTIONS:
        return body
    return f"<nav><h3>Contents</h3><ul>{''.join(links.values())}</ul></nav>\n{body}"


def section(title: str, content: str) -> str:
    """Return a section, or nothing without content. The title is HTML."""
    return f"<section><h2>{title}</h2>\n{content}</section>" if content else ""


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    cells = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f"<dl>{''.join(cells)}</dl>"


def figure_section(title: str, note: str, figure: Figure) -> str:
    """Return a plot under its title (text) and a note."""
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"displaylogo": False, "responsive": True, "displayModeBar": False},
    )
    return section(
        escape(title), f'<p class="quiet">{escape(note)}</p><div class="plot">{plot}</div>'
    )
