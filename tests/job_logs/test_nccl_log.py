"""A log says the same however it was written, cut or mixed; and what it says is right."""

import dataclasses
import gzip
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepmark.cases.message import Histogram
from stepmark.findings.log_facts import LogFacts, Occurrences
from stepmark.job_logs.nccl_log import lines as log_lines
from stepmark.job_logs.nccl_log import read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose
from stepmark.model.collectives import Collective, num_parts

from .nccl_lines import DATA, FSDP8, SIZES, Issued, api_call, coll, facts_of, fsdp8_lines, start

QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = {
    "AllReduce": Collective.ALL_REDUCE,
    "AllGather": Collective.ALL_GATHER,
    "ReduceScatter": Collective.REDUCE_SCATTER,
    "Broadcast": Collective.BROADCAST,
    "Reduce": Collective.REDUCE,
    "AlltoAll": Collective.ALL_TO_ALL,
    "Gather": Collective.GATHER,
    "Scatter": Collective.SCATTER,
}
CALLS = st.builds(
    Issued,
    name=st.sampled_from([*NAMES, "Send", "Recv"]),
    count=st.integers(0, 2**40),
    datatype=st.sampled_from(sorted(SIZES)),
    op=st.integers(0, 6),
    root=st.integers(0, 1),
)
COLLECTIVES = CALLS.filter(lambda call: call.name not in ("Send", "Recv"))


def said(facts: LogFacts) -> dict[str, object]:
    """All facts but where they stand."""

    def plain(value: object) -> object:
        if isinstance(value, Occurrences):
            return (value.lines, value.processes)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return tuple(plain(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [one.name for one in dataclasses.fields(value)]
            hidden = ("evidence", "started", "destroyed", "file")
            return {name: plain(getattr(value, name)) for name in names if name not in hidden}
        return value

    skipped = ("files", "num_lines")
    names = [one.name for one in dataclasses.fields(facts) if one.name not in skipped]
    return {name: plain(getattr(facts, name)) for name in names}


@pytest.mark.parametrize("num_bytes", [60, 333, 4096, 100_000])
def test_blocks_do_not_matter(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_log(FSDP8[:2])
    wrapped = [read_log([path]) for path in sorted(DATA.glob("*.txt"))]
    monkeypatch.setattr(log_lines, "BLOCK_BYTES", num_bytes)
    assert read_log(FSDP8[:2]) == whole
    assert [read_log([path]) for path in sorted(DATA.glob("*.txt"))] == wrapped


@pytest.mark.parametrize("seed", range(6))
def test_one_file_of_mixed_ranks_says_what_eight_files_say(seed: int) -> None:
    rng = random.Random(seed)
    files = fsdp8_lines()[:3]
    queue = [index for index, lines in enumerate(files) for _ in lines]
    rng.shuffle(queue)
    rest = [iter(lines) for lines in files]
    mixed = facts_of([next(rest[index]) for index in queue])
    apart = read_log(FSDP8[:3])
    assert mixed.messages == apart.messages
    assert sorted(mixed.processes) == sorted(apart.processes)
    assert {(t.kind, t.source, t.target, t.channels) for t in mixed.transports} == {
        (t.kind, t.source, t.target, t.channels) for t in apart.transports
    }
    assert mixed.mismatches == apart.mismatches == ()


@pytest.mark.parametrize(
    "dressed",
    [
        "{}\r",
        "[2025-01-01 00:00:00] {}",
        "[2025-01-01 00:00:00.123456] {}",
        "2025-01-01T00:00:00.5Z {}",
        "[1,0]<stdout>:{}",
        "[rank0]:{}",
        "[default3]:{}",
        "(RayTrainWorker pid=615, ip=10.72.7.6) {}",
        "  0: {}",
    ],
)
def test_what_others_add_to_a_line_does_not_matter(dressed: str) -> None:
    lines = fsdp8_lines()[0]
    assert said(facts_of([dressed.format(line) for line in lines])) == said(read_log(FSDP8[:1]))


def test_time_stamps_that_change_do_not_matter() -> None:
    plain = fsdp8_lines()[0]
    stamped = [f"[2025-01-01 00:00:{i % 60:02}] {line}" for i, line in enumerate(plain)]
    assert said(facts_of(stamped)) == said(facts_of(plain))


def test_gzip_does_not_matter(tmp_path: Path) -> None:
    plain = tmp_path / "plain.log"
    plain.write_bytes(gzip.decompress(FSDP8[0].read_bytes()))
    assert said(read_log([plain])) == said(read_log(FSDP8[:1]))


def counted(calls: Sequence[Issued], num_ranks: int) -> Counter[tuple[str, int, int | None]]:
    """What the histogram must hold, counted the slow way."""
    found: Counter[tuple[str, int, int | None]] = Counter()
    for call in calls:
        size = call.count * SIZES[call.datatype]
        known = NAMES.get(call.name)
        total = size * num_parts(known, num_ranks) if known else size
        found[known.value if known else call.name.lower(), size, total] += 1
    return found


def tallied(messages: Histogram) -> Counter[tuple[str, int, int | None]]:
    found: Counter[tuple[str, int, int | None]] = Counter()
    for kind, tally in messages.items():
        found[kind.collective, kind.call_bytes, kind.message_bytes] += tally.calls
    return found


@QUICK
@given(st.lists(CALLS, min_size=1, max_size=40), st.integers(1, 9), st.booleans())
def test_every_call_is_counted_once(calls: list[Issued], num_ranks: int, rccl: bool) -> None:
    lines = [
        coll(0, call, op_count=index, num_ranks=num_ranks, rccl=rccl)
        for index, call in enumerate(calls)
    ]
    facts = facts_of(lines)
    assert tallied(facts.messages) == counted(calls, num_ranks)
    assert {kind.num_ranks for kind in facts.messages} == {num_ranks}
    assert facts.unread_calls == facts.rounded_calls == 0


@QUICK
@given(st.lists(CALLS, min_size=1, max_size=40), st.integers(1, 9))
def test_api_traces_count_the_same(calls: list[Issued], num_ranks: int) -> None:
    traced = [api_call(0, call) for call in calls]
    assert tallied(facts_of(traced, num_ranks=num_ranks).messages) == counted(calls, num_ranks)
    both = [
        line for call, api in zip(calls, traced, strict=True) for line in (coll(0, call), api)
    ]
    assert tallied(facts_of(both).messages) == counted(calls, 2)


@QUICK
@given(st.data(), st.lists(COLLECTIVES, min_size=1, max_size=30), st.integers(2, 4))
def test_a_changed_call_is_found_where_it_is(
    data: st.DataObject, calls: list[Issued], num_ranks: int
) -> None:
    rank = data.draw(st.integers(0, num_ranks - 1))
    position = data.draw(st.integers(0, len(calls) - 1))
    issued = [list(calls) for _ in range(num_ranks)]
    lines = [line for r in range(num_ranks) for line in start(r, num_ranks=num_ranks)]
    same = lines + [coll(r, c, num_ranks=num_ranks) for c in calls for r in range(num_ranks)]
    assert not facts_of(same).mismatches
    assert not facts_of(same).behind
    old = issued[rank][position]
    issued[rank][position] = dataclasses.replace(old, count=old.count + 1)
    lines += [coll(r, c, num_ranks=num_ranks) for r in range(num_ranks) for c in issued[r]]
    (found,) = facts_of(lines).mismatches
    assert (found.position, found.communicator, found.certain) == (position, "0xabc0", True)
    assert sum(map(len, found.issuers)) == num_ranks
    odd = found.sides if num_ranks == 2 else found.sides[-1:]
    assert rank in {side.rank for side in odd}
    for side in found.sides:
        assert side.evidence.text == lines[side.evidence.line - 1]


@QUICK
@given(st.lists(COLLECTIVES, min_size=2, max_size=30), st.data())
def test_a_rank_that_stops_is_behind(calls: list[Issued], data: st.DataObject) -> None:
    issued = data.draw(st.integers(0, len(calls) - 1))
    # Another communicator shows that the rank does log its calls.
    lines = [line for r in (0, 1) for c in (0, 1) for line in start(r, comm=c)]
    lines += [coll(r, Issued(), comm=1) for r in (0, 1)]
    lines += [coll(0, call) for call in calls] + [coll(1, call) for call in calls[:issued]]
    facts = facts_of(lines)
    (found,) = facts.behind
    assert (found.rank, found.issued, found.most) == (1, issued, len(calls))
    assert (found.last is None) == (issued == 0)
    assert lines[found.missing.evidence.line - 1] == coll(0, calls[issued])
    assert facts.mismatches == ()


def test_sends_and_receives_are_not_compared() -> None:
    lines = [*start(0), *start(1)]
    lines += [coll(0, Issued("Send", root=1)), coll(1, Issued("Recv", root=0))]
    lines += [coll(r, Issued()) for r in (0, 1)]
    facts = facts_of(lines)
    assert not facts.mismatches
    assert not facts.behind
    kinds = {kind.collective: tally.calls for kind, tally in facts.messages.items()}
    assert kinds == {"send": 1, "recv": 1, "all_reduce": 2}


def test_a_pointer_that_comes_back_is_another_communicator() -> None:
    second = [line.replace("0xabc0", "0xdef0") for r in (0, 1) for line in start(r)]
    first = [line for r in (0, 1) for line in start(r)]
    lines = [*first, coll(0, Issued()), coll(1, Issued()), *second]
    lines += [coll(r, Issued(count=5)) for r in (0, 1)]
    facts = facts_of(lines)
    assert {one.key for one in facts.communicators} == {"0xabc0", "0xdef0"}
    assert {(kind.group, kind.call_bytes) for kind in facts.messages} == {
        ("0xabc0", 4096),
        ("0xdef0", 20),
    }
    assert facts.mismatches == ()


def test_no_comparison_where_lines_are_missing() -> None:
    lines = [*start(0), *start(1), coll(0, Issued(count=1)), coll(1, Issued(count=2))]
    assert facts_of(lines).mismatches
    cut = coll(1, Issued())[:120]
    assert not facts_of([*lines, cut]).mismatches
    lost = coll(1, Issued(), comm=7).split(" NCCL INFO ")[1]
    assert not facts_of([*lines, lost]).mismatches
    later = [*start(0), *start(1), coll(0, Issued(count=1), op_count=3), lines[-1]]
    assert not facts_of(later).mismatches


def test_sizes_beyond_memory_are_rounded_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "MAX_KINDS", 10)
    lines = [coll(0, Issued("Send", count=1000 + index)) for index in range(200)]
    facts = facts_of(lines)
    assert sum(tally.calls for tally in facts.messages.values()) == 200
    assert len(facts.messages) <= 12
    assert facts.rounded_calls == 190
    (finding,) = (one for one in diagnose(facts) if one.rule == "rounded-sizes")
    assert finding.text.startswith("190 calls are counted at the next power of two")
