"""Inspector lines: sizes of one rank's part, clocks apart, what the lines say they lack."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.findings.finding import Severity
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.inspector import InspectorFacts, looks_like_inspector, read_inspector
from stepmark.model.collectives import Collective, busbw_factor

METADATA = {
    "inspector_output_format_version": "v4.0",
    "dump_timestamp_us": 1,
    "hostname": "node1",
    "pid": 10,
}


def header(rank: int = 0, n_ranks: int = 8) -> dict[str, Any]:
    named = {"id": "0xa", "comm_name": "unknown", "rank": rank, "n_ranks": n_ranks, "nnodes": 1}
    return {"header": named, "metadata": METADATA | {"pid": 10 + rank}}


def operation(coll: str = "AllReduce", size: int = 2**20, us: int = 100, **more: Any) -> Any:
    prefix = "p2p" if coll in ("Send", "Recv") else "coll"
    return {
        f"{prefix}_perf": {
            prefix: coll,
            f"{prefix}_sn": 1,
            f"{prefix}_msg_size_bytes": size,
            f"{prefix}_exec_time_us": us,
            f"{prefix}_timing_source": "kernel_gpu",
            **more,
        }
    }


def read(folder: Path, *records: Any, name: str = "a.log") -> InspectorFacts:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_inspector([path])


@pytest.mark.parametrize(
    ("coll", "size", "us", "busbw"),
    [
        # Figures of the plugin's own README, printed there as coll_busbw_gbs.
        ("ReduceScatter", 2147483648, 41057, 366.134533),
        ("AllReduce", 17179869184, 61974, 485.119099),
    ],
)
def test_busbw_is_the_one_that_the_inspector_prints(
    tmp_path: Path, coll: str, size: int, us: int, busbw: float
) -> None:
    facts = read(tmp_path, header() | operation(coll, size, us))
    ((kind, tally),) = facts.histogram.items()
    assert kind.message_bytes is not None
    factor = busbw_factor(Collective(kind.collective), 8)
    assert kind.message_bytes * factor / tally.seconds / 1e9 == pytest.approx(busbw, rel=1e-8)


@pytest.mark.parametrize(
    ("coll", "parts"),
    [
        *(("AllReduce", 1), ("Broadcast", 1), ("Reduce", 1), ("Send", 1), ("Recv", 1)),
        *(("AllGather", 8), ("ReduceScatter", 8), ("AlltoAll", 8)),
    ],
)
def test_sizes_are_of_one_ranks_part(tmp_path: Path, coll: str, parts: int) -> None:
    (kind,) = read(tmp_path, header() | operation(coll, 4096)).histogram
    assert (kind.call_bytes, kind.message_bytes) == (4096, 4096 * parts)


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    # From 4.3 on only the dump's first line has the communicator.
    operations = [operation(size=2**power) for power in (13, 20)]
    old = read(tmp_path, *(header(3) | one for one in operations), name="old")
    marker = header(3) | {"dump_stats": {"coll_records": 2}}
    new = read(tmp_path, marker, *operations, name="new")
    assert old.histogram == new.histogram
    assert {kind.num_ranks for kind in new.histogram} == {8}


def test_every_operation_counts_once_whatever_the_files(tmp_path: Path) -> None:
    records = [header(rank) | operation(size=2**16 * (1 + rank % 2)) for rank in range(8)]
    whole = read(tmp_path, *records, name="whole")
    paths = []
    for rank, record in enumerate(records):
        path = tmp_path / f"part{rank}.gz"
        path.write_bytes(gzip.compress(json.dumps(record).encode()))
        paths.append(path)
    parts = read_inspector(paths)
    assert parts.histogram == whole.histogram
    assert whole.num_ranks_seen == parts.num_ranks_seen == 8
    assert sum(tally.calls for tally in whole.histogram.values()) == 8
    assert [tally.ranks for tally in whole.histogram.values()] == [4, 4]


def test_ranks_of_one_process_are_all_counted(tmp_path: Path) -> None:
    records = [header(rank) | operation() for rank in range(8)]
    for record in records:
        record["metadata"] = METADATA
    facts = read(tmp_path, *records * 3)
    assert facts.num_ranks_seen == 8
    # A group of two numbers its ranks from 0 again: they are no further ranks.
    small = [header(rank, 2) | operation() for rank in range(2)]
    for record in small:
        record |= {"metadata": METADATA, "header": record["header"] | {"id": "0xb"}}
    assert read(tmp_path, *records, *small).num_ranks_seen == 8


def test_times_of_two_clocks_are_not_added(tmp_path: Path) -> None:
    host = operation(us=900, coll_timing_source="kernel_cpu")
    facts = read(tmp_path, header() | operation(), header() | host)
    (tally,) = facts.histogram.values()
    assert (tally.calls, tally.timed_calls, tally.seconds) == (2, 1, 100e-6)
    assert facts.timing_sources == {"kernel_gpu": 1, "kernel_cpu": 1}
    assert "inspector-host-clock" in [one.rule for one in facts.findings]
    (alone,) = read(tmp_path, header() | host).histogram.values()
    assert alone.timed_calls == 1


def test_a_time_of_zero_is_unknown(tmp_path: Path) -> None:
    (tally,) = read(tmp_path, header() | operation(us=0)).histogram.values()
    assert (tally.calls, tally.timed_calls) == (1, 0)


def test_floor_and_drops_are_said(tmp_path: Path) -> None:
    stats = {"coll_records": 1, "coll_dropped_total": 40, "p2p_dropped_total": 0}
    later = stats | {"coll_dropped_total": 100}  # cumulative: not 140
    facts = read(
        tmp_path,
        header() | {"dump_stats": stats},
        operation(),
        header() | {"dump_stats": later},
    )
    by_rule = {one.rule: one for one in facts.findings}
    assert by_rule["inspector-dropped"].severity is Severity.WARNING
    assert by_rule["inspector-dropped"].text.startswith("100 operations")
    assert by_rule["inspector-dropped"].evidence[0].line == 1
    assert "8192" in by_rule["inspector-floor"].text
    small = read(tmp_path, header() | operation(size=64))
    assert "inspector-floor" not in [one.rule for one in small.findings]


def test_without_a_communicator_the_number_of_ranks_is_unknown(tmp_path: Path) -> None:
    facts = read(tmp_path, operation("AllGather"), operation("AllReduce"))
    sizes = {kind.collective: kind.message_bytes for kind in facts.histogram}
    assert sizes == {"all_gather": None, "all_reduce": 2**20}


def test_odd_lines_are_counted_with_the_first(tmp_path: Path) -> None:
    path = tmp_path / "x"
    good = json.dumps(header() | operation())
    path.write_text(f"{good}\nTraceback\n\n{{}}\n{good[:50]}\n")
    facts = read_inspector([path])
    (odd,) = [one for one in facts.findings if one.rule == "inspector-odd-lines"]
    assert odd.count == 3
    assert (odd.evidence[0].line, odd.evidence[0].text) == (2, "Traceback")


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", '{"header": {}}\n'])
def test_files_without_operations_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConfigError, match="coll_perf"):
        read_inspector([path])


def test_a_cut_gzip_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(json.dumps(header() | operation()).encode() * 99)[:-12])
    with pytest.raises(ConfigError, match="complete gzip"):
        read_inspector([path])


@given(
    st.dictionaries(
        st.sampled_from(sorted(operation()["coll_perf"])),
        st.none() | st.text() | st.integers() | st.floats() | st.lists(st.integers()),
    )
)
def test_any_value_in_any_field(tmp_path_factory: Any, fields: dict[str, Any]) -> None:
    odd = operation()
    odd["coll_perf"] |= fields
    path = tmp_path_factory.mktemp("any") / "x"
    lines = [json.dumps(header() | one) for one in (operation(), odd)]
    path.write_text("\n".join(lines))
    facts = read_inspector([path])
    assert all(tally.seconds >= 0 for tally in facts.histogram.values())


def test_mutated_lines_never_break_the_reader(tmp_path: Path) -> None:
    generator = random.Random(5)
    marker = json.dumps(header() | {"dump_stats": {"coll_dropped_total": 3}})
    lines = [marker, json.dumps(operation()), json.dumps(header() | operation("Send"))]
    whole, path, refused = "\n".join(lines).encode(), tmp_path / "x", 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(generator.randint(1, 12)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(bytes(data))
        try:
            read_inspector([path])
        except ConfigError:
            refused += 1
    assert refused < 2000


def test_what_looks_like_the_inspector() -> None:
    assert looks_like_inspector(json.dumps(header() | operation()).encode())
    assert not looks_like_inspector(b'{"entries": []}')
    assert not looks_like_inspector(b"# nccl-tests")


def test_a_rank_whose_records_end_earlier_is_behind(tmp_path: Path) -> None:
    records = []
    for rank, most in ((0, 9), (1, 7), (2, 9)):
        records.append(header(rank, 3))
        records += [operation(coll_sn=number) for number in range(1, most + 1)]
    found = [one for one in read(tmp_path, *records).findings if one.rule == "behind"]
    assert [one.ranks for one in found] == [(1,)]
    assert "all_reduce 7 of 9 on rank 1" in found[0].text
    assert found[0].evidence[0].line == len(records) - 10
    even = [one for one in records if one.get("coll_perf", {}).get("coll_sn", 0) < 8]
    assert not [one for one in read(tmp_path, *even).findings if one.rule == "behind"]
