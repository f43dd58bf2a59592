"""However a model is spread over ranks, it learns the same."""

import itertools
from functools import cache

import pytest
import torch
from tests.ranks_pool import Pool
from tests.selected import parameters, slowly

from stepmark.cases.train_case import TrainCase
from stepmark.measuring.ranks import Ranks

from .curves import CASES, FEW_STEPS, alone, curves_of, learned

# fp32 sums in another order; AdamW's first steps are sign-like and amplify that.
TOLERANCE = 2e-4
# A token whose experts score nearly alike may then go to another one.
TOLERANCE_OF_EXPERTS = 1e-3


@pytest.fixture(scope="module")
def spread(request: pytest.FixtureRequest) -> dict[str, tuple[list[float], float]]:
    """The losses and the first gradient norm of selected cases, from four ranks."""
    names = sorted(parameters(request, "name"))
    with Pool(4) as pool:
        curves: dict[str, tuple[list[float], float]]
        curves, *_ = pool.run(curves_of, names, timeout_s=900)
    return curves


# Each dimension and technique of these is in another case, too.
COMBINED = (
    *(
        "ddp, tied",
        "fsdp, accumulated",
        "tp",
        "tp, tied",
        "pp, accumulated",
        "pp x fsdp",
        "ep",
        "ep x fsdp",
    ),
    *("cp", "cp, learned positions", "cp, qk norm", "cp x fsdp", "cp x hsdp", "cp, experts"),
    *("cp x ep", "cp x pp", "ep, mla"),
    *("fsdp, states", "tp, norms after", "tp, parallel parts"),
    *("fsdp", "fsdp, groups", "pp x tp", "cp x tp", "cp x ep, mla"),
)
NAMES = slowly(list(CASES), COMBINED)


ALONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))


@cache
def learned_alone(case: TrainCase) -> tuple[list[float], float]:
    return learned(case, ALONE, FEW_STEPS)


def reference(name: str) -> tuple[list[float], float]:
    """Return what one process learns; many ways to spread a model have one reference."""
    return learned_alone(alone(CASES[name]))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_curve_is_that_of_one_process(
    name: str, spread: dict[str, tuple[list[float], float]]
) -> None:
    limit = TOLERANCE_OF_EXPERTS if CASES[name].model.moe else TOLERANCE
    assert spread[name][0] == pytest.approx(reference(name)[0], rel=limit)


@pytest.mark.parametrize("name", NAMES)
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
