"""The questions of AGENTS.md, which llms.txt repeats on one line each.

python tests/machine_readers.py     write them into llms.txt
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
AGENTS = ROOT / "AGENTS.md"
LLMS = ROOT / "llms.txt"
_QUESTION = re.compile(r"^\*\*(.+?)\*\*.*\n\n```sh\n(.+)\n```\n\n(.+)$", re.MULTILINE)
_SECTION = re.compile(r"(?<=^## Questions\n\n).*?(?=^## )", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question, the command that answers it, and the keys of its JSON."""

    text: str
    command: str
    keys: tuple[str, ...]


def questions() -> list[Question]:
    return [
        Question(text, command, tuple(re.findall("`([^`]+)`", keys)))
        for text, command, keys in _QUESTION.findall(AGENTS.read_text())
    ]


def llms() -> str:
    """Return llms.txt with the questions of AGENTS.md."""
    lines = (
        f"- {each.text} `{each.command}`: {', '.join(f'`{key}`' for key in each.keys)}\n"
        for each in questions()
    )
    text = "".join(lines) + "\n"
    return _SECTION.sub(lambda _: text, LLMS.read_text(), count=1)


if __name__ == "__main__":
    LLMS.write_text(llms())
