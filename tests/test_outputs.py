"""What commands print and write stays what it is, until `make outputs` writes it anew."""

from pathlib import Path

import pytest
from tests import outputs

from stepmark.cli.verbs import VERBS

# predictions-few has some of its rows.
SLOW = ("predictions",)
PATHS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW))
    for path in outputs.TRANSCRIPTS
]


@pytest.mark.parametrize("path", PATHS)
def test_a_command_prints_what_it_did(path: Path) -> None:
    kept = path.read_text()
    now = outputs.transcribe(outputs.commands(kept))
    assert outputs.first_difference(kept, now) == "", "if it is meant: make outputs"


def test_transcripts_hold_every_verb_and_exit_code() -> None:
    text = "".join(path.read_text() for path in outputs.TRANSCRIPTS)
    lines = outputs.commands(text)
    assert len(lines) > 280
    assert {line.split()[1] for line in lines if " " in line} >= set(VERBS)
    for code in (0, 1, 2):
        assert f"# exit code {code}\n" in text


KEPT = "$ stepmark runs list\n# to stdout\n  a  1.25 ms\n# exit code 0\n"


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (KEPT, ""),
        (KEPT.replace("1.25", "1.25000000000001"), ""),
        (KEPT.replace("1.25", "1.26"), "$ stepmark runs list\n-   a  1.25 ms\n+   a  1.26 ms"),
        (KEPT.replace("a  1", "b  1"), "$ stepmark runs list\n-   a  1.25 ms\n+   b  1.25 ms"),
        (
            KEPT.replace("code 0", "code 2"),
            "$ stepmark runs list\n- # exit code 0\n+ # exit code 2",
        ),
        (KEPT + "more\n", "$ stepmark runs list\n+ more"),
        (
            KEPT.replace("# exit code 0\n", ""),
            "$ stepmark runs list\n- # exit code 0\n+ (nothing)",
        ),
    ],
)
def test_a_difference_is_shown_with_its_command(now: str, difference: str) -> None:
    """But for last digits, in which processors differ."""
    assert outputs.first_difference(KEPT, now) == difference


def test_a_transcript_holds_what_a_command_writes() -> None:
    line = "stepmark runs export few/h200-x2-gemm rows.csv --to csv"
    text = outputs.transcribe([line])
    assert text.startswith(f"$ {line}\n")
    assert "# writes rows.csv\n  family,model," in text
    assert "# exit code 0\n" in text
    assert outputs.commands(text) == [line]


def test_a_long_file_is_shortened_without_losing_a_change() -> None:
    long = "".join(f"{number}\n" for number in range(1000))
    shortened = outputs._shortened(long)
    assert len(shortened.splitlines()) == outputs.MAX_LINES + 1
    assert outputs._shortened(long.replace("999", "998")) != shortened
    assert outputs._shortened("a\nb\n") == "a\nb"
