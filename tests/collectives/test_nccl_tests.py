"""Our table is read by whatever reads nccl-tests': same tokens, same bytes."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from tests.tables.records import RUN_ID

from stepmark.cases.record import Record, RunInfo, Skipped
from stepmark.collectives.comm_columns import rows
from stepmark.collectives.comm_remarks import straggler
from stepmark.collectives.nccl_tests import NA_HALF, float_text, output_lines
from stepmark.collectives.peer_formats import json_document
from stepmark.ground.dtypes import parse_dtype
from stepmark.model.collectives import Api, Collective, Mode
from stepmark.tables.columns import Row
from stepmark.tables.table import fitted

from .comm_records import (
    NUM_RANKS,
    comm_case,
    comm_device,
    comm_measured,
    comm_run,
    flat,
    full_comm_run,
    nvlink_time,
    pair_times,
    sweep,
)

DATA = Path(__file__).parents[1] / "data" / "nccl-tests"
REAL = {"all_reduce": "8xH200-all_reduce.txt", "all_to_all": "8xH200-alltoall.txt"}
NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]\d+)?|N/A)"
HALF = rf"\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}"
LINE = re.compile(rf"^\s+(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+){HALF}{HALF}$")


def data_lines(text: str) -> list[str]:
    """Every line without a # must be a row: nothing else may stand there."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def parsed(text: str) -> list[tuple[str, ...]]:
    found = []
    for line in data_lines(text):
        match = LINE.match(line)
        assert match, line
        assert len(line.split()) == 13
        found.append(match.groups())
    return found


def text_of(rows: Sequence[Row], run: RunInfo) -> str:
    return "\n".join(output_lines(rows, run)) + "\n"


def table(records: Sequence[Record]) -> list[Row]:
    return rows(records, comm_run(), comm_device())


def rows_of_real(name: str, text: str) -> list[Row]:
    """Rows with the printed numbers of a real output, in place of measured ones."""
    found: list[Row] = []
    for size, count, dtype, redop, root, *numbers in parsed(text):
        for in_place in (False, True):
            time, algbw, busbw, wrong = numbers[4:] if in_place else numbers[:4]
            more = {"in_place": in_place, "dtype": parse_dtype(dtype)}
            case = comm_case(Collective(name), int(size), **more)  # type: ignore[arg-type]
            assert (case.count, case.redop, case.root) == (int(count), redop, int(root))
            (row,) = table([flat(case, float(time) * 1e-6, checked=wrong != "N/A")])
            # Rates of the unrounded time, as there; ours from the rounded one are near.
            for key, shown in (("algbw_gb_s", algbw), ("busbw_gb_s", busbw)):
                assert row[key] == pytest.approx(float(shown), rel=1e-4, abs=0.00501)
            rates = {"algbw_gb_s": float(algbw), "busbw_gb_s": float(busbw)}
            found.append(row | rates)
    return found


@pytest.mark.parametrize("name", REAL)
def test_real_numbers_come_out_byte_for_byte(name: str) -> None:
    real = (DATA / REAL[name]).read_text()
    ours = text_of(rows_of_real(name, real), comm_run())
    assert data_lines(ours) == data_lines(real)
    heads = [line for line in real.splitlines() if re.match(r"#  {5}", line)]
    assert len(heads) == 3
    assert [line for line in ours.splitlines() if re.match(r"#  {5}", line)] == heads
    for start in ("# Collective test", "# Out of bounds", "# Avg bus"):
        lines = [line for line in real.splitlines() if line.startswith(start)]
        printed = [line for line in ours.splitlines() if line.startswith(start)]
        # The mean is of unrounded rates there.
        assert [line[:27] for line in printed] == [line[:27] for line in lines]
    assert real.splitlines()[-2:] == ours.splitlines()[-2:]


@pytest.mark.parametrize("width", [45, 60, 80, 100])
def test_a_narrow_terminal_has_every_figure_beside_its_size(width: int) -> None:
    real = (DATA / REAL["all_reduce"]).read_text()
    rows = rows_of_real("all_reduce", real)
    lines = [*fitted(output_lines(rows, comm_run(), head_per_table=True), width)]
    data = [line for line in lines if line and not line.startswith("#")]
    assert max(map(len, data)) <= width
    shown: dict[str, list[str]] = {}
    for size, *cells in (line.split() for line in data):
        shown.setdefault(size, []).extend(cells)
    for size, *cells in parsed(real):
        assert Counter(shown[size]) == Counter(cells)


def test_the_parameter_line_is_read_from_the_rows() -> None:
    real = (DATA / REAL["all_reduce"]).read_text()
    ours = text_of(rows_of_real("all_reduce", real), comm_run()).splitlines()
    sample = real.splitlines()
    assert not ours[0].startswith("# nccl-tests")
    names = re.compile(r"-?\d+")
    assert names.sub("N", ours[2]) == names.sub("N", sample[2])
    assert "minBytes 1024 maxBytes 4294967296 step: 4(factor)" in ours[2]
    rank = re.compile(r"^#  Rank {2}\d Group  0 Pid .{6} on .{10} device {2}\d \[\S+\] \S")
    assert sum(1 for line in sample if rank.match(line)) == NUM_RANKS
    assert sum(1 for line in ours if rank.match(line)) == NUM_RANKS


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (85.6, "  85.60"),
        (9999.99, "9999.99"),
        (20567.93, "20567.9"),
        (123456.7, " 123457"),
        (12345678.0, "1.2e+07"),
    ],
)
def test_times_lose_decimals_before_digits(value: float, shown: str) -> None:
    assert float_text(value, 7) == shown


def test_rates_have_six_characters() -> None:
    assert [float_text(v, 6) for v in (0.014, 365.43, 1234.56, 123456.0, 1234567.0)] == [
        "  0.01",
        "365.43",
        "1234.6",
        "123456",
        " 1e+06",
    ]


def test_every_data_line_of_ours_parses() -> None:
    text = text_of(table(full_comm_run()), comm_run())
    found = parsed(text)
    assert len(found) > 100
    starts = re.findall(r"^# Collective test starting: (\S+)$", text, re.MULTILINE)
    ends = re.findall(r"^# Collective test concluded: (\S+)$", text, re.MULTILINE)
    assert starts == ends
    assert {"all_reduce_perf", "alltoall_perf", "p2p_perf", "barrier_perf"} <= set(starts)


def test_one_half_alone_leaves_the_other_na() -> None:
    records: list[Record] = [
        flat(comm_case(size=2**20), 1e-4),
        flat(comm_case(size=2**22, in_place=True), 1e-4),
    ]
    first, second = data_lines(text_of(table(records), comm_run()))
    assert first.endswith(NA_HALF)
    assert len(first) == len(second)
    assert NA_HALF in second
    unchecked = flat(comm_case(size=2**22), 1e-4, checked=False)
    (line,) = data_lines(text_of(table([unchecked]), comm_run()))
    assert line.endswith("    N/A" + NA_HALF)


def test_wrong_data_fails_and_a_gap_has_its_reason() -> None:
    case = comm_case(size=2**20)
    gap = Skipped(run_id=RUN_ID, case=comm_case(size=2**30), reason="needs 9 GiB")
    text = text_of(table([flat(case, 1e-4, num_wrong=3), gap]), comm_run())
    assert "# Out of bounds values : 1 FAILED" in text
    assert f"# {2**30} out-of-place skipped: needs 9 GiB" in text
    assert parsed(text)[0][8] == "3"


def test_the_rank_that_is_waited_for_is_named_if_it_costs() -> None:
    late = [[20e-6] * 8] * 7 + [[14e-6] * 8]
    even = [[20e-6] * 8] * 8
    cases = [comm_case(size=2**power) for power in (10, 12, 14)]
    (line,) = straggler(table([comm_measured(cases[0], late), flat(cases[1], 20e-6)]))
    assert (
        line == "slowest rank: 7, which delays the others in 1 of 2 sizes by up to 6 us "
        "(30 % of the time at 1 KiB)"
    )
    # Five samples, in all of which rank 1 of 2 is the faster: luck gives that.
    lucky = comm_case(size=2**10, num_ranks=2, world_size=2)
    few = comm_measured(lucky, [[20e-6] * 5, [14e-6] * 5])
    assert straggler(table([few])) == ["slowest rank: none that delays the others"]
    many = comm_measured(lucky, [[20e-6] * 12, [14e-6] * 12])
    assert straggler(table([many]))[0].startswith(
        "slowest rank: 1, which delays the others in 1 of 1 sizes"
    )
    assert straggler(table([comm_measured(case, even) for case in cases])) == [
        "slowest rank: none that delays the others"
    ]
    one_of_four = [comm_measured(cases[0], late), *(flat(case, 2e-5) for case in cases[1:])]
    one_of_four.append(flat(comm_case(size=2**16), 2e-5))
    assert straggler(table(one_of_four)) == ["slowest rank: none that delays the others"]
    sent = comm_case(Collective.SENDRECV, size=2**12)
    assert straggler(table([comm_measured(sent, late)])) == []


def test_fit_lines_find_the_protocol_switch() -> None:
    text = text_of(table(sweep(Collective.ALL_REDUCE, Random(1))), comm_run())
    found = re.findall(r"^# fit out-of-place, (\S+ \S+) to (\S+ \S+):", text, re.MULTILINE)
    assert found == [("1 KiB", "256 KiB"), ("1 MiB", "4 GiB")]
    alone = text_of(table([flat(comm_case(), nvlink_time(2**26))]), comm_run())
    assert "# fit out-of-place: none, it needs 3 sizes" in alone


def test_ways_of_calling_do_not_share_a_table() -> None:
    records: list[Record] = [
        flat(comm_case(), 1e-4),
        flat(comm_case(mode=Mode.GRAPH), 1e-4),
        flat(comm_case(num_ranks=4, world_size=8), 1e-4),
        flat(comm_case(num_ranks=4, world_size=8, split="mod 2"), 1e-4),
    ]
    blocks = text_of(table(records), comm_run()).split("# stepmark ")[1:]
    ranks = [
        re.findall(r"^#  Rank +(\d+) Group +(\d+)", block, re.MULTILINE) for block in blocks
    ]
    assert [len(found) for found in ranks] == [8, 8, 4, 8]
    assert [int(group) for _, group in ranks[3]] == [0, 1] * 4
    assert "graph: 8" in blocks[1]


@pytest.mark.parametrize(
    ("api", "methods", "words"),
    [
        (Api.NCCL, ("queued-compiled/1",), "; a compiled loop issues the calls; "),
        (Api.NCCL, ("queued/1",), "; Python issues the calls, which takes the host longer "),
        (Api.NCCL, ("queued-compiled/1", "queued/1"), "; Python issues the calls"),
        (Api.NCCL, ("queued-ahead/1",), ""),
        (Api.TORCH, ("queued/1",), ""),
    ],
)
def test_the_head_says_what_issued_queued_calls(
    api: Api, methods: tuple[str, ...], words: str
) -> None:
    records: list[Record] = []
    for launch, method in enumerate(methods, 1):
        record = flat(comm_case(api=api, mode=Mode.QUEUED), 1e-4, launch=launch)
        records.append(replace(record, samples=replace(record.samples, method=method)))
    (line,) = [
        line
        for line in output_lines(table(records), comm_run())
        if line.startswith("# mode queued")
    ]
    assert words in line
    assert ("issues" in line) == bool(words)


def test_pairs_share_one_header() -> None:
    text = text_of(table(pair_times(Random(2))), comm_run())
    assert text.count("Collective test starting") == 2
    assert text.count("pair 3 -> 5") == 2


def test_json_has_the_schema_of_nccl_tests() -> None:
    run = comm_run(NCCL_DEBUG="WARN")
    records: list[Record] = [flat(comm_case(), 1e-4), flat(comm_case(in_place=True), 2e-4)]
    document = json_document(table(records), run, ["stepmark", "comm"])
    document = json.loads(json.dumps(document, allow_nan=False))
    assert document["version"] == 3
    assert document["nccl_version"] == 22809
    assert document["start_time"] == "2025-01-01 00:00:00"
    assert document["env"] == ["NCCL_DEBUG=WARN"]
    assert document["config"]["blocking_collectives"] == "false"
    assert len(document["config"]["devices"]) == NUM_RANKS
    assert set(document["config"]["devices"][0]) == {
        *("rank", "group", "pid", "hostname", "device", "device_hex", "device_info")
    }
    (result,) = document["results"]
    assert (result["type"], result["redop"], result["root"]) == ("bfloat16", "sum", "    -1")
    assert result["out_of_place"]["time"] == pytest.approx(100)
    assert result["in_place"]["time"] == pytest.approx(200)
    assert result["out_of_place"]["nwrong"] == 0
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert document["average_bus_bandwidth"]["okay"] == "unchecked"


def test_json_has_every_number_of_thread_blocks() -> None:
    records: list[Record] = [flat(comm_case(max_ctas=ctas), 1e-4 / ctas) for ctas in (1, 4)]
    results = json_document(table(records), comm_run(), [])["results"]
    assert isinstance(results, list)
    times = [result["out_of_place"]["time"] for result in results]
    assert times == pytest.approx([100, 25])


def test_json_of_everything_is_json() -> None:
    table_ = table(full_comm_run())
    document = json_document(table_, comm_run(), [], ended_at="2025-01-01T00:01:00Z")
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text)["end_time"] == "2025-01-01 00:01:00"
    halves = [
        result[key] for result in document["results"] for key in ("out_of_place", "in_place")
    ]  # type: ignore[attr-defined]
    ran = [row for row in table_ if row["time_s"]]
    assert sum(half is not None for half in halves) == len(ran)
    assert json_document([], comm_run(), [])["results"] == []


def test_an_unknown_nccl_is_not_version_0() -> None:
    run = comm_run()
    bare = replace(run, environment=replace(run.environment, versions={}))
    assert json_document([], bare, [])["nccl_version"] is None
