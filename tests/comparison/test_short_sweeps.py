"""Sweeps of one round and one fresh one: verdicts by repeats on other machines, simulated.

validation/verdicts.py --only short-sweeps counts many more.
"""

import random
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "validation"))

from simulated_sweeps import (
    SHORT,
    SHORT_NOISES,
    Swept,
    launch_logs,
    simulate_sweep,
)

SWEEPS = 60


def simulated(noise: str, gain: float) -> list[Swept]:
    """Return sweeps in which the first of two settings is faster by this, the other equal."""
    shape, common, factor = SHORT_NOISES[noise]
    launch = partial(launch_logs, random.Random(8), shape, common, SHORT.sizes, factor)
    return [simulate_sweep(launch, {0: gain}, SHORT) for _ in range(SWEEPS)]


@pytest.mark.parametrize("noise", SHORT_NOISES)
def test_equal_settings_have_no_verdict(noise: str) -> None:
    """0.8 % of tables may have a false one: three of 60 once in a thousand times."""
    sweeps = simulated(noise, 0.0)
    assert sum(bool(sweep.verdicts) for sweep in sweeps) <= 2
    assert not any(sweep.confirmed.single for sweep in sweeps)


@pytest.mark.parametrize("noise", SHORT_NOISES)
def test_41_percent_are_a_verdict_at_every_size(noise: str) -> None:
    slower = simulated(noise, 1 / 1.41 - 1)
    seen = sum(sweep.verdicts.count("0 slower") for sweep in slower)
    assert seen >= 0.99 * SWEEPS * SHORT.sizes
    assert not any("1 " in verdict for sweep in slower for verdict in sweep.verdicts)
    assert not any(sweep.confirmed.single for sweep in slower)
    faster = simulated(noise, 0.41)
    assert sum(sweep.confirmed.single == "0" for sweep in faster) >= 0.98 * SWEEPS
    ratios = [pick.ratio for sweep in faster for pick in sweep.confirmed.picks if pick.winner]
    held = [bool(r and r.low and r.high and r.low <= 1.41 <= r.high) for r in ratios]
    assert sum(held) >= 0.98 * len(held)


def test_what_one_slow_launch_explains_is_no_verdict() -> None:
    """10 % are not, 25 % are."""
    assert not any(sweep.verdicts for sweep in simulated("normal", 0.1))
    seen = sum(sweep.confirmed.single == "0" for sweep in simulated("normal", 0.25))
    assert seen >= 0.98 * SWEEPS
