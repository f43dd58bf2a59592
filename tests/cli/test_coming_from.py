"""Every command of docs/howto/coming-from.md works: listed, and the small ones measured."""

import re
import shlex
from pathlib import Path

import pytest

from stepmark.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "coming-from.md"


def commands(fence: str) -> list[str]:
    """Lines of the page's blocks that open with this fence."""
    blocks = re.findall(rf"^```{fence}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


LISTED, TRIED = commands("sh"), commands("sh try")


def words(command: str) -> list[str]:
    program, *rest = shlex.split(command)
    assert program == "stepmark"
    return rest


@pytest.fixture(autouse=True)
def _beside_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page names files of the checkout, and writes some."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


def test_every_fence_is_read() -> None:
    fences = re.findall(r"^```(.+)$", PAGE.read_text(), re.M)
    assert set(fences) == {"sh", "sh try"}
    assert len(LISTED) > 15
    assert len(TRIED) > 4


@pytest.mark.parametrize("command", LISTED + TRIED)
def test_command_lists_cases(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main.status([*words(command), "--dry-run"])
    told = capsys.readouterr()
    assert status == 0, told.err
    counts = r"[1-9]\d* cases?(, [1-9]\d* rows)?(, in \d+ launches)?; none was run"
    assert re.search(counts, told.err), told.err
    assert told.out


# The first of each verb; the others are planned above.
MEASURED = {words(command)[0]: command for command in reversed(TRIED)}
SHORTER = {"op": ("--budget", "1s")}


@pytest.mark.ranks
@pytest.mark.parametrize("command", MEASURED.values(), ids=MEASURED)
def test_small_command_measures(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *more = words(command)
    status = main.status([verb, *more, *SHORTER.get(verb, ()), "--out", "runs"])
    told = capsys.readouterr()
    assert status == 0, told.err
    [run] = (tmp_path / "runs").iterdir()
    kinds = re.findall(r'"kind":\s*"(\w+)"', (run / "records.jsonl").read_text())
    assert "measured" in kinds
    assert "failed" not in kinds
    assert told.out


def test_an_operator_we_lack_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.status(["op", "--config", "examples/param_operators.json", "--dry-run"]) == 0
    assert "not measured: torch.cat" in capsys.readouterr().err
