"""Verdicts: a difference counts only beyond noise, and never from one launch or few samples."""

import dataclasses
import random
from pathlib import Path

import pytest

from stepmark.core.record import Measured
from stepmark.store.codec import decode
from stepmark.store.compare import judge

GOLDEN = Path(__file__).parents[1] / "data" / "records-schema1.jsonl"


def measured(mean: float, noise: float, n: int = 100, seed: int = 0) -> Measured:
    draw = random.Random(seed)
    records = map(decode, GOLDEN.read_bytes().splitlines())
    record = next(r for r in records if isinstance(r, Measured))
    seconds = tuple(mean * (1 + noise * draw.uniform(-1, 1)) for _ in range(n))
    samples = dataclasses.replace(record.samples, seconds=(seconds,), file="")
    return dataclasses.replace(record, samples=samples)


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.2, "slower"), (0.8, "faster"), (1.0, "same"), (1.02, "same")]
)
def test_quiet_machines_are_told_apart(factor: float, verdict: str) -> None:
    then = measured(1.0, 0.01)
    launches = [measured(factor, 0.01, seed=seed) for seed in (1, 2, 3)]
    found = judge(then, launches, 0.03)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(factor, rel=0.01)


def test_launches_that_disagree_prove_nothing() -> None:
    launches = [measured(1.1, 0.01, seed=1), measured(1.4, 0.01, seed=2)]
    assert judge(measured(1.0, 0.01), launches, 0.03).verdict == "cannot tell"


def test_noise_within_a_launch_widens_the_limit() -> None:
    noisy = [measured(1.1, 0.9, n=20, seed=seed) for seed in (1, 2)]
    found = judge(measured(1.0, 0.9, n=20, seed=3), noisy, 0.03)
    assert found.noise > 0.1
    assert found.verdict != "slower"


@pytest.mark.parametrize("n", [1, 4])
def test_few_samples_prove_nothing(n: int) -> None:
    few, many = [measured(2.0, 0.0, n=n)] * 2, [measured(2.0, 0.0)] * 2
    assert judge(measured(1.0, 0.0), few, 0.03).verdict == "cannot tell"
    assert judge(measured(1.0, 0.0, n=n), many, 0.03).verdict == "cannot tell"


def test_one_launch_proves_nothing() -> None:
    assert judge(measured(1.0, 0.0), [measured(2.0, 0.0)], 0.03).verdict == "cannot tell"


def test_another_method_is_not_compared() -> None:
    then = measured(1.0, 0.0)
    other = dataclasses.replace(then.samples, method="event-hot/1")
    launches = [dataclasses.replace(then, samples=other)] * 2
    assert judge(then, launches, 0.03).verdict == "other method"
