"""The cases as captured: once for all tests, as each takes a second or more."""

import functools

from tests.capture.user_code import CASES

from stepmark.capture.run import capture
from stepmark.step.workload import Workload

NUM_RANKS = 4


@functools.cache
def made_of(case: str, rank: int = 0) -> Workload:
    return capture(CASES[case], NUM_RANKS, rank)
