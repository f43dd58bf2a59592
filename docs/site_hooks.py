"""What the documents gain when they become a site: tables of flags, and outputs of commands.

    <!-- flags comm -->      the flags of a verb, from its options class
    ```sh run                commands that the build executes; their output follows
    ```sh run head=9 tail=3  the same, and only these lines of the output

The site also has llms.txt and AGENTS.md, with links to its pages. Commands run one after the
other, each page in a folder of its own beside examples and results.
"""

import contextlib
import io
import os
import posixpath
import re
import shlex
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

from stepmark.cli import main
from stepmark.cli.commands import Group
from stepmark.ground.options import REQUIRED, Option, options
from stepmark.operators.op_options import options_class

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```sh run(?: head=(\d+))?(?: tail=(\d+))?\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
COMMANDS = re.compile(r'<div class="language-sh .*?</div>', re.S)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FOR_MACHINES = ("llms.txt", "AGENTS.md")


def on_config(_config: Any) -> None:
    """Set the width of outputs."""
    os.environ |= {"COLUMNS": "110", "NO_COLOR": "1"}


def on_post_build(config: Any) -> None:
    """Write the files for machine readers beside the pages."""
    for name in FOR_MACHINES:
        text = for_site((ROOT / name).read_text())
        Path(config["site_dir"], name).write_text(text)


def for_site(text: str) -> str:
    """Return a file at the root with links from the site: to pages, or beside docs/."""
    text = re.sub(r"\]\(docs/([^)#]+)\.md", r"](\1.html", text)
    names = "|".join(map(re.escape, FOR_MACHINES))
    return re.sub(rf"\]\((?!{names}|https?:)([A-Z][^)/]*\.md)", r"](../\1", text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with tables and outputs in place of what asks for them."""
    source = page.file.src_uri
    text = re.sub(r"^<!-- flags (.+) -->$", lambda m: flag_tables(m[1]), markdown, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "results", "tests"):
            (Path(folder) / name).symlink_to(ROOT / name)
        with contextlib.chdir(folder):
            text = FENCE.sub(lambda match: _executed(match, source), text)
    text = re.sub(r"^```(\w+) [^\n]+$", r"```\1", text, flags=re.M)
    return LINK.sub(lambda match: _outside(match, source), text)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page whose commands fold between words, not within a flag."""
    return COMMANDS.sub(lambda match: FLAG.sub(r"<i>\g<0></i>", match[0]), html)


def _executed(match: "re.Match[str]", source: str) -> str:
    first, last, block = int(match[1] or 0), int(match[2] or 0), match[3]
    lines: list[str] = []
    for command in block.replace("\\\n", " ").splitlines():
        lines += _output(command, source)
    if first and len(lines) > first + last:
        lines = [*lines[:first], "...", *lines[len(lines) - last :]]
    return f"```sh\n{block}```\n\n```text\n" + "\n".join(lines) + "\n```"


def _output(command: str, source: str) -> list[str]:
    """Return what a command prints; the build fails where the command does."""
    program, *words = shlex.split(command, comments=True)
    assert program == "stepmark", command
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        status = main.status(words)
    if status:
        raise PluginError(f"{source}: {command}: exit code {status}\n{shown.getvalue()}")
    return shown.getvalue().rstrip().splitlines()


def _outside(match: "re.Match[str]", source: str) -> str:
    """Return a link to a file of the checkout, which is no page; site/ lies beside docs/."""
    text, target, anchor = match.groups()
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
    if path.startswith("docs/"):
        return match[0]
    if not (ROOT / path).exists():
        raise PluginError(f"{source}: {target} is not in the checkout")
    return f'<a href="{target}{anchor or ""}">{escape(text.replace("`", ""))}</a>'


def flag_tables(words: str) -> str:
    """Return the flags of a command, such as "comm" or "trace ledger", by group."""
    cls = _options_class(*words.split())
    groups: dict[str, list[Option]] = {}
    for option in options(cls):
        groups.setdefault("Arguments" if option.argument else option.group, []).append(option)
    head = ["", "| flag | meaning | default |", "|---|---|---|"]
    return "\n".join([*head, *(row for name in groups for row in _rows(name, groups[name]))])


def _options_class(verb: str, *words: str) -> type:
    if verb == "op":
        return options_class(words[0] if words else None)
    command = main.command(verb, list(words))
    while isinstance(command, Group):
        command, words = command.command(list(words)), words[1:]
    return command.cls


def _rows(group: str, members: list[Option]) -> Iterator[str]:
    yield f"| **{group}** | | |"
    for option in members:
        names = ", ".join(f"`{word}`" for word in _spellings(option))
        text, default = _default(option)
        yield f"| {names} | {_cell(text)} | {_cell(default)} |"


def _spellings(option: Option) -> tuple[str, ...]:
    if option.argument:
        return (option.metavar if option.metavar.isupper() else option.name.upper(),)
    metavar = "" if option.is_switch else f" {option.metavar}"
    return (*option.spellings[:-1], option.spellings[-1] + metavar)


def _default(option: Option) -> tuple[str, str]:
    """Return the help without the default that it states, and the default."""
    stated = re.fullmatch(r"(.*?) \[(.*)\]", option.help, re.S)
    if stated:
        return stated[1], stated[2]
    if option.default is REQUIRED:
        return option.help, "required"
    if isinstance(option.default, bool) or option.default in (None, (), ""):
        return option.help, ""
    return option.help, option.reader.show(option.default)


def _cell(text: str) -> str:
    return escape(text, quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
