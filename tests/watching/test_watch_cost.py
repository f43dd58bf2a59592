"""The text about a watched job: its ranks, and what the profiler cost."""

from typing import Any

import pytest

from stepmark.watching.watch_cost import WatchedRank, cost_lines, job_lines


def rank(number: int, *, profiled: float = 0.017, **changes: Any) -> WatchedRank:
    facts: dict[str, Any] = {
        "host": "a",
        "trace": f"traces/rank{number}.json.gz",
        "is_chosen": True,
        "world_size": 2,
        "torch": "2.11",
        "device": "H100",
        "clock": "CUDA events",
        "optimizer": "AdamW",
        "profiled_steps": (17, 19),
        "unprofiled_s": (0.010, 0.012, None),
        "after_s": (0.008,),
        "profiled_s": (profiled, 2 * profiled, profiled),
        "start_s": 0.02,
        "write_s": 0.3,
    }
    return WatchedRank(schema=1, rank=number, pid=number, **(facts | changes))


def test_the_cost_is_the_ratio_of_the_medians() -> None:
    row = rank(0).row
    assert (row["unprofiled_s"], row["unprofiled_min_s"], row["unprofiled_max_s"]) == (
        0.010,
        0.008,
        0.012,
    )
    assert (row["unprofiled_steps"], row["profiled_steps"]) == (3, 3)
    assert row["ratio"] == pytest.approx(1.7)
    assert not row["ranges_overlap"]
    lines = list(cost_lines([rank(0), rank(1, profiled=0.011)]))
    assert lines[2].split("  ")[-1] == "1.700"
    assert lines[3].endswith("1.100, ranges overlap")
    assert "20 ms to start the profiler and 300 ms to write the trace" in lines[4]
    assert "contain up to 7 ms per step that the profiler adds" in lines[5]


def test_small_costs_add_nothing_to_figures() -> None:
    assert not any("contain up to" in line for line in cost_lines([rank(0, profiled=0.0101)]))


def test_a_rank_without_a_profile_has_no_cost() -> None:
    missing = rank(1, trace=None, profiled_steps=None, reason="the job ended")
    lines = list(cost_lines([rank(0), missing]))
    assert lines[3].split("  ")[-1].strip() == "-"
    assert "waits in collectives" in lines[-1]
    text = "\n".join(job_lines([rank(0), missing]))
    assert "2 ranks on 1 host; torch 2.11 on H100" in text
    assert "profiled: steps 17 to 19 of rank 0" in text
    assert "not profiled: rank 1: the job ended" in text


def test_what_is_not_known_is_said() -> None:
    assert "no process of the job has loaded torch" in next(job_lines([]))
    failed = (
        "no process of the job reported torch before it ended (exit code 2); a signal leaves "
        "no time to report"
    )
    assert list(job_lines([], 2)) == [failed]
    idle = WatchedRank(schema=1, rank=0, host="a", pid=3, reason="no optimizer step was seen")
    assert "no optimizer step was seen" in next(job_lines([idle]))
    assert list(cost_lines([idle])) == []
    text = "\n".join(job_lines([rank(0), rank(0, profiled_steps=(20, 22), host="b")]))
    assert "no step was seen of rank 1" in text
    assert "2 hosts" in text
    assert "cannot be compared step by step" in text
