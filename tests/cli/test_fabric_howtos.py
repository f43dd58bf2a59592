"""docs/howto/rccl-tests.md and ofi-plugin.md show figures and findings that are printed."""

import re
import shlex
from pathlib import Path

import pytest

from stepmark.cli import main

ROOT = Path(__file__).parents[2]
RCCL_TESTS = (ROOT / "docs" / "howto" / "rccl-tests.md").read_text()
OFI_PLUGIN = (ROOT / "docs" / "howto" / "ofi-plugin.md").read_text()


def block(name: str) -> str:
    """Return the block of this name."""
    match = re.search(rf"^```text {name}\n(.*?)^```$", OFI_PLUGIN, re.M | re.S)
    assert match, name
    return match[1]


def test_compared_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    [command] = re.findall(r"^stepmark (compare tcp=.*)", RCCL_TESTS, re.M)
    assert main.status(shlex.split(command)) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "64 KiB" in line)
    tcp, plugin, ratio = row.split()[2:]
    assert (
        f"shows {tcp} and {plugin} GB/s at 64 KiB, a ratio of {float(ratio):.2f}" in RCCL_TESTS
    )


@pytest.mark.parametrize("name", ["in-use", "missing"])
def test_logs_says_what_is_shown(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "nccl.log").write_text(block(name))
    assert main.status(["logs", str(tmp_path / "nccl.log"), "--ended"]) == 0
    shown = block(f"{name} says").splitlines()
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line in shown] == shown
    assert any(line.startswith("warning:") for line in output) == (name == "missing")
