"""The wait-for graph: what several sources know of one job is joined."""

from pathlib import Path

import pytest

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.stalls import causes
from stepmark.findings.wait_graph import Call, Part, WaitGraph, find_behind, merged
from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.log_sources import collect
from stepmark.job_logs.logs import read_report

DATA = Path(__file__).parents[1] / "data"
LINE = Evidence(file="f", line=1, text="line")


def call(name: str, number: int, waiting: list[int], **more: object) -> Call:
    part = Part("all_reduce of 8 Float", "started", False, (LINE,))
    title = f"collective {number} of group {name}"
    parts = dict.fromkeys(waiting, part)
    return Call(
        group=f"group {name}", name=name, number=number, title=title, parts=parts, **more
    )  # type: ignore[arg-type]


def graph(*calls: Call, free: frozenset[int] = frozenset()) -> WaitGraph:
    fronts: dict[int, list[Call]] = {}
    for one in calls:
        for rank in one.waiting:
            fronts.setdefault(rank, []).append(one)
    find_behind(fronts)
    return WaitGraph(fronts=fronts, free=free)


def test_what_one_source_leaves_open_another_one_fills() -> None:
    open_end = graph(call("0", 4, [0, 2], unknown={1: "without a dump"}))
    reported = graph(call("0", 4, [0], absent={1: LINE}, is_open=True))
    (cause,) = causes(merged(open_end, reported), [])
    assert cause.rule == "failure-missing-rank"
    assert cause.ranks == {1}
    assert causes(open_end, [])[0].rule == "failure-wait"


def test_equal_numbers_of_other_ranks_are_other_calls() -> None:
    first = graph(call("1", 4, [0], absent={1: LINE}))
    second = graph(call("1", 4, [2], absent={3: LINE}))
    assert len(merged(first, second).calls) == 2


def test_a_chain_over_two_sources_ends_at_the_rank_that_waits_for_nobody() -> None:
    dumps = graph(call("1", 2, [0], absent={1: None}))
    time_outs = graph(call("2", 7, [1], absent={2: LINE}))
    (cause,) = causes(merged(dumps, time_outs), [])
    assert cause.ranks == {2}
    assert cause.victims == {0, 1}


def test_sources_that_contradict_each_other_are_said_to() -> None:
    dumps = graph(call("0", 4, [0], absent={1: None}), free=frozenset({1}))
    time_outs = graph(call("2", 4, [1], absent={0: LINE}))
    (cause,) = causes(merged(dumps, time_outs), [])
    assert "contradict each other on rank 1" in cause.text


def problems(tmp_path: Path, text: str) -> list[Finding]:
    path = tmp_path / "job.out"
    path.write_text(text)
    report = read_report(collect([str(path)]), LogsOptions(files=(str(path),)))
    assert report.exit_code == 1
    return [one for one in report.findings if one.severity is Severity.PROBLEM]


def timed_out(rank: int, place: int, group: str, number: int = 7, numel: int = 100) -> str:
    call = (
        f"[Rank {place}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
        f"{number}, OpType=ALLREDUCE, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) "
        "ran for 600098 milliseconds before timing out."
    )
    return (
        f"[rank{rank}]:[E1013 03:22:49.68 ProcessGroupNCCL.cpp:629] {call}\n"
        f"[rank{rank}]:[E1013 03:22:49.78 ProcessGroupNCCL.cpp:1923] [PG ID 6 PG GUID "
        f"{group}(TP) Rank {place}] Process group watchdog thread terminated with exception: "
        f"{call}\n"
    )


@pytest.mark.parametrize("is_mixed", [False, True])
def test_ranks_with_one_place_in_groups_of_their_own_are_all_told(
    tmp_path: Path, is_mixed: bool
) -> None:
    blocks = [timed_out(rank, 1, str(90 + rank)).splitlines() for rank in range(8, 12)]
    lines = [line for block in blocks for line in block]
    if is_mixed:
        lines = [line for pair in zip(*blocks, strict=True) for line in pair]
    (one,) = problems(tmp_path, "\n".join(lines) + "\n")
    assert one.text.startswith(
        "Ranks 8-11 wait 600.1 s in call 7 of 4 groups, 98, 99, 100, 101"
    )
    assert "Without a line here: rank 0 within the group" in one.text


def test_an_unknown_number_of_elements_is_no_size(tmp_path: Path) -> None:
    (one,) = problems(tmp_path, timed_out(3, 3, "5", numel=2**64 - 1))
    assert "18446744073709551615" not in one.text
    assert "(all_reduce) (timed out)" in one.text


def test_holes_among_the_ranks_of_a_group_are_ranks_without_lines(tmp_path: Path) -> None:
    lines = "".join(timed_out(rank, rank, "0") for rank in (0, 1, 3, 4))
    (one,) = problems(tmp_path, lines)
    assert "rank 2 may be the cause or a victim, rank 2 without a line here" in one.text
    assert one.ranks == (2,)


def test_ranks_that_never_joined_are_named_by_the_report_of_another(tmp_path: Path) -> None:
    report = (
        "[rank0]:[E1013 03:22:49.9 ProcessGroupNCCL.cpp:1250] Rank 0\n"
        "\t - [0] Timeout at collective: ALLREDUCE, #7\n"
        "\t - To our best knowledge, ranks [2, 3] are the lagging ranks that caused this "
        "timeout. They never joined any collectives\n"
    )
    (one,) = problems(tmp_path, timed_out(0, 0, "0") + timed_out(1, 1, "0") + report)
    assert one.rule == "failure-missing-rank"
    assert one.ranks == (2, 3)


def test_ras_counts_name_the_ranks_behind_and_say_that_a_moment_may_look_so() -> None:
    path = str(DATA / "ras" / "count-mismatch.txt")
    report = read_report(collect([path]), LogsOptions(files=(path,)))
    assert report.exit_code == 1
    (one,) = [one for one in report.findings if one.severity is Severity.PROBLEM]
    assert one.text.startswith("Ranks 0-11, 14-31 did not join a call")
    assert "a second report shows whether they move" in one.text


TRACED = """\
Not all ranks joining collective: sequence number: 31117
internal record id: 31116
group info: 0:default_pg
collective: nccl:all_reduce
missing ranks: {3, 4, 5, 6, 7}
input sizes: [[1571911]]
output sizes: [[1571911]]
world size: 8
expected ranks: {0, 1, 2, 3, 4, 5, 6, 7}
collective state: scheduled
collective stack trace:
 all_reduce at /w/torch/distributed/distributed_c10d.py:2707
"""


def test_what_the_analyzer_of_dumps_prints_is_read(tmp_path: Path) -> None:
    (one,) = problems(tmp_path, TRACED)
    assert one.text.startswith("Ranks 3-7 did not join a call")
    assert "likely the cause, unless ranks 0-2, alone in it, make a call too many" in one.text
    assert "collective 31117 of group 0 default_pg (all_reduce of 1571911 elements)" in one.text
    assert "ranks 0-2 wait" in one.text


def test_the_analysis_and_the_output_of_one_job_are_one_cause(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TRACED)
    (tmp_path / "b.out").write_text(timed_out(0, 0, "0", number=31117))
    report = read_report(collect([str(tmp_path)]), LogsOptions(files=(str(tmp_path),)))
    (one,) = [one for one in report.findings if one.severity is Severity.PROBLEM]
    assert one.text.startswith("Ranks 3-7 did not join a call")
    assert {Path(line.file).name for line in one.evidence} == {"a.txt", "b.out"}
