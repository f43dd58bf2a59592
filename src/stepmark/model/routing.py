"""How many hosts and ranks a token reaches whose experts a router chooses without preference.

Scores of experts are independent and alike, so each expert is as likely as another. Without
groups the number of a token's experts on a rank is hypergeometric. With groups a router takes
the best ones by the sum of their best scores first (DeepSeek-V3, arXiv:2412.19437, section
2.1.2; megatron-core 0.16.1, transformer/moe/moe_utils.py, group_limited_topk), which has no
closed form: groups with high sums are seldom left out afterwards. It is sampled with a fixed
seed, and uniform scores.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from random import Random

_NUM_TOKENS = 4096  # of the sample: shares have a standard error of about 0.1 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A token goes to top_k of num_experts, those of top_groups of num_groups."""

    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1

    def share(self, num_units: int) -> float:
        """Return the share of tokens that have an expert on a unit, the mean of the units.

        A unit, such as a rank or a host, has as many experts as another, in their order.
        """
        size = self.num_experts // num_units
        if self.top_groups == self.num_groups:
            return 1 - _missing(self.num_experts, self.top_k, size)
        return _share_by_groups(self, num_units)


def _missing(num_experts: int, chosen: int, size: int) -> float:
    """Return the probability that none of `size` experts is among the chosen ones of all."""
    return math.comb(num_experts - size, chosen) / math.comb(num_experts, chosen)


@lru_cache(maxsize=64)
def _share_by_groups(routing: Routing, num_units: int) -> float:
    """Return the share of tokens that have an expert on a unit.

    How many experts a token has in each group is sampled; which ones they are is not: all of a
    group are alike.
    """
    of_group = routing.num_experts // routing.num_groups
    of_unit = routing.num_experts // num_units
    parts = [_parts(unit * of_unit, of_unit, of_group) for unit in range(num_units)]
    missed = 0.0
    for counts, num_tokens in _sampled(routing).items():
        for unit in parts:
            probabilities = (_missing(of_group, counts[group], size) for group, size in unit)
            missed += num_tokens * math.prod(probabilities)
    return 1 - missed / (_NUM_TOKENS * num_units)


def _parts(first: int, count: int, of_group: int) -> tuple[tuple[int, int], ...]:
    """Return the groups of experts from the first on, each with how many are of it."""
    groups = Counter(expert // of_group for expert in range(first, first + count))
    return tuple(groups.items())


@lru_cache(maxsize=8)
def _sampled(routing: Routing) -> "Counter[tuple[int, ...]]":
    """Return tokens by how many experts they have in each group."""
    random = Random(0)
    of_group = routing.num_experts // routing.num_groups
    counted = max(1, routing.top_k // routing.top_groups)  # scores that a group is chosen by
    tokens: Counter[tuple[int, ...]] = Counter()
    for _ in range(_NUM_TOKENS):
        groups = [
            _best_scores(random, of_group, routing.top_k) for _ in range(routing.num_groups)
        ]
        order = sorted(range(len(groups)), key=lambda group: -sum(groups[group][:counted]))
        chosen = order[: routing.top_groups]
        scores = sorted((score, group) for group in chosen for score in groups[group])
        best = Counter(group for _, group in scores[-routing.top_k :])
        tokens[tuple(best[group] for group in range(len(groups)))] += 1
    return tokens


def _best_scores(random: Random, count: int, most: int) -> list[float]:
    """Return the best of `count` uniform scores, from the highest on."""
    scores: list[float] = []
    score = 1.0
    for index in range(min(count, most)):
        score *= random.random() ** (1 / (count - index))
        scores.append(score)
    return scores
