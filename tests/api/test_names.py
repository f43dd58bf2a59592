"""import stepmark: its names, and what it costs."""

import subprocess
import sys

import pytest

import stepmark as sm

HEAVY = (
    "torch",
    "numpy",
    "pandas",
    "plotly",
    "msgspec",
    "rich",
    "stepmark.ground",
    "stepmark.measuring",
)
_IMPORT = f"""
import sys, time
start = time.perf_counter()
import stepmark
print(time.perf_counter() - start)
print(*[name for name in {HEAVY} if name in sys.modules])
"""
_ROOMS = """
import stepmark as sm
import stepmark.workloads.job, stepmark.predictions.step
from stepmark.workloads.rules import RULES
print(callable(sm.workload), callable(sm.predict), len(RULES) > 3)
"""


def output(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_importing_it_imports_nothing_heavy_in_50_ms() -> None:
    durations = []
    for _ in range(5):  # the fastest: others use this machine, too
        seconds, heavy = output(_IMPORT)
        assert heavy == ""
        durations.append(float(seconds))
    assert min(durations) < 0.05


def test_every_name_is_there_and_has_a_description() -> None:
    assert dir(sm) == sm.__all__ == sorted(sm.__all__)
    for name in set(sm.__all__) - {"__version__"}:
        assert getattr(sm, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'gemm'"):
        getattr(sm, "gemm")  # noqa: B009 # a type checker refuses it


def test_a_folder_does_not_hide_the_function_of_its_name() -> None:
    assert output(_ROOMS) == ["True True True"]
