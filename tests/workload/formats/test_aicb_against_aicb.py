"""The same parameters given to AICB and to stepmark: equal but for AICB's listed errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.cli.main import status

from .aicb_corrected import JOBS, command, corrected, lines_of
from .aicb_samples import MOCKED, content, name_of

Generate = Callable[[str], str]


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Generate:
    """The CSV that stepmark workload generate writes for a job with AICB's own parameters."""
    folder = tmp_path_factory.mktemp("csv")

    def made(job: str) -> str:
        path = folder / f"{job}.csv"
        words = [*command(job, "mocked"), "--to", "aicb", "-o", str(path)]
        if not path.exists():
            assert status(["workload", "generate", *words]) == 0
        return path.read_text()

    return made


@pytest.mark.parametrize(
    "path", [path for path in MOCKED if path.parent.name in JOBS], ids=name_of
)
def test_lines_are_aicbs_but_for_its_errors(path: Path, generate: Generate) -> None:
    job, computation = path.parent.name, "comp" in path.name
    theirs = lines_of(content(path).decode(), computation=computation)
    ours = lines_of(generate(job), computation=computation)
    wanted = corrected(theirs, JOBS[job], computation=computation)
    for number, (here, there) in enumerate(zip(ours, wanted, strict=False)):
        assert here == there, f"line {number}"
    assert len(ours) == len(wanted)
    assert ours != theirs
