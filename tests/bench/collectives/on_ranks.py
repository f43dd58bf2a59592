"""What tests run on each rank of a pool; the first argument is the rank's place."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bench.fakes import rig

from stepmark.bench.collectives import runner
from stepmark.bench.collectives.communicators import Communicators
from stepmark.bench.collectives.runner import Options
from stepmark.bench.ranks import Ranks
from stepmark.bench.stopping import Effort
from stepmark.core.comm_case import CommCase
from stepmark.core.record import Record

FEW = Options(iterations=3, warmups=1)
QUICK = Effort(sample_s=0.1, soak_s=0.0, min_batches=2, target_ci_rel=0.005)
# What a test changes on a rank before it measures.
Change = Callable[[pytest.MonkeyPatch, Ranks], None]


class NoGuard:
    """Nobody notices a case that hangs but the pool."""

    def begin(self, position: int, limit_s: float) -> None: ...

    def idle(self, limit_s: float) -> None: ...


def measure(
    ranks: Ranks,
    cases: list[CommCase],
    options: Options = FEW,
    effort: Effort = QUICK,
    change: Change | None = None,
    **place: Any,
) -> list[Record]:
    """The runner's records, on rank 0; nothing on the others."""
    records: list[Record] = []
    communicators = Communicators(ranks)
    with pytest.MonkeyPatch.context() as patch:
        if change:
            change(patch, ranks)
        runner.run(
            list(enumerate(cases)),
            rig(ranks, **place),
            effort,
            options,
            communicators,
            NoGuard(),
            run_id="r",
            sink=records.append,
        )
    communicators.close()
    return records


def who(ranks: Ranks, word: str) -> tuple[int, int, str]:
    return ranks.rank, ranks.num_ranks, word
