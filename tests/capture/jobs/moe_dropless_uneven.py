"""Dropless experts of which some get more tokens than others."""

from collections.abc import Callable

import torch
from tests.capture.jobs.moe_dropless import EXPERTS, TOKENS, TOP_K, routed

TOKENS_PER_EXPERT = 7, 4, 3, 5, 1, 6, 2, 4


def build() -> Callable[[], None]:
    experts = torch.arange(EXPERTS).repeat_interleave(torch.tensor(TOKENS_PER_EXPERT))
    return routed(experts.view(TOP_K, TOKENS).T)
