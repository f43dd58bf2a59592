"""Tables of a replay, from times that are given."""

import math

import numpy as np
import pytest
from tests.core.test_rank_program import BACK, GRADIENT, RECV, SEND, message, staged, work

from stepmark.report import replay

REDUCE = message("all_reduce", group="tp", count=1024)
WORKLOAD = staged((work(), REDUCE, SEND, GRADIENT), (RECV, REDUCE, BACK))
NAN = math.nan


def times() -> "np.typing.NDArray[np.float64]":
    """[rank][pass][operation] of four ranks: two of each stage, two passes."""
    table = np.full((4, 2, 4), NAN)
    table[:2, :, 0] = 0.5  # computation is no message
    table[0, :, 1], table[1, :, 1] = (0.2, 0.4), (0.1, 0.3)
    table[2, :, 1], table[3, :, 1] = (0.3, 0.5), (0.3, 0.6)
    table[0, :, 3], table[1, :, 3] = (1.0, 2.0), (3.0, 4.0)
    return table


def test_a_row_per_message_has_the_longest_and_shortest_time_of_its_ranks() -> None:
    rows = replay.operation_rows(WORKLOAD, times())
    assert [(row["stage"], row["operation"], row["collective"]) for row in rows] == [
        *((0, 1, "all_reduce"), (0, 2, "send"), (0, 3, "recv")),
        *((1, 0, "recv"), (1, 1, "all_reduce"), (1, 2, "send")),
    ]
    first, send, recv = rows[:3]
    # The median over the passes of the slower rank, and of the faster one.
    assert first["time_s"] == pytest.approx(0.3)
    assert first["time_min_s"] == pytest.approx(0.2)
    assert first["message_bytes"] == 2048
    # nccl-tests: an all-reduce of two ranks has a bus factor of 2 (n - 1) / n = 1.
    assert first["busbw_bytes_per_s"] == pytest.approx(2048 / 0.2)
    assert (send["time_s"], send["busbw_bytes_per_s"]) == (None, None)  # not timed
    assert recv["time_s"] == pytest.approx(2.5)  # each rank has a message of its own
    assert recv["busbw_bytes_per_s"] is None  # it may have waited for its sender


def test_a_broadcast_that_one_rank_ends_early_is_as_fast_as_its_slowest_rank() -> None:
    workload = staged((message("broadcast", group="tp", count=1024),))
    (row,) = replay.operation_rows(workload, np.array([[[0.001]], [[0.5]]]))
    assert row["time_min_s"] == 0.001
    assert row["busbw_bytes_per_s"] == pytest.approx(2048 / 0.5)
    (summary,) = replay.summary_rows(workload, np.array([[[0.001]], [[0.5]]]))
    assert summary["busbw_bytes_per_s"] == pytest.approx(2048 / 0.5)


def test_the_summary_has_every_message_once() -> None:
    rows = replay.summary_rows(WORKLOAD, times())
    by_name = {row["collective"]: row for row in rows}
    assert sum(row["operations"] for row in rows) == 6
    reduce = by_name["all_reduce"]
    # Two passes of the communicator of each stage.
    assert (reduce["operations"], reduce["samples"]) == (2, 4)
    assert reduce["mean_s"] == pytest.approx((0.2 + 0.4 + 0.3 + 0.6) / 4)
    assert (reduce["min_s"], reduce["max_s"]) == (0.2, 0.6)
    assert reduce["p99_s"] == 0.6
    assert by_name["send"]["mean_s"] is None
    lines = list(replay.lines(replay.iterations([[1.0]], []), rows, WORKLOAD))
    assert sum("all_reduce" in line for line in lines) == 1


def test_iterations_are_those_of_the_slowest_rank() -> None:
    table = replay.iterations([[1.0, 1.0, 1.0], [1.1, 0.9, 2.0]], [[0.1, 0.2, 0.3], [0.0] * 3])
    assert table["seconds"] == [1.1, 1.0, 2.0]
    assert table["median_s"] == 1.1
    assert table["outliers"] == [2]
    assert table["blocked_s_by_rank"] == [0.2, 0.0]
    lines = list(replay.lines(table, [], WORKLOAD))
    assert "outlier     iteration 2 takes 82% longer than the median" in lines
    assert lines[2].endswith("rank 0 18%, rank 1 0%")


def spans() -> "np.typing.NDArray[np.float64]":
    """[rank][pass][operation][start, duration]: two ranks, one pass."""
    return np.array(
        [[[(0.0, 1.0), (0.5, 1.0), (1.4, 0.2)]], [[(0.0, 1.0), (1.0, 1.0), (NAN, NAN)]]]
    )


def test_exposed_communication_is_what_no_computation_hides() -> None:
    workload = staged((work(), REDUCE, REDUCE))
    # Rank 0: messages from 0.5 to 1.5 and from 1.4 to 1.6, computation to 1.0.
    assert replay.exposed_s(workload, spans()) == [pytest.approx(0.6), None]
    table = replay.iterations([[1.0]], []) | {"exposed_comm_s_by_rank": [0.6, None]}
    assert list(replay.lines(table, [], workload))[1].endswith("rank 0 600 ms, rank 1 unknown")


def test_the_timeline_has_every_timed_operation_of_a_rank() -> None:
    events = replay.timeline(staged((work(), REDUCE, REDUCE)), spans())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert [event["pid"] for event in drawn] == [0, 0, 0, 1, 1]
    assert [event["cat"] for event in drawn[:2]] == ["computation", "communication"]
    assert (drawn[1]["name"], drawn[1]["ts"], drawn[1]["dur"]) == ("all_reduce m", 5e5, 1e6)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "compute"}
