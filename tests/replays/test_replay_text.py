"""Tables of a replay, from times that are given."""

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.step.test_rank_program import BACK, GRADIENT, RECV, SEND, message, staged, work

from stepmark.cases.comm_curve import Curve
from stepmark.model.ops import Phase
from stepmark.replays import replay_rows
from stepmark.replays.replay_log_text import ReplayLog
from stepmark.replays.replay_page import page
from stepmark.step.workload import Group, Workload

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

REDUCE = message("all_reduce", group="tp", count=1024)
WORKLOAD = staged((work(), REDUCE, SEND, GRADIENT), (RECV, REDUCE, BACK))
NAN = math.nan


def times() -> "Floats":
    """[rank][pass][operation] of four ranks: two of each stage, two passes."""
    table = np.full((4, 2, 4), NAN)
    table[:2, :, 0] = 0.5  # computation is no message
    table[0, :, 1], table[1, :, 1] = (0.2, 0.4), (0.1, 0.3)
    table[2, :, 1], table[3, :, 1] = (0.3, 0.5), (0.3, 0.6)
    table[0, :, 3], table[1, :, 3] = (1.0, 2.0), (3.0, 4.0)
    return table


def test_a_row_per_message_has_the_longest_and_shortest_time_of_its_ranks() -> None:
    rows = replay_rows.operation_rows(WORKLOAD, times())
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
    (row,) = replay_rows.operation_rows(workload, np.array([[[0.001]], [[0.5]]]))
    assert row["time_min_s"] == 0.001
    assert row["busbw_bytes_per_s"] == pytest.approx(2048 / 0.5)
    (summary,) = replay_rows.summary_rows(workload, np.array([[[0.001]], [[0.5]]]))
    assert summary["busbw_bytes_per_s"] == pytest.approx(2048 / 0.5)


def test_the_summary_has_every_message_once() -> None:
    rows = replay_rows.summary_rows(WORKLOAD, times())
    by_name = {row["collective"]: row for row in rows}
    assert sum(row["operations"] for row in rows) == 6
    reduce = by_name["all_reduce"]
    # Two passes of the communicator of each stage.
    assert (reduce["operations"], reduce["samples"]) == (2, 4)
    assert reduce["mean_s"] == pytest.approx((0.2 + 0.4 + 0.3 + 0.6) / 4)
    assert (reduce["min_s"], reduce["max_s"]) == (0.2, 0.6)
    assert reduce["p99_s"] == 0.6
    assert by_name["send"]["mean_s"] is None


def test_a_collective_over_stages_is_one_with_the_times_of_all_its_ranks() -> None:
    """It has another place in the program of each stage."""
    over = message("all_reduce", group="world", count=1024)
    workload = staged((work(), over), (work(), work(), over))
    workload = replace(workload, groups={**workload.groups, "world": Group(digits=((4, 1),))})
    table = np.full((4, 1, 3), NAN)
    table[:2, 0, 1], table[2:, 0, 2] = (0.4, 0.3), (0.1, 0.2)
    for row in replay_rows.operation_rows(workload, table):
        assert (row["time_s"], row["time_min_s"]) == (0.4, 0.1)
    (row,) = replay_rows.summary_rows(workload, table)
    assert (row["operations"], row["samples"], row["time_min_s"]) == (1, 1, 0.1)


def test_bandwidth_is_beside_that_of_the_collective_alone() -> None:
    """Only between sizes that were measured: nothing is extrapolated."""
    curve = Curve(
        collective="all_reduce", num_ranks=2, points=((1024, 0.05), (2048, 0.1)), source="run"
    )
    table = times()
    rows = {
        row["collective"]: row for row in replay_rows.summary_rows(WORKLOAD, table, [curve])
    }
    # Its shortest time in the step is the median of 0.1, 0.3 and 0.3, 0.5: 0.3.
    assert rows["all_reduce"]["time_min_s"] == pytest.approx(0.3)
    assert rows["all_reduce"]["alone_pct"] == pytest.approx(100 * 0.1 / 0.3)
    assert rows["send"]["alone_pct"] is None
    short = replace(curve, points=((1024, 0.05),))
    rows = {
        row["collective"]: row for row in replay_rows.summary_rows(WORKLOAD, table, [short])
    }
    assert rows["all_reduce"]["alone_s"] is None


def test_iterations_are_those_of_the_slowest_rank() -> None:
    table = replay_rows.iterations(
        [[1.0, 1.0, 1.0], [1.1, 0.9, 2.0]], [[0.1, 0.2, 0.3], [0.0] * 3]
    )
    assert table["seconds"] == [1.1, 1.0, 2.0]
    assert table["median_s"] == 1.1
    assert table["outliers"] == [2]
    assert table["blocked_s_by_rank"] == [0.2, 0.0]
    assert table["jitter_pct"] == pytest.approx(100 * np.std([1.1, 1.0, 2.0], ddof=1) / 4.1 * 3)


def log(workload: Workload, spans: "Floats", **more: object) -> ReplayLog:
    seconds = np.array([[1.0, 1.0, 1.0], [1.1, 0.9, 2.0]])
    return ReplayLog(workload=workload, seconds=seconds, spans=spans, **more)  # type: ignore[arg-type]


def test_the_text_names_outliers_waiting_and_what_a_trace_had_more() -> None:
    table = np.stack([np.zeros_like(times()), times()], axis=-1)
    own = log(WORKLOAD, table, blocked_s=[[0.1, 0.2, 0.3], [0.0] * 3], step_of_trace_s=1.5)
    lines = list(own.lines())
    assert lines[0].startswith("iterations  median 1.1 s (1 s to 2 s, jitter 40 %; 3 after 0")
    assert "outlier     iteration 2 takes 82% longer than the median" in lines
    step = next(own.beside(2.2))  # of a median of 1.1 s
    assert step.endswith("the step took 1.1 s (100%) more")
    assert next(own.beside(0.55)).endswith("the step took 550 ms (50%) less")
    assert any(line.endswith("rank 0 18%, rank 1 0%") for line in lines)
    assert "its profiled step took 1.5 s: 400 ms (26.7%) of the host" in "\n".join(lines)
    assert sum("all_reduce" in line for line in lines) == 1
    assert not any("verified" in line for line in lines)
    assert "verified    9 elements, 2 wrong" in log(WORKLOAD, table, wrong=(2, 9)).lines()


def test_a_log_has_iterations_and_messages_as_arrays() -> None:
    """epoch_times, comm_logs and comm_log_each_epoch of AICB's log."""
    own = log(WORKLOAD, np.stack([np.zeros_like(times()), times()], axis=-1))
    assert own.epoch_times.tolist() == [1.1, 1.0, 2.0]
    assert len(own.comm_logs) == 6
    each = own.comm_log_each_epoch
    assert each.shape == (2, 6)
    assert each[:, 0].tolist() == [0.2, 0.4]  # the slower rank of stage 0
    assert each[:, 2].tolist() == [3.0, 4.0]
    assert np.isnan(each[:, 1]).all()  # a send that was not timed


def test_a_step_without_messages_has_an_empty_log() -> None:
    own = log(staged((work(),)), np.zeros((2, 3, 1, 2)))
    assert own.comm_log_each_epoch.shape == (3, 0)
    assert own.messages == own.comm_logs == []


def spans() -> "Floats":
    """[rank][pass][operation][start, duration]: two ranks, one pass."""
    return np.array(
        [[[(0.0, 1.0), (0.5, 1.0), (1.4, 0.2)]], [[(0.0, 1.0), (1.0, 1.0), (NAN, NAN)]]]
    )


def test_exposed_communication_is_what_no_computation_hides() -> None:
    workload = staged((work(), REDUCE, REDUCE))
    rows = [row for row in replay_rows.phase_rows(workload, spans()) if not row["pass"]]
    # Rank 0: messages from 0.5 to 1.5 and from 1.4 to 1.6, computation to 1.0.
    assert [row["computing_s"] for row in rows] == [1.0, 1.0]
    assert [row["messages_s"] for row in rows] == [pytest.approx(1.1), None]
    assert [row["exposed_comm_s"] for row in rows] == [pytest.approx(0.6), None]


def test_computation_of_any_pass_hides_the_messages_of_another() -> None:
    """The passes of a step add up where they do not overlap."""
    backward = message("all_reduce", group="tp", count=1024, phase=Phase.DGRAD)
    workload = staged((work(), backward))
    own = np.array([[[(0.0, 1.0), (0.5, 1.0)]]] * 2)
    rows = {row["pass"]: row for row in replay_rows.phase_rows(workload, own)[:3]}
    assert rows["forward"]["computing_s"] == 1.0
    assert rows["forward"]["messages_s"] == 0.0
    # Of one operation, events added 0.1.
    (less,) = (r for r in replay_rows.phase_rows(workload, own, 0.1)[:1])
    assert less["computing_s"] == pytest.approx(0.9)
    assert rows["backward"]["messages_s"] == 1.0
    assert rows["backward"]["exposed_comm_s"] == pytest.approx(0.5)
    assert rows[""]["exposed_comm_s"] == pytest.approx(0.5)


def test_the_rank_with_the_shortest_time_came_last() -> None:
    workload = staged((work(), REDUCE, REDUCE))
    table = np.full((2, 2, 3), NAN)
    table[0, :, 1], table[1, :, 1] = (0.3, 0.5), (0.1, 0.1)
    table[0, :, 2], table[1, :, 2] = (0.2, 0.2), (0.3, NAN)
    rows = replay_rows.arrival_rows(workload, table)
    # The call that one rank did not time tells nothing.
    assert [(row["collectives"], row["last"]) for row in rows] == [(3, 1), (3, 2)]
    assert [row["waited_s"] for row in rows] == [pytest.approx(0.05), pytest.approx(0.3)]
    sentence = replay_rows.slow_rank(rows)
    assert sentence.startswith("rank 1 came last to 67% of its collectives (mean of ranks 50%)")
    assert replay_rows.slow_rank(replay_rows.arrival_rows(workload, table * NAN)) == ""


def test_the_timeline_has_every_timed_operation_of_a_rank() -> None:
    own = log(staged((work(), REDUCE, REDUCE)), spans()).timeline()
    events = own.perfetto("rank")["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert Counter(event["pid"] for event in drawn) == {0: 3, 1: 2}
    of_rank = [event for event in drawn if event["pid"] == 0]
    assert [event["cat"] for event in of_rank[:2]] == [
        "norm and elementwise",
        "communication",
    ]
    reduce = of_rank[1]
    assert (reduce["name"], reduce["ts"], reduce["dur"]) == ("all_reduce", 5e5, 1e6)
    assert reduce["args"] == {"module": "m", "phase": "forward"}
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "compute"}


def test_a_page_draws_the_ranks_and_has_the_text() -> None:
    own = log(staged((work(), REDUCE, REDUCE)), spans())
    html = page("w<1>.json", own).html()
    assert "Replay: w&lt;1&gt;.json" in html
    assert "w<1>" not in html
    assert "rank 0, compute" in html
    assert "iterations  median" in html
