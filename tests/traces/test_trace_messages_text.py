"""Messages of traces as rows; the gain of a faster network; another source beside them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.message import Histogram, MessageKind, Tally
from stepmark.findings.histogram import BY, calls_and_bytes, parse_bins
from stepmark.tables.columns import Row, number
from stepmark.traces.trace_messages_text import (
    compared,
    compared_lines,
    copy_rows,
    gain,
    rows,
    verdict,
)


def kind(size: int, collective: str = "all_reduce") -> MessageKind:
    return MessageKind(
        collective=collective,
        dtype="bf16",
        group="0",
        num_ranks=2,
        phase="",
        call_bytes=size,
        message_bytes=size,
    )


SIZES = st.dictionaries(st.integers(1, 2**30), st.integers(1, 50), min_size=1, max_size=12)


@given(SIZES, st.sampled_from(["craypat", "pow2", "exact", "1K,1M"]))
def test_no_binning_loses_a_call_a_byte_or_a_second(sizes: dict[int, int], bins: str) -> None:
    messages: Histogram = {
        kind(size): Tally(calls=2 * n, ranks=2, timed_calls=n, seconds=n * 1e-3)
        for size, n in sizes.items()
    }
    kernels = {each: tally.timed_calls * 3_000_000 for each, tally in messages.items()}
    table = rows(
        *(messages, kernels, ()),
        **{"by": BY, "bins": parse_bins(bins), "num_ranks": 2, "num_rank_steps": 4},
        expected=None,
    )
    calls, num_bytes = calls_and_bytes(messages)
    assert sum(number(row, "calls_per_rank_step") or 0 for row in table) * 4 == calls
    total = sum(number(row, "bytes_per_rank_step") or 0 for row in table) * 4
    assert total == pytest.approx(num_bytes)
    for row in table:
        assert row["latency_s"] == pytest.approx(1e-3)
        assert row["waiting_s"] == pytest.approx(2e-3)
        # all-reduce of two ranks: the factor is 1
        rate = (number(row, "bytes") or 0) / (number(row, "calls") or 1) / 1e-3 / 1e9
        if bins == "exact":
            assert row["busbw_gb_s"] == pytest.approx(rate)


def test_latency_and_waiting_are_unknown_where_a_rank_has_no_trace() -> None:
    messages = {kind(8): Tally(calls=2, ranks=1, timed_calls=2, seconds=1e-3)}
    (row,) = rows(
        *(messages, {kind(8): 1_000_000}, [kind(8)]),
        **{"by": BY, "bins": None, "num_ranks": 1, "num_rank_steps": 1, "expected": None},
    )
    assert [row[name] for name in ("latency_s", "waiting_s", "busbw_gb_s")] == [None] * 3


def test_copies_are_binned_as_perftools_does() -> None:
    table = copy_rows([("HtoD", 8, 2, 10), ("HtoD", 70_000, 4, 1000), ("DtoH", 16, 1, 5)], 2)
    assert [(row["kind"], row["bin"], row["copies_per_rank_step"]) for row in table] == [
        ("DtoH", "16 B<=<256 B", 0.5),
        ("HtoD", "<16 B", 1.0),
        ("HtoD", "64 KiB<=<1 MiB", 2.0),
    ]
    assert table[2]["gb_s"] == 280.0


# A faster network


def rank_row(rank: int, exposed: float, transfer: float, unknown: float) -> Row:
    row: Row = {"rank": rank, "step_s": 1.0, "communication_s": 1.0, "exposed_s": exposed}
    row["arrived_last"] = None
    times = {"transfer_s": transfer, "other_kernels_s": unknown}
    waiting = max(1.0 - transfer - unknown, 0.0)
    return row | times | {"waiting_s": waiting, "exposed_waiting_s": min(waiting, exposed)}


def test_transfers_that_run_at_once_save_as_long_as_one_of_them() -> None:
    (row,) = one(0.5, 0.8, 0.9)
    row["communication_s"] = 0.5
    result = gain([row], 0.5, 0.5)
    assert result is not None
    assert result.seconds == 0.25


TIMES = st.floats(0, 1)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=8), TIMES)
def test_no_rank_gains_more_than_it_exposes_or_saves(
    times: list[tuple[float, float, float]], share: float
) -> None:
    ranks = [rank_row(n, *each) for n, each in enumerate(times)]
    result = gain(ranks, share, share)
    assert result is not None
    for exposed, transfer, unknown in times:
        assert 0 <= result.seconds <= exposed
        assert result.seconds <= (transfer + unknown) * share + 1e-12
    more = gain(ranks, 1.0, 1.0)
    assert more is not None
    assert more.seconds >= result.seconds


def one(exposed: float, transfer: float, unknown: float = 0.0) -> list[Row]:
    return [rank_row(0, exposed, transfer, unknown)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            one(0.95, 0.95),
            "communication-bound: a network without transfer time takes at most 95.0%",
        ),
        (
            one(0.02, 0.5),
            "not communication-bound: a network without transfer time takes at most 2",
        ),
        (
            one(0.6, 0.05),
            "not communication-bound, though much communication is exposed: ranks",
        ),
        (
            one(0.5, 0.4),
            "partly communication-bound (10% to 50% of the step), though most exposed "
            "communication is waiting for others",
        ),
        (one(0.6, 0.0, 0.6), "perhaps communication-bound: a network without transfer time"),
    ],
)
def test_the_verdict_tells_transfer_from_waiting_and_from_what_is_unknown(
    ranks: list[Row], words: str
) -> None:
    assert list(verdict(ranks, ""))[1].startswith(words)


def test_ranks_wait_for_one_another_only_if_timed_calls_show_it() -> None:
    """One rank exposes nothing, so that no network helps; why others expose is not timed."""
    rows = [rank_row(0, 0.6, 0.0, 1.0), rank_row(1, 0.0, 0.0, 1.0)]
    text = "communication-bound: not known, because much communication is exposed"
    assert list(verdict(rows, ""))[1].startswith(text)
    rows[0]["exposed_waiting_s"] = 0.31
    assert "ranks wait for one another" in list(verdict(rows, ""))[1]


def test_the_slow_rank_stands_beside_every_verdict_on_several_ranks() -> None:
    ranks = [rank_row(n, 0.5, 0.9, 0.0) | {"arrived_last": 4 * n} for n in range(2)]
    bound, slow = list(verdict(ranks, ""))[1:]
    assert bound.startswith("communication-bound: ")
    assert slow.startswith("slow rank: rank 1 arrives last in 4 of 4 collectives, and the")


def test_without_work_on_a_gpu_there_is_no_verdict() -> None:
    text = "communication-bound: not known, because no step has times"
    assert next(verdict([], "no step has times")) == text


# Another source


def test_a_log_of_the_whole_job_agrees_if_all_messages_are_there_as_many_times() -> None:
    ours = {kind(8): Tally(calls=4, ranks=2), kind(16): Tally(calls=8, ranks=2)}
    theirs = {
        kind(8): Tally(calls=20, ranks=2),
        kind(16): Tally(calls=40, ranks=2),
        kind(4): Tally(calls=2, ranks=2),
    }
    agreeing = list(compared_lines("log", 2, compared(ours, 4, theirs, 2, "log")))
    assert agreeing == [
        "log (2 files) agrees: 2 of 2 kinds of message are there as often as in 10 steps",
        "  all_reduce of 4 B over 2 ranks: 1 per rank, none in the steps of the traces",
    ]
    theirs[kind(16)] = Tally(calls=38, ranks=2)
    disagreeing = list(compared_lines("log", 1, compared(ours, 4, theirs, 2, "log")))
    assert disagreeing[0].startswith("log (1 file) disagrees: 1 of 2")
    assert disagreeing[1] == (
        "  all_reduce of 16 B over 2 ranks: 19 per rank, where the traces have 2 per step"
    )
    assert "none of the messages" in next(
        compared_lines("log", 1, compared(ours, 4, {}, 2, "log"))
    )
