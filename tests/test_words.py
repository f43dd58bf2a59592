"""Words that documents, help and messages do not use, and names that code does not have.

A word of this list is not always wrong, but a reader of English meets a plainer one more often.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepmark.cli import main
from stepmark.ground.options import load, options
from stepmark.predictions.framework_job import FrameworkJob
from stepmark.predictions.predict_options import PredictOptions

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepmark"
# The diary is dated: its entries are left as they are.
PAGES = [
    ROOT / "README.md",
    *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "diary"),
]
PLAINER = {
    r"(not )?to be had": "not available",
    r"at hand": "available",
    r"for ever": "forever, or: it would deadlock",
    r"thus|thereby|whence|lest": "so, so that",
    r"nobody": "no rank, no process",
    r"goes on": "continues",
    r"l(ies?|ay) (in|on|at|within|there|end)": "is in",
    r"stands (there|beside|above)": "is there, is printed with",
    r"mend(s|ed)?": "correct",
    r"(was|were|is) (asked|told) (?!apart)": "the subject and what it did",
    r"crew|stillborn|siblings?|guests?|company|alarms|bells?|aside": "the field's term: STYLE",
    r"(rank|host|file|process|GPU|page)s? (knows?|wants?|likes?)": "has, is given",
    r"an? own": "its own",
    r"so do(es)?|so is it|so are they": "also",
}
# Whole identifiers, with or without underscores before them, of the package. What it is called
# in the field stands beside it.
NAMES = {
    "crew": "worker_group",
    "Beat": "Heartbeat",
    "death": "pdeathsig",
    "siblings": "local_peers",
    "stillborn": "failed_to_start",
    "Lost": "RankFailure",
    "company": "concurrent compute",
    "guest": "overlap_op",
    "offered": "torch_support",
    "extras": "profiling",
    "alarm": "failure_broadcast",
    "bell": "failure_broadcast",
    "Rig": "MeasureContext",
    "Taken": "StepSamples",
    "Told": "InputDefaults",
    "Said": "LogMessage",
    "Handles": "CommunicatorTable",
    "Scene": "RankContext",
    "Places": "Plan",
    "Piece": "Segment",
    "Ends": "StageEnds",
    "Maker": "UnitBuilder",
    "tape": "recorder",
    "anchors": "async_deps",
    "PASSED": "COMPUTE_DONE",
    "eyes": "op_csv",
    "numerals": "parse_numbers",
    "known_as": "equivalent_ids",
    "going_on": "run_dir",
    "asked": "options, requested",
    "likeness": "matching_profile",
    "ghosts": "torn_names",
    "stand_in": "replay_compute",
    "Means": "RunSettings",
    "Standing": "RaceState",
    "Yardstick": "PeakReference",
    "twins": "num_replicas",
    "hole_s": "omitted_s",
    "less": "num_omitted",
    "few": "shortened",
    "Kept": "SavedTensors, Representable",
    "go_on": "reopen",
    "read_aloud": "read_with_warnings",
    "say": "warn, report",
    "look": "poll",
    "take": "drain",
    "said": "the noun of what it holds",
    "mine": "the noun of what it holds",
    "theirs": "the noun of what it holds",
}
PARTICIPLES = {"_found", "_judged", "_shown", "_named"}  # of functions
FIRST_WORDS = r"So many|So long|So much|Of (?:an?|one|several)|Nor|Were"
OPENINGS = rf"(?:^|(?<=[.:;] )|(?<=\| ))({FIRST_WORDS}) "


def suspicious(text: str) -> list[str]:
    """Return the words and openings of a text that are on the list, with what is plainer."""
    text = re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    hits = [
        f"{match[0]!r} -> {plainer}"
        for words, plainer in PLAINER.items()
        for match in re.finditer(rf"\b(?:{words})\b", text, re.I)
    ]
    return hits + [f"opens with {match[1]!r}" for match in re.finditer(OPENINGS, text, re.M)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    assert suspicious(page.read_text()) == []


def help_texts() -> Iterator[str]:
    for entry in main.VERBS.values():
        yield from (entry.help, entry.doc)
        for option in options(load(entry.options)) if entry.options else ():
            yield option.help
    for cls in (PredictOptions, FrameworkJob):  # whose command depends on the words
        for option in options(cls):
            yield option.help


def messages() -> Iterator[str]:
    """Yield the literal parts of the rules that errors of users state."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConfigError":
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


@pytest.mark.parametrize("texts", [help_texts, messages], ids=["help", "messages"])
def test_texts_of_the_program(texts: "type[Iterator[str]]") -> None:
    every = list(texts())
    assert len(every) > 100
    assert [hit for text in every for hit in suspicious(text)] == []


@pytest.mark.parametrize(
    "text",
    ["Four GPUs were not to be had.", "Of one layer.", "The job goes on.", "So many bytes."],
)
def test_what_is_suspicious(text: str) -> None:
    assert len(suspicious(text)) == 1


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield every name that code gives or uses, also after a dot."""
    for node in ast.walk(tree):
        for name in ("id", "arg", "attr", "name", "asname"):
            value = getattr(node, name, None)
            yield from value.split(".") if isinstance(value, str) else ()


def private_words(tree: ast.AST) -> list[str]:
    words = {name.strip("_") for name in identifiers(tree)} & NAMES.keys()
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return [f"{word} -> {NAMES[word]}" for word in sorted(words)] + [
        f"{name} -> a verb and its object" for name in sorted(functions & PARTICIPLES)
    ]


def test_names_are_those_of_the_field() -> None:
    for file in SOURCE.rglob("*.py"):
        assert file.stem not in NAMES, file
        assert private_words(ast.parse(file.read_text())) == [], file


@pytest.mark.parametrize(
    "code",
    [
        "crew = 1",
        "def f(_tape): ...",
        "class _Beat: ...",
        "a._look()",
        "f(twins=1)",
        "from a import b as say",
        "import a.ghosts",
        "for few in a: ...",
        "def _judged(row): ...",
    ],
)
def test_a_private_word_is_found(code: str) -> None:
    assert len(private_words(ast.parse(code))) == 1
    assert private_words(ast.parse("look_up(said_so, 'crew')")) == []
