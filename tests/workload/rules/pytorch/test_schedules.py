"""Schedules of torch's pipelines: what is done, in which order, and how much is held."""

from collections.abc import Iterator

import pytest

from stepmark.workload.pipeline import WITH_MICROBATCH, Act, Action
from stepmark.workload.rules.pytorch.schedules import Order, Schedule, spans


def actions(order: Order, rank: int) -> Iterator[tuple[Act, int]]:
    """Every call of a rank with its micro-batch."""

    def numbered(action: Action, number: int) -> tuple[Act, int]:
        return action.act, action.microbatch + number if action.act in WITH_MICROBATCH else 0

    for span in spans(order)[rank]:
        for time in range(span.times):
            for tick in span.ticks:
                yield from (numbered(action, time * span.step) for action in tick)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_micro_batches_go_forward_and_back_once_and_in_order(
    schedule: Schedule, ranks: int, more: int
) -> None:
    count = ranks + more
    order = Order(schedule=schedule, num_ranks=ranks, num_microbatches=count)
    for rank in range(ranks):
        done = list(actions(order, rank))
        for act in (Act.FORWARD, Act.BACKWARD):
            assert [number for one, number in done if one is act] == list(range(count))
        held, most = 0, 0
        for act, _ in done:
            held += (act is Act.FORWARD) - (act is Act.BACKWARD)
            most = max(most, held)
        is_gpipe = schedule is Schedule.GPIPE
        assert most == (count if is_gpipe else min(count, ranks - rank))
