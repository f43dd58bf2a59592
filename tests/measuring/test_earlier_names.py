"""Names of modules that earlier versions call are there."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks


def refusal(module: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["stepmark.app.rank"])
def test_a_rank_answers_to_its_earlier_name(module: str) -> None:
    code, text = refusal(module)
    assert (code, text) == refusal("stepmark.measuring.rank")
    assert "ranks are started by" in text
