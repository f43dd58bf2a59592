"""Standard streams that are closed, full or broken."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from stepmark.ground import streams
from stepmark.ground.errors import ConfigError
streams.check()
for line in range(2):
    sys.stderr.write("message\\n")
try:
    print("table", flush=True)
    code = 0
except ConfigError as error:
    code = 7 if "stdout is invalid" in str(error) else 8
sys.exit(code if sys.stdin.read() == "" and os.open(os.devnull, os.O_RDONLY) > 2 else 9)
"""


@pytest.mark.parametrize(
    ("redirection", "expected"),
    [
        ("", 0),
        ("<&-", 0),
        ("2>&-", 0),
        ("2>/dev/full", 0),
        ("2> >(exec true)", 0),
        (">&-", 7),
        (">/dev/full", 7),
        ("> >(exec true)", 0),
        ("<&- >&- 2>&-", 7),
    ],
)
def test_only_stdout_that_cannot_be_written_is_an_error(
    redirection: str, expected: int
) -> None:
    line = f'exec {redirection}; sleep 0.1; exec "$@"' if redirection else 'exec "$@"'
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-c", PROGRAM],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    assert "Exception ignored" not in done.stderr


def test_processes_that_follow_have_the_streams_too() -> None:
    program = (
        "import subprocess, sys\n"
        "from stepmark.ground import streams\n"
        "streams.check()\n"
        "words = [sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]']\n"
        "sys.exit(subprocess.run(words).returncode)\n"
    )
    line = 'exec <&- >&- 2>&-; exec "$@"'
    words = ["bash", "-c", line, "bash", sys.executable, "-c", program]
    assert subprocess.run(words, check=False).returncode == 0
