"""Shares of tokens that reach a host or a rank are those of drawn routes."""

import math

import numpy as np
import pytest

from stepmark.model.routing import Routing

V3 = Routing(num_experts=256, top_k=8, num_groups=8, top_groups=4)
V2 = Routing(num_experts=160, top_k=6, num_groups=8, top_groups=3)
ROUTINGS = [
    V3,
    V2,
    Routing(num_experts=256, top_k=8),
    Routing(num_experts=128, top_k=8),
    Routing(num_experts=64, top_k=6),
    Routing(num_experts=8, top_k=2),
    Routing(num_experts=8, top_k=1),
    Routing(num_experts=64, top_k=4, num_groups=4, top_groups=4),
    Routing(num_experts=64, top_k=4, num_groups=16, top_groups=2),
]
NUM_TOKENS = 20_000
# Of a share by groups, which is itself the mean of 4096 tokens.
OF_SAMPLE = 0.002


def drawn(routing: Routing, seed: int = 1) -> np.ndarray:
    """Return the experts of tokens, as megatron-core's group_limited_topk chooses them."""
    scores = np.random.default_rng(seed).random((NUM_TOKENS, routing.num_experts))
    if routing.top_groups < routing.num_groups:
        by_group = scores.reshape(NUM_TOKENS, routing.num_groups, -1)
        counted = routing.top_k // routing.top_groups
        sums = np.sort(by_group, axis=-1)[:, :, -counted:].sum(axis=-1)
        groups = np.argsort(sums, axis=-1)[:, -routing.top_groups :]
        mask = np.zeros_like(sums, dtype=bool)
        np.put_along_axis(mask, groups, True, axis=-1)
        scores = np.where(mask[:, :, None], by_group, -np.inf).reshape(scores.shape)
    return np.argsort(scores, axis=-1)[:, -routing.top_k :]


def num_reached(routing: Routing, num_units: int) -> np.ndarray:
    """Return on how many units each token has an expert."""
    units = np.sort(drawn(routing) * num_units // routing.num_experts, axis=-1)
    counts: np.ndarray = 1 + (np.diff(units, axis=-1) > 0).sum(axis=-1)
    return counts


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("num_units", [2, 4, 8, 16, 32, 64])
def test_shares_are_those_of_drawn_routes(routing: Routing, num_units: int) -> None:
    if routing.num_experts % num_units:
        pytest.skip("units have as many experts as others")
    counts = num_reached(routing, num_units)
    error = 4 * counts.std() / math.sqrt(NUM_TOKENS)
    if routing.top_groups < routing.num_groups:
        error += OF_SAMPLE * counts.mean()
    assert num_units * routing.share(num_units) == pytest.approx(counts.mean(), abs=error)


def test_deepseek_v3_reaches_at_most_four_hosts_of_eight() -> None:
    """arXiv:2412.19437, section 3.2.2: each token is sent to at most 4 nodes."""
    reached = 8 * V3.share(8)
    assert 3.9 < reached < 4
    without = Routing(num_experts=256, top_k=8)
    missed = math.comb(224, 8) / math.comb(256, 8)
    assert without.share(8) == pytest.approx(1 - missed)
    assert 8 * without.share(8) > 5.2


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_share_is_between_that_of_an_expert_and_all(routing: Routing) -> None:
    """Each expert has as many tokens as another, and one unit has all of them."""
    assert routing.share(1) == 1
    each = routing.top_k / routing.num_experts
    assert routing.share(routing.num_experts) == pytest.approx(each)
    shares = [routing.share(count) for count in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True)
    for count in (2, 4, 8):
        most = min(routing.top_k, count)
        assert 1 - 1e-12 <= count * routing.share(count) <= most + 1e-12


def test_a_share_is_the_same_each_time() -> None:
    """Files of the same job are equal, whatever was computed before."""
    assert V3.share(8) == Routing(num_experts=256, top_k=8, num_groups=8, top_groups=4).share(8)
    assert V3.share(8) == 0.493988037109375
