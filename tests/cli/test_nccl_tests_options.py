"""Every option of nccl-tests 2.19.6 changes what comm measures or shows, or is refused by name.

The table is longopts of src/common.cu at a0b82b22 (2.19.6), without -h.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.collectives.comm_records import comm_case, comm_measured, comm_run
from tests.parsing import parse

from stepmark.cases.plan import Plan
from stepmark.cases.record import CommMemory, Record
from stepmark.cli.main import status
from stepmark.collectives import comm, comm_workload, nccl_tests
from stepmark.collectives.comm_columns import rows
from stepmark.collectives.comm_options import CommOptions
from stepmark.collectives.nccl_tests import Report
from stepmark.collectives.peer_formats import json_document
from stepmark.ground.errors import ConfigError
from stepmark.measuring.machine import machine
from stepmark.model.collectives import Api, Collective, Registration
from stepmark.tables.table import fitted
from stepmark.text_tables import tables_of

H200 = machine("h200", dry_run=True)
BASE = ("all_reduce", "--nproc=4", "--api=nccl")
# By name, a value that changes the plan.
PLANNED = {
    ("g", "ngpus"): "2",
    ("b", "minbytes"): "8K",
    ("e", "maxbytes"): "8K",
    ("i", "stepbytes"): "1G",
    ("f", "stepfactor"): "2",
    ("n", "iters"): "20",
    ("m", "agg_iters"): "3",
    ("w", "warmup_iters"): "7",
    ("N", "run_cycles"): "3",
    ("c", "check"): "0",
    ("o", "op"): "max",
    ("d", "datatype"): "half",
    ("z", "blocking"): "1",
    ("T", "timeout"): "60",
    ("G", "cudagraph"): "2",
    ("R", "local_register"): "2",
    ("u", "unalign"): "1",
    ("I", "per_iter_timing"): "1",
    ("x", "cta_policy"): "1",
}
# A value that changes the table of nccl-tests, or the file of -J.
SHOWN = {
    ("C", "report_cputime"): "1",
    ("S", "report_timestamps"): "1",
    ("a", "average"): "1",
    ("M", "memory"): "1",
}
# The only value that describes what stepmark does, and one that is refused.
FIXED = {
    ("t", "nthreads"): ("1", "2"),
    ("p", "parallel_init"): ("1", "0"),
    ("y", "stream_null"): ("0", "1"),
    ("D", "device_implementation"): ("0", "1"),
    ("V", "device_cta_count"): ("16", "8"),
    ("K", "per_iter_skip"): ("0", "5"),
}
OTHERS = {("r", "root"), ("J", "output_file")}  # with tests of their own below


def spellings(names: tuple[str, str]) -> tuple[str, str]:
    return f"-{names[0]}", f"--{names[1]}"


def plan(*words: str) -> Plan:
    return replace(comm.plan(parse(CommOptions, [*BASE, *words]), H200), argv=(), options={})


def test_the_table_has_every_option() -> None:
    letters = {short for short, _ in {**PLANNED, **SHOWN, **FIXED}} | {"r", "J"}
    getopt = "t:g:b:e:i:f:n:m:w:N:p:I:K:c:o:d:r:z:y:T:hG:C:a:R:x:D:V:J:S:M:u:"
    assert letters == set(getopt) - {":", "h"}


@pytest.mark.parametrize("names", PLANNED)
def test_what_is_measured_changes(names: tuple[str, str]) -> None:
    value = PLANNED[names]
    short, long = (plan(word, value) for word in spellings(names))
    assert short == long
    base = plan("--timeout=30s") if names == ("T", "timeout") else plan()
    assert (short.entries, short.how, short.world_size) != (
        base.entries,
        base.how,
        base.world_size,
    )


def test_a_root_and_a_file() -> None:
    words = ("broadcast", "--nproc=4", "--begin=1K", "--end=1K")
    for option in ("-r", "--root"):
        options = parse(CommOptions, [*words, option, "3"])
        assert {entry.case.root for entry in comm.plan(options, H200).entries} == {3}  # type: ignore[union-attr]
    for option in ("-J", "--output_file"):
        assert parse(CommOptions, [*words, option, "x.json"]).output_file == "x.json"


@pytest.mark.parametrize("names", FIXED)
@pytest.mark.parametrize("place", [0, 1])
def test_what_has_no_counterpart_is_refused_with_the_reason(
    names: tuple[str, str], place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    option = spellings(names)[place]
    holds, other = FIXED[names]
    assert plan(option, holds) == plan()
    assert status(["comm", *BASE, "--device", "h200", "--dry-run", option, other]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"stepmark: {option} {other} is invalid: it must be {holds}, since ")
    assert err.count("\n") == 1


PRINTED = "-N 3 -a 1 -C 1 -R 2 -u 1 -x 1 -M 1 -S 1 -I 1"


def test_printed_commands_have_the_same_flags(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"comm all_reduce --nproc 2 -b 1M -e 1M --print nccl-tests {PRINTED}"
    assert status(line.split()) == 0
    (command,) = capsys.readouterr().out.splitlines()
    assert command.endswith(f" -g 2 {PRINTED}")
    line = "comm all_reduce --nproc 2 -b 1M -e 1M --print rccl-tests -N 3 -a 1"
    assert status(line.split()) == 0
    assert capsys.readouterr().out.endswith(" -g 2 -N 3 -a 1\n")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("-b 1K -e 8G -f 2 --nproc 256", ["-b 1024 -e 8589934592 -f 2"]),
        ("-b 1M -e 4M -i 1M --nproc 8", ["-b 1048576 -e 4194304 -i 1048576"]),
        ("-b 1M -e 1M --nproc 8", ["-b 1048576 -e 1048576"]),
        (
            "-b 1M -e 3M -f 1.5 --nproc 8",
            [f"-b {n} -e {n}" for n in (1048576, 1572864, 2359296)],
        ),
    ],
)
def test_a_sweep_is_one_printed_command(
    words: str, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nccl-tests walks the same sizes; else there is a command for each size."""
    assert status(f"comm all_reduce --print nccl-tests {words}".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("_perf ")[2].partition(" -d ")[0] for line in lines] == printed


@pytest.mark.parametrize("words", ["-R 2", "-u 1", "-x 1", "-M 1", "-S 1", "-I 1"])
def test_other_meanings_in_rccl_tests_are_not_printed(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"comm all_reduce --nproc 2 -b 1M -e 1M --print rccl-tests {words}"
    assert status(line.split()) == 2
    message = f"stepmark: {words} is invalid: it works only with --print nccl-tests.\n"
    assert capsys.readouterr().err == message


def test_a_workload_s_barrier_has_no_buffers(tmp_path: Path) -> None:
    barrier, other = comm_case(Collective.BARRIER), comm_case(Collective.ALL_GATHER)
    base = replace(other, registration=Registration.SYMMETRIC, unalign=1, api=Api.NCCL)
    cases, _ = comm_workload.placed([barrier, other], base)
    assert [(case.registration, case.unalign) for case in cases] == [
        (Registration.NONE, 0),
        (Registration.SYMMETRIC, 1),
    ]


# What is shown

TIMES = [[10e-6, 30e-6, 20e-6], [40e-6, 20e-6, 30e-6], [20e-6, 40e-6, 60e-6]]
OVER_RANKS = {"0": 20.0, "1": 30.0, "2": 20.0, "3": 40.0}
MEMORY = CommMemory(init_bytes=2**30, buffer_bytes=2**29, call_bytes=2**28)


def measured() -> list[Record]:
    records: list[Record] = []
    for in_place, memory in ((False, MEMORY), (True, None)):
        case = comm_case(Collective.ALL_GATHER, size=3 * 2**20, num_ranks=3, in_place=in_place)
        record = comm_measured(case, TIMES, issue_s=7e-6)
        records.append(replace(record, comm_memory=memory, started_at=86400.0 * 365))
    return records


def report_of(*words: str) -> Report:
    return comm._report(parse(CommOptions, [*BASE, *words]))


def table(*words: str) -> list[str]:
    return nccl_tests.output_lines(
        rows(measured(), comm_run(3)), comm_run(3), report=report_of(*words)
    )


def figures(lines: list[str]) -> list[str]:
    (line,) = [line for line in lines if line and not line.startswith("#")]
    return line.split()


@pytest.mark.parametrize("names", SHOWN)
def test_what_is_shown_changes(names: tuple[str, str]) -> None:
    short, long = (table(word, SHOWN[names]) for word in spellings(names))
    assert short == long != table()


@pytest.mark.parametrize("number", OVER_RANKS)
def test_average_chooses_the_time_and_its_rates(number: str) -> None:
    cells = figures(table("-a", number))
    wanted = OVER_RANKS[number]
    assert float(cells[5]) == float(cells[9]) == wanted
    algbw = 3 * 2**20 / (wanted * 1e-6) / 1e9
    assert float(cells[6]) == pytest.approx(algbw, abs=0.01)
    assert float(cells[7]) == pytest.approx(algbw * 2 / 3, abs=0.01)
    words = {"0": "rank 0", "1": "the mean over ranks", "2": "the fastest rank"}
    assert any(
        f"time = median of {words.get(number, 'the slowest rank')}" in x
        for x in table("-a", number)
    )
    half = json_half("-a", number)
    assert half["time"] == pytest.approx(wanted)
    assert half["alg_bw"] == pytest.approx(algbw)


def json_half(*words: str) -> dict[str, float]:
    document = json_document(
        rows(measured(), comm_run(3)), comm_run(3), [], report=report_of(*words)
    )
    (result,) = document["results"]  # type: ignore[misc]
    return result["in_place"]  # type: ignore[no-any-return, has-type]


def test_cputime_is_the_time_to_issue_a_call_beside_the_rates_of_the_time() -> None:
    plain, lines = table(), table("-C", "1")
    cells = figures(lines)
    assert cells[5] == cells[9] == "7.20"  # of the slowest of three ranks
    assert cells[6:8] == figures(plain)[6:8]
    (head,) = [line for line in lines if line.startswith("#       size")]
    assert head.count("cputime") == 2
    assert len(head) == len(next(line for line in plain if line.startswith("#       size")))
    half = json_half("-C", "1")
    assert half["cpu_time"] == pytest.approx(7.2)
    assert "time" not in half
    # Remarks below are about the time, whatever the column has.
    assert [line for line in lines if "fit " in line] == [
        line for line in plain if "fit " in line
    ]


def test_samples_of_single_calls_have_columns_of_their_own() -> None:
    lines = table("-I", "1")
    # The format strings of writeResultHeader in src/util.cu.
    lead = "# %10s  %12s  %8s  %6s  %6s"
    eight = 2 * "  %7s  %6s  %6s  %6s  %7s  %7s  %7s  %7s"
    above = (
        " " * 14 + "out-of-place (+ per-iteration)" + " " * 32 + "in-place (+ per-iteration)"
    )
    names = 2 * ("time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%")
    units = 2 * ("(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)", "(%)")
    heads = [
        lead % ("", "", "", "", "") + above,
        (lead + eight) % ("size", "count", "type", "redop", "root", *names) + " ",
        (lead + eight) % ("(B)", "(elements)", "", "", "", *units) + " ",
    ]
    at = lines.index(heads[0])
    assert lines[at : at + 3] == heads
    cells = figures(lines)
    assert len(cells) == 5 + 2 * 8
    # The slowest rank of the samples takes 40, 40 and 60 us.
    assert cells[5:13] == cells[13:21]
    assert cells[9:11] == ["40.00", "60.00"]
    assert float(cells[11]) == pytest.approx(59.6)
    assert float(cells[12]) == pytest.approx(20.20, abs=0.01)
    document = json_document(
        rows(measured(), comm_run(3)), comm_run(3), [], report=report_of("-I", "1")
    )
    assert document["config"]["per_iter_timing"] == "true"  # type: ignore[index]
    half = document["results"][0]["in_place_per_iter"]  # type: ignore[index]
    assert (half["min_us"], half["max_us"]) == pytest.approx((40, 60))


def test_a_half_that_did_not_run_has_as_many_cells() -> None:
    (row,) = rows(measured()[:1], comm_run(3))
    lines = nccl_tests.output_lines([row], comm_run(3), report=report_of("-I", "1", "-S", "1"))
    cells = figures(lines)
    assert cells[13:21] == ["N/A"] * 8
    assert len(cells) == 5 + 2 * 8 + 2


@pytest.mark.parametrize(
    "words", ["", "-I 1", "-S 1", "-I 1 -S 1", "-C 1 -S 1", "-a 1", "-M 1"]
)
def test_our_own_reader_finds_the_times_of_every_table(words: str) -> None:
    (found,) = tables_of("\n".join(table(*words.split())) + "\n", "x.txt")
    times = {reading.time_s for reading in found.readings}
    # The time to enqueue says nothing of the collective.
    wanted = None if "-C" in words else 30e-6 if "-a" in words else 40e-6
    assert [*times] == [wanted if wanted is None else pytest.approx(wanted)]
    assert any("(-C)" in note for note in found.notes) == ("-C" in words)


def test_timestamps_end_each_line_also_on_a_narrow_terminal() -> None:
    lines = table("-S", "1")
    assert re.fullmatch(
        r".* 197[01]-\d\d-\d\d \d\d:\d\d:\d\d", next(x for x in lines if x[:1] == " ")
    )
    assert sum(line.endswith(" timestamp") for line in lines) == 1
    narrow = list(fitted(lines, 60))
    assert sum(bool(re.search(r"197[01]-\d\d-\d\d", line)) for line in narrow) == 1


def test_memory_is_that_of_the_case_with_most() -> None:
    (line,) = [line for line in table("-M", "1") if "GPU memory usage" in line]
    assert line == (
        "# GPU memory usage     : Initialization 1 GiB | User-Allocated 512 MiB | "
        "Collective 256 MiB | Total 1.75 GiB"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-R 1", "-R 1 is invalid: it works only with --api nccl."),
        ("-x 1", "-x 1 is invalid: it works only with --api nccl."),
        ("-R 3", "-R 3 is invalid: it must be one of 0, 1, 2"),
        ("-M 1", "-M 1 is invalid: it works only on GPUs."),
        ("-C 1", "-C 1 is invalid: it works only on GPUs."),
        ("-a 4", "-a 4 is invalid: it must be from 0 to 3."),
        ("-I 1 -G 1 --device h200", "-I 1 is invalid: it cannot time the calls of a graph."),
        ("-K 1 -I 1", "-K 1 is invalid: it must be 0, since every sample counts"),
        ("-u -1", "-u -1 is invalid: it must be from 0 to 1048576."),
        ("-N 0", "-N 0 is invalid: it must be from 1 to 100."),
        ("-a 1 --wide", "-a 1 is invalid: it changes nccl-tests' table"),
        ("-a 1 --json -", "-a 1 is invalid: it changes nccl-tests' table"),
        ("-S 1 --style param", "-S 1 is invalid: it changes nccl-tests' table"),
        ("p2p-matrix -S 1", "-S 1 is invalid: it changes nccl-tests' table"),
        ("-S 1 --wide -J x.json", "-S 1 is invalid: it changes nccl-tests' table"),
    ],
)
def test_no_flag_is_without_effect(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "" if words.startswith("p2p") else "all_reduce"
    line = f"comm {name} --device cpu --nproc 2 -b 1K -e 1K --dry-run {words}"
    assert status(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"stepmark: {message}")


def test_what_asks_for_nothing_is_no_error() -> None:
    off = (
        "-x",
        "0",
        "-R",
        "0",
        "-u",
        "0",
        "-C",
        "0",
        "-S",
        "0",
        "-M",
        "0",
        "-I",
        "0",
        "-G",
        "0",
        "-z",
        "0",
    )
    words = ["--nproc=4", "-b1K", "-e1K", *off]
    for names in (["all_reduce"], ["barrier"]):
        comm.plan(parse(CommOptions, [*names, *words]), H200)
        comm.plan(parse(CommOptions, [*names, *words]), machine("cpu", dry_run=True))


@pytest.mark.parametrize("words", [("-R", "1"), ("-u", "1")])
def test_a_barrier_has_no_buffers(words: tuple[str, str]) -> None:
    options = ["--nproc=4", "--api=nccl", "-b1K", "-e1K", *words]
    with pytest.raises(ConfigError, match="it has no effect on barrier"):
        comm.plan(parse(CommOptions, ["barrier", *options]), H200)
    both = comm.plan(parse(CommOptions, ["barrier", "broadcast", *options]), H200)
    changed = {
        entry.case.family: bool(entry.case.unalign or entry.case.registration != "none")
        for entry in both.entries
    }  # type: ignore[union-attr]
    assert changed == {"barrier": False, "broadcast": True}


@pytest.mark.parametrize("options", [{}, {"wide": True}])
def test_a_run_says_that_python_issued_its_calls(
    options: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(__file__).parents[2] / "results" / "h200-x4-comm-queued-1"
    assert comm.show(run, options, 0) == 0
    assert "Python issues the calls, which takes the host longer" in capsys.readouterr().out
