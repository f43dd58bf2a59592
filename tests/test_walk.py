"""How many files and functions of its own one command runs, so that its way stays short."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import stepmark
from stepmark.cli.main import status

HERE = Path(__file__).parent
SOURCE = str(Path(stepmark.__file__).parent) + os.sep
PREDICT = "predict llama-3.1-8b --strategy fsdp --nproc 8 --mbs 2 --device h200"
TRACE = f"trace breakdown {HERE / 'data/traces/fsdp8'}"


def walked(run: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the functions of the package that run, by file; not what imports run."""
    found: set[tuple[str, str]] = set()

    def enter(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_flags & 0x2:
            found.add((code.co_filename.removeprefix(SOURCE), code.co_qualname))

    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("words", "files", "functions"),
    [(PREDICT, 72, 513), (TRACE, 26, 300)],
    ids=["predict", "trace"],
)
def test_a_command_runs_few_files(
    words: str, files: int, functions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = walked(lambda: status(words.split()))
    assert "step" in capsys.readouterr().out
    assert len({file for file, _ in found}) <= files
    assert len(found) <= functions
