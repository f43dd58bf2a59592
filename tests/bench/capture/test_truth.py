"""What is captured without ranks equals what four real ranks send, message by message.

The real run is told by torch's profiler and gloo's flight recorder: see on_ranks.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.bench.capture.user_code import CASES, PIPELINES
from tests.bench.on_ranks import said_on_ranks

from stepmark.bench.capture.run import capture
from stepmark.core.message import RECV, SEND
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, Operation, Workload

NUM_RANKS = 4
Message = dict[str, Any]
Real = dict[str, list[list[Message]]]
# What runs once: with these the first two steps, too.
WARMED_UP = ("ddp", *PIPELINES)


@pytest.fixture(scope="module")
def real() -> dict[int, Real]:
    """By rank."""
    said = said_on_ranks("tests.bench.capture.on_ranks", NUM_RANKS, timeout_s=240)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {line["rank"]: line["cases"] for line in lines}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_captured_equals_real(case: str, rank: int, real: dict[int, Real]) -> None:
    made = capture(CASES[case], NUM_RANKS, rank)
    build, *steps = real[rank][case]
    stage = made.stage_of(rank) if case in PIPELINES else 0
    assert captured(made, rank, made.expand(stage)) == steps[-1]
    warm_ups = sum(steps[:-1], []) if case in WARMED_UP else []
    setup = captured(made, rank, made.expand(stage, setup=True))
    # A build has no phases worth the name.
    assert without_phase(setup) == without_phase([*build, *warm_ups])


@pytest.mark.parametrize(
    ("case", "chunks", "num_microbatches"), [("pp", 1, 6), ("pp_fsdp", 2, 4)]
)
def test_transfers_have_phase_and_microbatch(
    case: str, chunks: int, num_microbatches: int
) -> None:
    """Between two parts of the model each micro-batch goes forward, and its gradient back."""
    made = capture(CASES[case], NUM_RANKS)
    num_stages = len(made.stages)
    for stage in range(num_stages):
        found = Counter(
            (one.collective, one.phase, one.microbatch)
            for one in made.expand(stage)
            if isinstance(one, CommOp) and one.peer is not None
        )
        parts = range(stage, chunks * num_stages, num_stages)
        ahead = sum(part + 1 < chunks * num_stages for part in parts)
        behind = sum(part > 0 for part in parts)
        expected: Counter[tuple[str, Phase, int | None]] = Counter()
        for number in range(num_microbatches):
            expected[SEND, Phase.FWD, number] = expected[RECV, Phase.BWD, number] = ahead
            expected[RECV, Phase.FWD, number] = expected[SEND, Phase.BWD, number] = behind
        assert found == +expected
    # A batch of a send and a receive is one call.
    assert any(isinstance(one, CommOp) and one.fused for one in made.expand())


def captured(made: Workload, rank: int, operations: Iterator[Operation]) -> list[Message]:
    return [message(made, rank, one) for one in operations if isinstance(one, CommOp)]


def message(made: Workload, rank: int, one: CommOp) -> Message:
    ranks = list(made.groups[one.group].members(rank))
    # Computing again is part of the backward pass there.
    phase = "bwd" if one.recompute else str(one.phase)
    found: Message = {"collective": one.collective, "count": one.count, "phase": phase}
    if one.collective in (SEND, RECV):
        assert one.peer is not None
        return found | {"phase": "", "peer": (ranks.index(rank) + one.peer) % len(ranks)}
    return found | {"dtype": str(one.dtype), "ranks": ranks}


def without_phase(messages: list[Message]) -> list[Message]:
    return [{**one, "phase": ""} for one in messages]
