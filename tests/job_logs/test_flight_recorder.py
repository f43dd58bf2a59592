"""Flight recorder: every version reads alike, sizes obey nccl-tests, mismatches and hangs."""

import gzip
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.message import Histogram
from stepmark.findings.finding import Finding, Severity
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import ranks_text
from stepmark.job_logs.flight_recorder import (
    looks_like_flight_recorder,
    parse,
    read_dump,
    read_flight_recorder,
    restricted_pickle,
)
from stepmark.job_logs.flight_recorder.findings import findings
from stepmark.job_logs.flight_recorder.groups import progress
from stepmark.job_logs.flight_recorder.operations import histogram_of, message_kind
from stepmark.job_logs.nccl_log import read_log
from stepmark.model.collectives import Collective, num_parts

from .flight_samples import SAMPLE, as_json, as_old, dump, entry, transfer, write

LOGS = SAMPLE.parent / "nccl-logs"
REAL = sorted(SAMPLE.glob("*.gz"))


def found(folder: Path, dumps: dict[int, dict[str, Any]]) -> list[Finding]:
    return findings(read_flight_recorder(write(folder, dumps)))


def rules(held: list[Finding], severity: Severity = Severity.PROBLEM) -> list[str]:
    return [one.rule for one in held if one.severity is severity]


def by_size(histogram: Histogram) -> Counter[tuple[str, str, int, int | None]]:
    """Calls per rank, whatever group and phase."""
    counts: Counter[tuple[str, str, int, int | None]] = Counter()
    for kind, tally in histogram.items():
        assert tally.calls % tally.ranks == 0
        key = (kind.collective, kind.dtype, kind.call_bytes, kind.message_bytes)
        counts[key] += tally.calls // tally.ranks
    return counts


# Laws


def test_real_dumps_and_nccl_log_of_one_job_count_the_same() -> None:
    # Two programs wrote them: torch its calls, NCCL what reached it.
    flight = by_size(histogram_of(read_flight_recorder(REAL))[0])
    assert flight == by_size(read_log(sorted(LOGS.rglob("*.gz"))).messages)
    assert sum(flight.values()) == 260
    assert sum(n for key, n in flight.items() if key[0] == "all_gather") == 170
    assert sum(n for key, n in flight.items() if key[0] == "reduce_scatter") == 90


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "collective"),
    [
        ("all_reduce", 64, 64, "all_reduce"),
        ("broadcast", 64, 64, "broadcast"),
        ("reduce", 64, 64, "reduce"),
        ("_all_gather_base", 64, "n", "all_gather"),
        ("all_gather", 64, "n", "all_gather"),
        ("_reduce_scatter_base", "n", 64, "reduce_scatter"),
        ("all_to_all", "n", "n", "all_to_all"),
        ("gather", 64, "n", "gather"),
        ("gather", 64, None, "gather"),
        ("scatter", "n", 64, "scatter"),
        ("scatter", None, 64, "scatter"),
    ],
)
def test_message_is_the_count_times_the_parts(
    name: str, inputs: Any, outputs: Any, collective: str, ranks: int
) -> None:
    def shape(value: Any) -> Any:
        return () if value is None else ((64 * ranks if value == "n" else value,),)

    held = parse(
        pickle.dumps(dump([entry(1, name, shape(inputs), shape(outputs))], ranks)), "file"
    )
    (operation,) = held.operations
    kind = message_kind(operation, held.group_of(operation))
    assert not isinstance(kind, str)
    assert (kind.collective, kind.num_ranks) == (collective, ranks)
    assert kind.call_bytes == 64 * 4
    assert kind.message_bytes == num_parts(Collective(collective), ranks) * kind.call_bytes


def test_all_versions_of_the_format_say_the_same(tmp_path: Path) -> None:
    whole = dump(
        [
            entry(1),
            entry(2, "_all_gather_base", ((8,),), ((16,),)),
            transfer(1, "send 0->1", record_id=2),
            entry(3, "broadcast", state="scheduled", record_id=3),
        ],
        pg_status={"0": {"last_enqueued_collective": 3, "last_completed_collective": 2}},
    )
    plain = parse(pickle.dumps(whole), "x")
    text = parse(json.dumps(as_json(whole)).encode(), "x")
    old = parse(pickle.dumps(as_old(whole), protocol=2), "x")
    assert plain.watchdog_completed == text.watchdog_completed == {"0": 2}
    assert plain.groups == text.groups
    assert old.groups["0"].ranks == (0, 1)
    for one, other, ancient in zip(
        plain.operations, text.operations, old.operations, strict=True
    ):
        for key in ("kind", "sequence", "is_p2p", "inputs", "outputs", "state", "group"):
            assert getattr(one, key) == getattr(other, key) == getattr(ancient, key), key
    packed = tmp_path / "dump_rank12.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(as_json(whole)).encode()))
    assert read_dump(packed).rank == 12
    assert read_dump(packed).operations == text.operations


def test_equal_ranks_have_no_problem(tmp_path: Path) -> None:
    same = [entry(1), entry(2, "broadcast"), entry(3, "_reduce_scatter_base", ((8,),), ((4,),))]
    held = found(tmp_path, {0: dump(same), 1: dump(same)})
    assert held == []


# Mismatches and hangs


@pytest.mark.parametrize(
    "other",
    [
        entry(2, "all_gather", ((1024,),), ((2048,),)),
        entry(2, inputs=((512,),)),
        entry(2) | {"input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"]},
    ],
    ids=["name", "size", "dtype"],
)
def test_first_disagreement_is_named_with_both_sides(tmp_path: Path, other: Any) -> None:
    # Later disagreements may only follow from the first: they are counted.
    three = {
        0: dump([entry(1), entry(2), entry(3)], 3),
        1: dump([entry(1), other, entry(3, "broadcast")], 3),
        2: dump([entry(1), entry(2), entry(3)], 3),
    }
    held = found(tmp_path, three)
    assert rules(held) == ["call-mismatch"]
    assert "2 collectives from 2 to 3 of group 0 default_pg (first rank 1:" in held[0].text
    assert "Rank 1 differs from all others" in held[0].text
    assert "ranks 0, 2: all_reduce of 1024 Float" in held[0].text
    assert [proof.file[-1] for proof in held[0].evidence] == ["1", "0"]
    assert "train.py:7" in held[0].evidence[0].text


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("all_reduce", (((2, 3),), None), (((3, 2),), None)),  # NCCL sees six elements
        ("all_to_all", (((8,),), ((4,),)), (((4,),), ((8,),))),
        ("gather", (((8,),), ((2, 8),)), (((8,),), ())),
        ("scatter", (((2, 8),), ((8,),)), ((), ((8,),))),
    ],
)
def test_what_may_differ_by_rank_is_no_mismatch(
    tmp_path: Path, name: str, left: Any, right: Any
) -> None:
    dumps = {0: dump([entry(1, name, *left)]), 1: dump([entry(1, name, *right)])}
    assert rules(found(tmp_path, dumps)) == []


def test_a_rank_that_did_not_come(tmp_path: Path) -> None:
    waits = entry(3) | {"state": "scheduled"}
    dumps = {
        0: dump([entry(1), entry(2), waits], 4),
        1: dump([entry(1), entry(2)], 4),
        2: dump([entry(1), entry(2), waits], 4),
    }
    held = found(tmp_path, dumps)
    assert rules(held) == ["failure-missing-rank"]
    assert "collective 3" in held[0].text
    assert held[0].text.startswith("Rank 1 did not join a call")
    assert "It waits for no other rank and is the cause" in held[0].text
    assert "ranks 0, 2 wait (scheduled: it may have started unrecorded)" in held[0].text
    assert "victims: ranks 0, 2" in held[0].text
    assert rules(held, Severity.NOTE) == ["fr-limits", "fr-missing-dump"]
    assert "unless a later dump shows the same calls" in held[1].text
    assert "rank 3" in held[-1].text


def test_all_came_and_none_is_through(tmp_path: Path) -> None:
    waits = entry(2) | {"state": "started"}
    held = found(tmp_path, {rank: dump([entry(1), waits]) for rank in range(2)})
    assert rules(held) == ["failure-not-completed"]
    assert "every member has issued it, so no rank is missing" in held[0].text


def test_a_state_found_late_is_no_problem(tmp_path: Path) -> None:
    # gloo's own dumps look so at the end of a good job: the last barrier of one rank.
    dumps = {0: dump([entry(1)]), 1: dump([entry(1) | {"state": "scheduled"}])}
    held = found(tmp_path, dumps)
    assert rules(held) == []
    assert rules(held, Severity.WARNING) == ["failure-not-completed"]


def test_a_rank_behind_with_everything_completed_is_no_hang(tmp_path: Path) -> None:
    # A broadcast's root goes on alone; dumps are not of one moment.
    dumps = {0: dump([entry(1), entry(2, "broadcast")]), 1: dump([entry(1)])}
    assert rules(found(tmp_path, dumps)) == []


def test_groups_of_one_name_and_other_ranks_are_two(tmp_path: Path) -> None:
    # torch's split_group names disjoint groups alike.
    def with_group(rank: int, name: str) -> dict[str, Any]:
        ranks = "[0, 1]" if rank < 2 else "[2, 3]"
        group = {"0": {"name": "0", "desc": "tp", "ranks": ranks}}
        return dump([entry(1, name)], pg_config=group)

    dumps = {rank: with_group(rank, "reduce" if rank < 2 else "broadcast") for rank in range(4)}
    assert found(tmp_path, dumps) == []


def test_a_wrapped_buffer_says_so_and_is_still_compared(tmp_path: Path) -> None:
    late = [entry(number) for number in range(101, 105)]
    dumps = {0: dump(late), 1: dump([entry(102), entry(103, "broadcast")])}
    held = found(tmp_path, dumps)
    assert rules(held) == ["call-mismatch"]
    assert "collective 103" in held[0].text
    assert rules(held, Severity.WARNING) == ["fr-wrapped"]
    assert "up to 101 operations" in held[1].text


def test_pairs(tmp_path: Path) -> None:
    good = {
        0: dump([transfer(1, "send 0->1"), transfer(2, "send 0->1", 8)]),
        1: dump([transfer(1, "recv 1<-0"), transfer(2, "recv 1<-0", 8)]),
    }
    assert found(tmp_path, good) == []
    good[1]["entries"][1] |= {"output_sizes": [[9]]}
    held = found(tmp_path, good)
    assert rules(held) == ["call-mismatch"]
    assert "transfer 2 from rank 0 to rank 1 of group 0 default_pg" in held[0].text
    assert "sent as 8 Float, received as 9 Float" in held[0].text
    good[1]["entries"].pop()
    good[0]["entries"][1] |= {"state": "scheduled"}
    held = found(tmp_path, good)
    assert rules(held) == ["failure-missing-rank"]
    assert "rank 1 has not issued transfer 2 from rank 0 to rank 1" in held[0].text
    assert "in which rank 0 waits" in held[0].text


def test_parts_of_a_coalesced_group_have_its_state(tmp_path: Path) -> None:
    # torch never updates the parts: only the group's entry completes.
    def batch(state: str) -> list[dict[str, Any]]:
        parts = [transfer(1, "send 0->1"), transfer(1, "recv 0<-1")]
        marker = transfer(1, "coalesced", is_p2p=True, input_sizes=[], output_sizes=[])
        return [
            *({**part, "state": "scheduled"} for part in parts),
            {**marker, "state": state},
        ]

    held = parse(pickle.dumps(dump(batch("completed"))), "x")
    assert [one.state for one in held.operations] == ["completed"] * 3
    messages, uncounted = histogram_of(
        read_flight_recorder(write(tmp_path, {0: dump(batch("completed"))}))
    )
    assert {kind.collective: tally.calls for kind, tally in messages.items()} == {
        "send": 1,
        "recv": 1,
    }
    assert uncounted == {}


def test_a_group_gives_its_state_to_its_own_parts_only() -> None:
    before = entry(1) | {"state": "scheduled"}
    part = entry(2) | {"state": "scheduled"}
    marker = entry(2, "coalesced", inputs=())
    held = parse(pickle.dumps(dump([before, part, marker])), "x")
    assert [one.state for one in held.operations] == ["scheduled", "completed", "completed"]


def test_transfers_of_a_wrapped_buffer_are_not_paired(tmp_path: Path) -> None:
    # The first receive left may belong to any send.
    dumps = {
        0: dump([transfer(1, "send 0->1"), transfer(2, "send 0->1", 8, record_id=1)]),
        1: dump([transfer(2, "recv 1<-0", 8, record_id=1)]),
    }
    assert rules(found(tmp_path, dumps)) == []
    dumps[1]["entries"][0]["record_id"] = 0
    assert rules(found(tmp_path, dumps)) == ["call-mismatch"]


def test_a_coalesced_group_without_parts_is_counted_as_unknown(tmp_path: Path) -> None:
    marker = entry(1, "coalesced", inputs=())
    messages, uncounted = histogram_of(
        read_flight_recorder(write(tmp_path, {0: dump([marker])}))
    )
    assert messages == {}
    assert uncounted == {"coalesced groups whose parts are not in the dump": 1}


# Examples


def test_phase_is_told_only_where_it_is_proven() -> None:
    def phase(thread: Any, *names: str, file: str = "torch/x.py") -> str:
        frames = [{"name": name, "filename": file, "line": 1} for name in names]
        one = entry(1, thread_name=thread, frames=frames)
        return parse(pickle.dumps(dump([one])), "x").operations[0].phase

    assert phase("pt_autograd_0") == "backward"
    assert phase("python", "all_reduce", "pre_forward", "forward") == "forward"
    # Checkpointing runs the forward hooks in the backward pass.
    assert phase("python", "pre_forward", "unpack_hook") == "backward"
    assert phase("python", "step", file="torch/optim/adam.py") == "optimizer"
    assert phase("python", "all_reduce", "main") == ""
    assert phase(None) == ""


def test_real_phases() -> None:
    phases: Counter[tuple[str, str]] = Counter()
    for kind, tally in histogram_of(read_flight_recorder(REAL))[0].items():
        phases[kind.collective, kind.phase] += tally.calls // tally.ranks
    assert phases == {
        ("all_gather", "forward"): 90,
        ("all_gather", "backward"): 80,
        ("reduce_scatter", "backward"): 90,
    }


def test_real_findings_and_progress() -> None:
    dumps = read_flight_recorder(REAL)
    assert [one.rule for one in findings(dumps)] == ["fr-missing-dump", "fr-status-lags"]
    lines = progress(dumps)
    assert [one.last_completed for one in lines] == [260] * 4
    assert [one.watchdog_completed for one in lines] == [258, 257, 253, 234]


def test_durations_are_seconds(tmp_path: Path) -> None:
    entries = [entry(1, duration_ms=2.5), entry(2, duration_ms=0.0), entry(3)]
    dumps = read_flight_recorder(write(tmp_path, {0: dump(entries)}))
    (tally,) = histogram_of(dumps)[0].values()
    assert (tally.calls, tally.timed_calls, tally.seconds) == (3, 1, 0.0025)


def test_what_is_not_counted_is_said(tmp_path: Path) -> None:
    entries = [entry(1, "split"), entry(2) | {"input_dtypes": [], "output_dtypes": []}]
    _, uncounted = histogram_of(read_flight_recorder(write(tmp_path, {0: dump(entries)})))
    assert uncounted == {
        "operations of kind split": 1,
        "operations without sizes or types": 1,
    }


def test_ranks_text() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5]) == "ranks 0-2, 5"


# Bad input


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("value", [os.system, Counter("a"), Path("x"), 3 + 4j])
def test_a_pickle_with_a_class_is_refused_by_name(value: Any, protocol: int) -> None:
    with pytest.raises(ConfigError, match="nothing was run") as caught:
        restricted_pickle.load(pickle.dumps({"entries": value}, protocol=protocol), "x")
    assert caught.value.field == "pickle"


def test_a_pickle_that_runs_code_runs_none(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {mark}",)

    path = tmp_path / "rank0"
    path.write_bytes(pickle.dumps(dump([entry(1, frames=Evil())])))
    with pytest.raises(ConfigError, match=r"posix\.system"):
        read_dump(path)
    assert not mark.exists()


def doubled(twice: Callable[[object], object]) -> object:
    """Return a value that holds another twice, which holds another twice, 40 times over."""
    value: object = 1
    for _ in range(40):
        value = twice(value)
    return value


def test_frames_that_entries_share_are_read() -> None:
    frames = [{"name": f"f{number}", "filename": "a.py", "line": 1} for number in range(60)]
    document = {"entries": [{"id": number, "frames": frames[:]} for number in range(5000)]}
    assert restricted_pickle.load(pickle.dumps(document), "x") == document


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02N" + b"r\xff\xff\xff\x7f" + b".",  # a memo of 2**31 places
        pickle.dumps(1 << 100_000),
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04" + b"(" * 100_000 + b".",
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        pickle.dumps({"entries": [{"pg_id": doubled(lambda one: {"a": one, "b": one})}]}),
        pickle.dumps({"entries": [{"pg_id": doubled(lambda one: (one, one))}]}),
        # The hash of a key visits each of the values that its tuples share.
        b"\x80\x04}K\x01K\x02\x86\x94"
        + b"".join(b"h%ch%c\x86\x94" % (number, number) for number in range(40))
        + b"Ns.",
    ],
    ids=["memo", "integer", "bytes", "marks", "depth", "dicts", "tuples", "key"],
)
def test_pickle_bombs(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse(data, "x")


def test_a_large_memo_index_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigError, match="memo index 2147483647 after 2 opcodes"):
        restricted_pickle.load(b"\x80\x02Nr\xff\xff\xff\x7f.", "x")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_plain_values_pass_unchanged(value: Any) -> None:
    fits = "L" not in str(value) and len(repr(value)) < 10_000
    if fits:
        assert restricted_pickle.load(pickle.dumps(value), "x") == value


@given(st.dictionaries(st.sampled_from(sorted(entry(1))), values), values)
def test_any_value_in_any_field(fields: dict[str, Any], other: Any) -> None:
    held = dump([entry(1), {**entry(2), **fields}])
    for changed in (held, {**held, "pg_config": other}, {**held, "pg_status": {"0": other}}):
        found_one = parse(pickle.dumps(changed), "x", rank=0)
        findings([found_one])
        progress([found_one])


def test_mutated_dumps_never_break_the_reader() -> None:
    generator = random.Random(11)
    whole = dump([entry(1), transfer(1, "send 0->1"), entry(2, "coalesced", inputs=())])
    real = gzip.decompress(REAL[0].read_bytes())[:6000]
    seeds = [pickle.dumps(whole), pickle.dumps(as_old(whole), protocol=0), real]
    seeds.append(json.dumps(as_json(whole)).encode())
    refused = 0
    for _ in range(2400):
        data = bytearray(generator.choice(seeds))
        for _ in range(generator.randint(1, 6)):
            place = generator.randrange(len(data))
            data[place] = generator.choice((generator.randrange(256), data[place] ^ 1, 46))
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        try:
            found_one = parse(bytes(data), "x", rank=0)
            findings([found_one, parse(seeds[0], "y", rank=1)])
        except ConfigError:
            refused += 1
    assert 0 < refused < 2400


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "this one is empty"),
        (b"\x1f\x8b\x08\x00", "complete gzip"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-9], "complete gzip"),
        (b"{", "whole dump"),
        (b"[1]", "mapping with entries"),
        (b'{"entries": 3}', "list of at most"),
        (b'{"entries": [3]}', "entry 0 is int"),
        (b"\x80\x04.", "whole pickle"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        read_dump(path)
    assert "\n" not in str(caught.value)


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, {0: dump([entry(1)])})
    other = tmp_path / "later_rank_0"
    other.write_bytes(paths[0].read_bytes())
    with pytest.raises(ConfigError, match="one dump of rank 0"):
        read_flight_recorder([*paths, other])
    nameless = tmp_path / "nameless"
    nameless.write_bytes(paths[0].read_bytes())
    with pytest.raises(ConfigError, match="ends in the rank"):
        read_flight_recorder([*paths, nameless])
    assert read_flight_recorder([nameless])[0].rank is None


def test_what_looks_like_a_dump() -> None:
    assert looks_like_flight_recorder(gzip.decompress(REAL[0].read_bytes())[:100])
    assert looks_like_flight_recorder(json.dumps(as_json(dump([entry(1)]))).encode()[:300])
    assert not looks_like_flight_recorder(b"vm:1:1 [0] NCCL INFO x")
    assert not looks_like_flight_recorder(b'{"traceEvents": []}')
    assert not looks_like_flight_recorder(b"")


def test_a_profiler_trace_is_no_dump_although_it_has_groups() -> None:
    head = b'{"schemaVersion": 1, "distributedInfo": {"pg_config": [{"pg_name": "0"}]}'
    assert not looks_like_flight_recorder(head)
    assert looks_like_flight_recorder(b'{"version": "2.9", "pg_config": {}, "entries": []}')
