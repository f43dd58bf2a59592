"""However a model is spread over ranks, it learns the same."""

import itertools
from functools import cache

import pytest
import torch
from tests.ranks_pool import Pool

from stepmark.bench.ranks import Ranks

from .curves import CASES, FEW_STEPS, alone, curves_of_all, learned

# fp32 sums in another order; AdamW's first steps are sign-like and amplify that.
TOLERANCE = 2e-4
# A token whose experts score nearly alike may then go to another one.
TOLERANCE_OF_EXPERTS = 1e-3


@pytest.fixture(scope="module")
def spread() -> dict[str, tuple[list[float], float]]:
    """The losses and the first gradient norm of all cases, from four ranks."""
    with Pool(4) as pool:
        curves: dict[str, tuple[list[float], float]] = pool.run(curves_of_all, timeout_s=900)[0]
    return curves


ALONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))


@cache
def reference(name: str) -> tuple[list[float], float]:
    return learned(alone(CASES[name]), ALONE, FEW_STEPS)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_curve_is_that_of_one_process(
    name: str, spread: dict[str, tuple[list[float], float]]
) -> None:
    limit = TOLERANCE_OF_EXPERTS if CASES[name].model.moe else TOLERANCE
    assert spread[name][0] == pytest.approx(reference(name)[0], rel=limit)


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_norm_of_one_process(
    name: str, spread: dict[str, tuple[list[float], float]]
) -> None:
    assert spread[name][1] == pytest.approx(reference(name)[1], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", "ddp, tied", "ep"])
def test_the_curve_would_tell_a_step_that_does_nothing(name: str) -> None:
    """Every step moves the loss by far more than the tolerance."""
    want, _ = reference(name)
    frozen = losses_without_update(name)
    assert len(set(frozen)) == 1
    falls = [(a - b) / b for a, b in itertools.pairwise(want)]
    assert min(falls) > 10 * TOLERANCE_OF_EXPERTS


def losses_without_update(name: str) -> list[float]:
    from dataclasses import replace

    return learned(replace(alone(CASES[name]), lr=0.0), ALONE, FEW_STEPS)[0]
