"""What is captured without ranks equals what four real ranks send, message by message.

The real run is told by torch's profiler and gloo's flight recorder: see on_ranks.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.capture import on_ranks
from tests.capture.made import NUM_RANKS, made_of
from tests.capture.user_code import CASES, NUM_WARM_UPS, PIPELINES
from tests.ranks_pool import Pool

from stepmark.cases.message import RECV, SEND
from stepmark.model.ops import Phase
from stepmark.step.workload import CommOp, Operation, Workload

Message = dict[str, Any]
Real = dict[str, dict[str, list[Message]]]


@pytest.fixture(scope="module")
def real() -> dict[int, Real]:
    """By rank."""
    with Pool(NUM_RANKS, environment=on_ranks.ENVIRONMENT) as pool:
        return dict(enumerate(pool.run(on_ranks.sent_by_all, timeout_s=900)))


def test_every_case_sends_something(real: dict[int, Real]) -> None:
    assert len(real) == NUM_RANKS
    for cases in real.values():
        assert cases.keys() == CASES.keys()
        assert all(len(case["step"]) > 3 for case in cases.values())


@pytest.mark.parametrize(
    ("case", "rank"), [*((case, 0) for case in CASES), ("fsdp_tp", 3), ("pp_fsdp", 3)]
)
def test_captured_equals_real(case: str, rank: int, real: dict[int, Real]) -> None:
    made = made_of(case, rank)
    stage = made.stage_of(rank) if case in PIPELINES else 0
    assert captured(made, rank, made.expand(stage)) == real[rank][case]["step"]
    setup = captured(made, rank, made.expand(stage, setup=True))
    # A setup has no phases worth the name.
    assert without_phase(setup) == without_phase(real[rank][case]["setup"])
    noted = any("the first 2 are part of the setup" in note for note in made.notes)
    assert noted is (case in NUM_WARM_UPS)


@pytest.mark.parametrize(
    ("case", "chunks", "num_microbatches"), [("pp", 1, 6), ("pp_fsdp", 2, 4)]
)
def test_transfers_have_phase_and_microbatch(
    case: str, chunks: int, num_microbatches: int
) -> None:
    """Between two parts of the model each micro-batch goes forward, and its gradient back."""
    made = made_of(case, 0)
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


def test_a_batch_of_a_send_and_a_receive_is_one_call() -> None:
    """In 1F1B's steady state, an activation and a gradient are exchanged at once."""
    operations = list(made_of("pp", 0).expand(1))
    fused = [at for at, one in enumerate(operations) if isinstance(one, CommOp) and one.fused]
    assert fused
    for at in fused:
        pair = operations[at - 1 : at + 1]
        assert {one.collective for one in pair if isinstance(one, CommOp)} == {SEND, RECV}


def test_what_is_computed_again_is_forward_work() -> None:
    found = [one for one in made_of("moe", 0).expand() if isinstance(one, CommOp)]
    again = [one for one in found if one.recompute]
    # Checkpointing stops before the second exchange, of which nothing is needed.
    assert [(one.phase, one.layer) for one in again] == [(Phase.FWD, 0)]


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
