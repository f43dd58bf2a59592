"""RAS reports: each statement with its sides; what RAS does not list is unknown or computed.

The texts follow src/ras/client_support.cc of NCCL, https://github.com/NVIDIA/nccl/issues/1911,
1730 and 1762, and the pages on RAS in NCCL's documentation.
"""

import contextlib
import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.job_logs.ras_report import (
    RasReport,
    RasStatement,
    looks_like_ras,
    read_ras,
)

DATA = Path(__file__).parents[1] / "data" / "ras"
COUNTS = (DATA / "count-mismatch.txt").read_text()
SEVERAL = (DATA / "several.txt").read_text()
JSON = (DATA / "mismatch.json").read_text()
TABLE = """
Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
HEALTHY = f"""NCCL version 2.26.2 compiled with CUDA 12.4
CUDA runtime version 12040, driver version 12040

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
     32          8            1        256      256
{TABLE}\
    0         1        32         8       256       256   RUNNING      OK

Errors
======

Warnings
========

"""


def report(text: str) -> RasReport:
    assert looks_like_ras(text.encode())
    (only,) = read_ras(text, "ras.txt")
    return only


def mismatch(rows: str, statements: str, errors: str = "") -> RasReport:
    return report(
        f"{TABLE}{rows}\nErrors\n======\n\n{errors}Warnings\n========\n\n{statements}\n"
    )


Summary = tuple[str, str, list[tuple[int | str, int, tuple[int, ...]]]]


def summary(statement: RasStatement) -> Summary:
    """Return kind, subject, and value, count and ranks of each side."""
    sides = [(side.value, side.count, side.ranks) for side in statement.sides]
    return statement.kind, statement.subject, sides


def test_a_healthy_report() -> None:
    healthy = report(HEALTHY)
    assert healthy.is_ok
    assert healthy.is_whole
    assert healthy.version == "2.26.2"
    assert healthy.totals == (32, 256, 256)
    (row,) = healthy.groups
    assert (row.number, row.num_communicators, row.size, row.num_ranks) == (0, 1, 256, 256)
    assert (row.status, row.errors, row.evidence.line) == ("RUNNING", (), 16)


def test_counts_that_differ() -> None:
    counts = report(COUNTS)
    assert counts.is_whole
    assert not counts.is_ok
    (statement,) = counts.statements
    assert (statement.kind, statement.subject, statement.size) == ("MISMATCH", "AllGather", 32)
    assert (statement.hash, statement.group) == ("fa93daea854b060b", 0)
    assert statement.evidence.line == 25
    behind, ahead = statement.sides
    assert (ahead.value, ahead.ranks) == (641, (12, 13))
    assert [(p.pid, p.node, p.gpus) for p in ahead.processes] == [
        (323032, "10.0.0.2", "4"),
        (323033, "10.0.0.2", "5"),
    ]
    others = tuple(rank for rank in range(32) if rank not in (12, 13))
    assert (behind.value, behind.ranks) == (640, others)
    assert behind.evidence.text == "30 ranks have launched up to operation 640"


def test_several_communicators_and_all_kinds() -> None:
    several = report(SEVERAL)
    assert several.is_whole
    assert several.totals == (3, 18, 18)
    assert [row.errors for row in several.groups] == [
        ("INCOMPLETE", "ERROR", "MISMATCH"),
        (),
        ("MISMATCH",),
    ]
    of_job = [summary(s) for s in several.statements if s.group is None]
    assert of_job == [
        ("INCOMPLETE", "data", [("missing", 1, ())]),
        ("DEAD", "data", [("DEAD", 2, ())]),
        ("TIMEOUT", "data", [("TIMEOUT", 2, ())]),
    ]
    missing, dead = several.statements[:2]
    assert missing.sides[0].processes[0].gpus == "5 (NVML 1)"
    (process,) = dead.sides[0].processes  # RAS has no information on the other one
    assert (process.pid, process.node, process.gpus) == (700, "10.0.0.3", "0,1")
    running = tuple(rank for rank in range(16) if rank not in (0, 13))  # 13 sent no data
    launched = tuple(rank for rank in range(16) if rank not in (3, 13))
    assert [summary(s) for s in several.statements if s.group == 0] == [
        ("INCOMPLETE", "data", [("missing", 1, (13,))]),
        ("ERROR", "initialization", [("Unhandled CUDA error", 1, (2,))]),
        (
            "ERROR",
            "asynchronous",
            [("Remote process error", 2, (4, 5)), ("System error", 1, (7,))],
        ),
        ("MISMATCH", "status", [("RUNNING", 14, running), ("ABORT", 1, (0,))]),
        ("MISMATCH", "Broadcast", [(5, 14, launched), (0, 1, (3,))]),
        ("MISMATCH", "AllReduce", [(6650, 8, ()), (6649, 7, ())]),  # neither side is listed
    ]
    assert [(s.hash, summary(s)) for s in several.statements if s.group == 2] == [
        (
            "27a079b828ff1a75",
            (
                "MISMATCH",
                "status",
                [("RUNNING", 2, (2, 3)), ("FINALIZE", 1, (1,)), ("NOCOMM", 1, (0,))],
            ),
        ),
        ("9e17999afaa87dbb", ("MISMATCH", "AllGather", [(9, 3, (0, 1, 3)), (8, 1, (2,))])),
    ]


def test_the_words_of_the_first_version() -> None:
    """NCCL 2.24 lists ranks by number, and counts all collectives together."""
    old = mismatch(
        "    0     1     4       1-2         8         6  FINALIZE  INCOMPLETE,MISMATCH\n",
        "#0-0 (9e17999afaa87dbb) MISMATCH\n"
        "  Communicator ranks have different status\n"
        "  4 ranks have status RUNNING\n"
        "  2 ranks have status UNKNOWN\n"
        "  The unknown ranks: 2,6\n"
        "  Communicator ranks have different collective operation counts\n"
        "  3 ranks have launched up to operation 12\n"
        "  Rank 0 has launched up to operation 0 -- [process information not found]\n",
        "#0-0 (9e17999afaa87dbb) INCOMPLETE\n"
        "  Missing communicator data from 2 ranks\n"
        "  The missing ranks: 1,5\n\n",
    )
    assert [summary(statement) for statement in old.statements] == [
        ("INCOMPLETE", "data", [("missing", 2, (1, 5))]),
        ("MISMATCH", "status", [("RUNNING", 4, (0, 3, 4, 7)), ("UNKNOWN", 2, (2, 6))]),
        ("MISMATCH", "collective", [(12, 3, (3, 4, 7)), (0, 1, (0,))]),
    ]
    assert old.is_whole


def test_one_unknown_rank_of_the_first_version() -> None:
    old = mismatch(
        "    0         1         1         2         2         1   RUNNING  MISMATCH\n",
        "#0-0 (9e17999afaa87dbb) MISMATCH\n"
        "  Communicator ranks have different status\n"
        "  Rank 1 has status UNKNOWN\n"
        "  Rank 0 has status RUNNING -- GPU 0 managed by process 5 on node 10.0.0.1\n",
    )
    assert [side.ranks for side in old.statements[0].sides] == [(1,), (0,)]
    assert old.is_whole


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        ("Rank 7 -- GPU 0 managed by process 60004 on node 10.0.0.1\n", ()),  # of 2 ranks
        ("Rank 1057455228 -- [process information not found]\n", ()),
        ("Rank 1 -- [process information not found]\n", (1,)),
    ],
)
def test_ranks_that_do_not_exist_are_unknown(lines: str, ranks: tuple[int, ...]) -> None:
    """NCCL 2.27.3 printed memory that it had not set."""
    odd = mismatch(
        "    0         1         1         1         2         1   RUNNING  INCOMPLETE\n",
        "",
        "#0-0 (93d7000200000001) INCOMPLETE\n  Missing communicator data from 1 rank\n  "
        + lines,
    )
    assert odd.statements[0].sides[0].ranks == ranks


def test_no_communicators() -> None:
    text = HEALTHY.replace(HEALTHY[HEALTHY.index("Group ") : HEALTHY.index("Errors\n===")], "")
    with pytest.raises(ConfigError, match="RAS report with communicators"):
        read_ras(text.replace("Errors\n=", "No communicator data collected!\n\nErrors\n="), "a")


def test_several_queries_in_a_file() -> None:
    later = COUNTS.replace("640", "650").replace("641", "651")
    reports = read_ras(f"$ ncclras\n{HEALTHY}Mon\n$ ncclras\n{COUNTS}\n{later}", "a.txt")
    assert [each.is_ok for each in reports] == [True, False, False]
    assert [each.statements[0].sides[1].value for each in reports[1:]] == [641, 651]
    headless = COUNTS[COUNTS.index("Job summary") :]
    assert len(read_ras(headless + headless, "a.txt")) == 2
    assert len(read_ras(TABLE + HEALTHY, "a.txt")) == 2
    table = HEALTHY[HEALTHY.index("Group ") :]
    assert [len(each.groups) for each in read_ras(table + table, "a.txt")] == [1, 1]


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,0]<stdout>:",
        "[1,0]<stdout>: ",
        "0: ",
        "2026-06-03T17:48:01.005Z ",
        "[rank0]: ",
        "\t",
    ],
)
@pytest.mark.parametrize("text", [COUNTS, SEVERAL, HEALTHY])
def test_prefixes_of_launchers(prefix: str, text: str) -> None:
    tagged = "".join(f"{prefix}{line}\n" for line in text.splitlines())
    plain, marked = report(text), report("user@node:~$ ncclras -v\n" + tagged)
    assert marked.totals == plain.totals
    assert marked.is_whole
    assert [summary(s) for s in marked.statements] == [summary(s) for s in plain.statements]
    assert [r.errors for r in marked.groups] == [r.errors for r in plain.groups]


@pytest.mark.parametrize("text", [COUNTS, SEVERAL, HEALTHY])
def test_line_ends_and_tabs(text: str) -> None:
    odd = text.replace("  ", "\t").replace("\n", "\r\n")
    assert report(odd).is_whole
    assert [summary(s) for s in report(odd).statements] == [
        summary(s) for s in report(text).statements
    ]


def test_lines_of_a_log_around_and_inside() -> None:
    log = "[rank118]:[E603 ProcessGroupNCCL.cpp:632] [Rank 118] Watchdog caught a timeout\n"
    text = log * 3 + COUNTS.replace("Warnings\n", log + "Warnings\n") + log * 3
    assert report(text).statements[0].evidence.line == 29
    assert report(text).is_whole


def facts(reports: tuple[RasReport, ...]) -> set[object]:
    """Return what reports state, without places of processes, which a cut may end."""
    return {
        (statement.hash, statement.subject, side.value, side.count, rank)
        for each in reports
        for statement in each.statements
        for side in statement.sides
        for rank in (None, *side.ranks)
    } | {(row.number, row.status, row.errors) for each in reports for row in each.groups}


@pytest.mark.parametrize("text", [COUNTS, SEVERAL, HEALTHY, JSON])
def test_a_report_cut_anywhere_states_nothing_else(text: str) -> None:
    whole = facts(read_ras(text, "a"))
    num_whole = 0
    for end in range(len(text)):
        try:
            cut = read_ras(text[:end], "a")
        except ConfigError:
            continue
        assert facts(cut) <= whole, text[:end][-80:]
        if cut[-1].is_whole:
            num_whole += 1
            assert len(cut[-1].statements) == len(read_ras(text, "a")[0].statements)
    assert num_whole <= 70  # within the last line, which names the node


def test_a_lost_line_is_not_taken_as_whole() -> None:
    lines = SEVERAL.splitlines(keepends=True)
    numbers = [n for n, line in enumerate(lines) if "ranks have" in line and "diff" not in line]
    assert len(numbers) > 5
    for number in numbers:
        text = "".join(lines[:number] + lines[number + 1 :])
        assert not report(text).is_whole, lines[number]


def test_mixed_output_of_two_clients_names_no_ranks() -> None:
    doubled = "".join(line * 2 for line in COUNTS.splitlines(keepends=True))
    assert all(not each.is_whole for each in read_ras(doubled, "a"))
    assert all(
        not side.ranks
        for each in read_ras(doubled, "a")
        for statement in each.statements
        for side in statement.sides
    )


def test_json_with_every_kind() -> None:
    (one,) = read_ras(JSON, "ras.json")
    assert looks_like_ras(JSON.encode())
    assert one.version == "2.29.1"
    assert one.is_whole
    assert not one.is_ok
    (row,) = one.groups
    assert (row.size, row.num_ranks, row.status) == (5, 3, "ABORT")
    assert row.errors == ("INCOMPLETE", "ERROR", "MISMATCH")
    assert [summary(statement) for statement in one.statements] == [
        ("INCOMPLETE", "data", [("DEAD", 1, (3,))]),
        ("ERROR", "asynchronous", [("Remote process error", 1, (1,))]),
        (
            "MISMATCH",
            "status",
            [("RUNNING", 2, (0, 2)), ("NOCOMM", 1, (4,)), ("ABORT", 1, (1,))],
        ),
        ("MISMATCH", "AllReduce", [(41, 2, (0, 1)), (42, 1, (2,))]),
        ("TIMEOUT", "data", [("TIMEOUT", 1, ())]),
    ]
    first = one.statements[0]
    assert (first.hash, first.size, first.evidence.line) == ("0ae94423cfbb2ef4", 5, 9)
    assert [s.sides[0].processes[0].node for s in one.statements[:2]] == [
        "10.0.0.2",
        "10.0.0.1",
    ]
    assert one.statements[1].sides[0].processes[0].gpus == "0 (NVML 3)"
    unknown = one.statements[2].sides[1].processes[0]
    assert (unknown.pid, unknown.node) == (None, "")


def healthy_json() -> dict[str, object]:
    document = json.loads(JSON)
    communicator = document["communicators"][0]
    communicator["ranks"] = [communicator["ranks"][0], communicator["ranks"][0] | {"rank": 1}]
    communicator |= {"missing_ranks": [], "size": 2, "ranks_count": 2, "missing_ranks_count": 0}
    document["ras"]["timeouts_count"] = 0
    return document  # type: ignore[no-any-return]


@pytest.mark.parametrize("indent", [None, 2])
def test_healthy_json(indent: int | None) -> None:
    text = json.dumps(healthy_json(), indent=indent)
    assert report(text).is_ok
    assert report(f"$ ncclras -f json\nOK\n{text}\n$ ").is_ok
    assert report(json.dumps(healthy_json(), sort_keys=True)).is_ok
    assert [each.is_ok for each in read_ras(f"{text}\n{JSON}", "a.json")] == [True, False]
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines())
    assert report(tagged).is_ok
    assert report(tagged).groups[0].status == "RUNNING"


def test_json_without_status() -> None:
    """NCCL 2.29.7 writes null while a communicator is set up: not healthy, not failed."""
    document = healthy_json()
    document["communicators"][0]["ranks"][1]["status"] = None  # type: ignore[index]
    one = report(json.dumps(document))
    assert not one.is_whole
    assert not one.is_ok
    assert one.statements == []


def test_json_whose_last_document_is_cut() -> None:
    reports = read_ras(json.dumps(healthy_json()) + "\n" + JSON[:900], "a")
    assert [each.is_whole for each in reports] == [True, False]
    with pytest.raises(ConfigError, match="ends before them"):
        read_ras(JSON[:900], "a")


@pytest.mark.parametrize(
    "text",
    [
        '{"nccl_version": ' + "[" * 100_000,
        '{"nccl_version": ' + "9" * 100_000 + "}",
        '{"nccl_version": {}, "communicators": 5}',
        '{"nccl_version": {}, "communicators": [5, {"ranks": 3}], "ras": []}',
        '{"nccl_version": 1, "communicators": [{"ranks": [{"status": 1}]}]}',
        '{"nccl_version": 1, "communicators": [{"ranks": [{"collective_counts": 2}]}]}',
        '["nccl_version", "communicators"]',
    ],
)
def test_odd_json_is_read_or_refused(text: str) -> None:
    assert looks_like_ras(text.encode()) or "communicators" not in text
    with contextlib.suppress(ConfigError):
        assert not any(each.is_ok for each in read_ras(text, "a"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NCCL version 2.26.2+cuda12.6\n",
        '{"comm_lib_version": "2.26", "entries": []}',
        '{"nccl_version": "2.26.2", "config": {}}',
        "Group  Comms\n#0-0 MISMATCH\n",
    ],
)
def test_other_files(text: str) -> None:
    assert not looks_like_ras(text.encode())
    with pytest.raises(ConfigError, match="it must be a RAS report"):
        read_ras(text, "other.txt")


@given(st.integers(0, len(SEVERAL)), st.integers(0, 60), st.text(max_size=40))
def test_damage_never_breaks_the_reader(start: int, length: int, other: str) -> None:
    text = SEVERAL[:start] + other + SEVERAL[start + length :]
    try:
        reports = read_ras(text, "a")
    except ConfigError:
        return
    assert not any(each.is_ok for each in reports)


@pytest.mark.parametrize(
    "unit",
    [
        "".join(random.Random(1).choices("abc #0-9(){}:,RankGPU", k=79)) + "\n",
        "Rank 1 -- GPU managed by process 1 on nod\n",
        "1 " * 500,
        "{",
        '{"nccl_version"',
        "\n",
    ],
)
def test_ten_megabytes_of_nonsense(unit: str) -> None:
    text = "NCCL version 2.26.2 compiled with CUDA 12.6\n" + unit * (10_000_000 // len(unit))
    start = time.process_time()
    with pytest.raises(ConfigError):
        read_ras(text, "a")
    assert time.process_time() - start < 4  # under 1 s on an idle core


STATUSES = ("NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT")
FLAGS = {"FINALIZE": "finalize_called", "ABORT": "abort_flag"}
# Of each rank: None without data, else its status, and operations of two collectives.
RANKS = st.none() | st.tuples(st.sampled_from(STATUSES), st.integers(0, 2), st.integers(0, 1))
Communicator = list[tuple[str, int, int] | None]


def rank_lines(ranks: dict[int | str, list[int]], size: int, *, verbose: bool) -> str:
    """Return lines of the text format: all sides, and the ranks of small ones."""
    words = {0: "not launched any operations", 1: "launched up to operation 1"}
    words |= {2: "launched up to operation 2"}
    lines = ""
    for value, members in sorted(ranks.items(), key=lambda side: -len(side[1])):
        word = f"status {value}" if isinstance(value, str) else words[value]
        count = len(members)
        place = "GPU 0 managed by process 5 on node 10.0.0.1"
        if count == 1:
            lines += f"  Rank {members[0]} has {word} -- {place}\n"
            continue
        lines += f"  {count} ranks have {word}\n"
        if count < size / 2 if verbose else count <= min(10, size / 4):
            lines += "".join(f"  Rank {rank} -- {place}\n" for rank in members)
    return lines


def as_text(communicators: list[Communicator], *, verbose: bool) -> str:
    rows = errors = warnings = ""
    for number, ranks in enumerate(communicators):
        head = f"#{number}-0 ({number:016x})"
        missing = [rank for rank, data in enumerate(ranks) if data is None]
        sides: list[dict[int | str, list[int]]] = [{}, {}, {}]  # status and two collectives
        for rank, data in enumerate(ranks):
            if data is not None:
                sides[0].setdefault(data[0], []).append(rank)
            if data is not None and data[0] != "NOCOMM":
                sides[1].setdefault(data[1], []).append(rank)
                sides[2].setdefault(data[2], []).append(rank)
        kinds = []
        if missing:
            kinds.append("INCOMPLETE")
            errors += (
                f"{head} INCOMPLETE\n  Missing communicator data from {len(missing)} ranks\n"
            )
            if len(missing) <= 10 or verbose:
                errors += "".join(f"  Rank {rank} -- [not found]\n" for rank in missing)
            errors += "\n"
        if any(len(side) > 1 for side in sides):
            kinds.append("MISMATCH")
            warnings += f"{head} MISMATCH\n"
        names = ("status", "Reduce operation counts", "X operation counts")
        for side, name in zip(sides, names, strict=True):
            if len(side) > 1:
                warnings += f"  Communicator ranks have different {name}\n"
                warnings += rank_lines(side, len(ranks), verbose=verbose) + "\n"
        status = next((word for word in reversed(STATUSES) if word in sides[0]), "NOCOMM")
        rows += f"{number:5} 1 1 1 {len(ranks)} 0 {status} {','.join(kinds) or 'OK'}\n"
    return f"{TABLE}{rows}\nErrors\n======\n\n{errors}Warnings\n========\n\n{warnings}"


def as_json(communicators: list[Communicator]) -> str:
    documents = []
    for number, ranks in enumerate(communicators):
        missing: list[object] = []
        present: list[object] = []
        for rank, data in enumerate(ranks):
            place = {"rank": rank, "host": "10.0.0.1", "pid": 5, "cuda_dev": 0, "nvml_dev": 0}
            if data is None or data[0] == "NOCOMM":
                missing.append(place | {"status": {"unresponsive": data is None}})
                continue
            status: dict[str, object] = {"init_state": 7 if data[0] == "INIT" else 0}
            status |= {FLAGS[data[0]]: True} if data[0] in FLAGS else {}
            counts = {"Reduce": data[1], "X": data[2]}
            present.append(place | {"status": status, "collective_counts": counts})
        document = {"hash": f"0x{number:x}", "size": len(ranks)}
        documents.append(document | {"ranks": present, "missing_ranks": missing})
    fields = {"nccl_version": "2.28.7", "communicators_count": len(documents)}
    return json.dumps(fields | {"communicators": documents}, indent=2)


@given(
    st.lists(st.lists(RANKS, min_size=2, max_size=40), min_size=1, max_size=3), st.booleans()
)
def test_text_says_what_json_says(communicators: list[Communicator], verbose: bool) -> None:
    """The text lists fewer ranks; those that are listed or computed are the right ones."""
    text = report(as_text(communicators, verbose=verbose))
    (full,) = read_ras(as_json(communicators), "ras.json")
    assert text.is_whole
    assert full.is_whole
    truth = {
        (statement.hash, statement.subject, side.value): side.ranks
        for statement in full.statements
        for side in statement.sides
    }
    ranks = {
        (statement.hash, statement.subject, side.value): side.ranks or side.count
        for statement in text.statements
        for side in statement.sides
    }
    assert ranks.keys() == truth.keys()
    assert all(ranks[key] in (truth[key], len(truth[key])) for key in truth)
    assert [row.status for row in text.groups if row.status != "NOCOMM"] == [
        row.status for row in full.groups if row.status not in ("NOCOMM", "")
    ]
    assert [row.errors for row in text.groups] == [row.errors for row in full.groups]
