"""How many files and functions of its own one command runs: its way stays short."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import stepmark
from stepmark.cli.main import status

SOURCE = str(Path(stepmark.__file__).parent) + os.sep
TRACES = Path(__file__).parent / "data" / "traces"
_IN_FUNCTION = 0x2  # CO_NEWLOCALS: no body of a module


def walked(run: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the functions of the package that run, with their files."""
    found: set[tuple[str, str]] = set()

    def enter(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        is_own = code.co_filename.startswith(SOURCE) and code.co_flags & _IN_FUNCTION
        if event == "call" and is_own:
            found.add((code.co_filename.removeprefix(SOURCE), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    ("words", "files", "functions"),
    [
        ("predict llama-3.1-8b --strategy fsdp --nproc 8 --mbs 2 --device h200", 84, 759),
        (f"trace breakdown {TRACES / 'fsdp8'}", 31, 252),
    ],
    ids=["predict", "trace"],
)
def test_a_command_runs_few_files(
    words: str, files: int, functions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the second time: the first one also imports, and reads what is kept."""
    status(words.split())
    found = walked(lambda: status(words.split()))
    assert "step" in capsys.readouterr().out
    assert len({file for file, _ in found}) <= files
    assert len(found) <= functions
