"""Hostile files: a few of the generator's inputs in every run, many in the long one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def faults(seed: int, count: int) -> tuple[int, str]:
    """Return (exit code, output) of the generator, which forks from a process of its own."""
    command = [sys.executable, "-m", "tests.damage.hostile", str(seed), str(count)]
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def test_a_sample_of_hostile_files() -> None:
    code, text = faults(seed=5, count=52)
    assert code == 0, text
    assert "52 inputs, 0 faults" in text


@pytest.mark.slow
def test_hostile_files(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = faults(seed=44, count=600)
    with capsys.disabled():
        sys.stdout.write(f"\n{text}")
    assert code == 0, text
