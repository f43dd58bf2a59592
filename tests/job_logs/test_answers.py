"""The answer of `stepmark logs`: failed or hung (1), finished (0), unknown (3)."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepmark.findings.finding import Severity
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.log_sources import collect
from stepmark.job_logs.logs import LogReport, read_report, run

from .nccl_lines import Issued, coll, start, written

DATA = Path(__file__).parents[1] / "data"
CASES = tomllib.loads((DATA / "job-endings.toml").read_text())["case"]


def report_of(*paths: Path, **options: object) -> LogReport:
    words = tuple(map(str, paths))
    return read_report(collect(words), LogsOptions(files=words, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_output_has_its_answer(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / "job.out"
    path.write_text(case["lines"].lstrip("\n"))
    report = report_of(path)
    problems = [one.rule for one in report.findings if one.severity is Severity.PROBLEM]
    rules = problems[:1] or [one.rule for one in report.findings]
    assert report.exit_code == case["exit_code"]
    assert case["answer"] in report.answer.text
    assert case.get("rule", "") in ["", *rules]
    assert bool(problems) == (case["exit_code"] == 1)


@pytest.mark.parametrize(
    "dressed",
    [
        "{}\r",
        "[1,0]<stderr>:{}",
        "[default3]:{}",
        "0: {}",
        "2026-01-01T10:00:00.123Z {}",
        "[pod/train-0/main] {}",
        "trainer-1  | {}",
    ],
)
def test_what_others_add_to_a_line_does_not_matter(tmp_path: Path, dressed: str) -> None:
    codes = {}
    for place, case in enumerate(CASES):
        path = tmp_path / f"{place}.out"
        lines = [dressed.format(line) for line in case["lines"].lstrip("\n").splitlines()]
        path.write_text("\n".join([*lines, ""]), newline="")
        codes[case["name"]] = report_of(path).exit_code
    assert codes == {case["name"]: case["exit_code"] for case in CASES}


def case_path(folder: Path, name: str) -> Path:
    (lines,) = (case["lines"] for case in CASES if case["name"] == name)
    path = folder / "job.out"
    path.write_text(lines.lstrip("\n"))
    return path


@pytest.mark.parametrize(
    ("name", "exit_code", "words"),
    [
        (
            "nccl-tests hung at its first size",
            1,
            "The output of nccl-tests stops inside its first row",
        ),
        (
            "nccl-tests that ended in its start",
            1,
            "The output of nccl-tests stops before its table",
        ),
        ("one of two ranks destroyed its communicator", 0, "--ended states it"),
        ("a port scan", 0, "--ended states it"),
        ("a benchmark with its footer", 0, "# Collective test concluded"),
        ("kubectl describe: OOMKilled", 1, "ran out of memory"),
        ("steps of torchtitan without an end", 0, "--ended states it"),
        ("steps after a traceback, and no end", 1, "more steps are printed after it"),
        ("communicators that were aborted", 3, "2 communicators aborted (ncclCommAbort)"),
        ("communicators that were aborted after the end of training", 0, "Training completed"),
    ],
)
def test_what_is_incomplete_failed_if_the_job_ended(
    tmp_path: Path, name: str, exit_code: int, words: str
) -> None:
    report = report_of(case_path(tmp_path, name), ended=True)
    assert report.exit_code == exit_code
    assert words in report.answer.text


def test_ranks_that_did_not_finish_a_start_failed_if_the_job_ended(tmp_path: Path) -> None:
    path = written(tmp_path, [*start(0), *start(1, state=("START",))])
    assert report_of(path).answer.text.startswith(
        "unknown whether it ended: communicator 0xabc0"
    )
    assert report_of(path, ended=True).exit_code == 1


def test_a_view_of_messages_asks_for_no_end_and_says_damage(tmp_path: Path) -> None:
    whole = [*start(0, num_ranks=1), coll(0, Issued(), num_ranks=1)]
    torn = [line[2:] for line in whole[:1]]
    path = written(tmp_path, [*whole * 9, *torn])
    assert report_of(path).exit_code == 3
    for view in ({"histogram": True}, {"tuning": True}, {"by": "dtype"}):
        report = report_of(path, **view)
        assert report.exit_code == 0
        lines = list(report.text())
        assert not [line for line in lines if line.startswith("answer")]
        assert [line for line in lines if line.endswith("[torn-lines]")]


def test_the_answer_comes_first_and_is_in_the_document(tmp_path: Path) -> None:
    report = report_of(case_path(tmp_path, "Hugging Face's metrics"))
    assert next(report.text()).startswith("answer     finished: ")
    answer = report.document()["answer"]
    assert isinstance(answer, dict)
    assert answer["state"] == "finished"
    assert answer["evidence"][0]["line"] == 3


def test_tables_alone_are_no_job() -> None:
    report = report_of(DATA / "nccl-tests" / "8xH200-all_reduce.txt")
    assert (report.exit_code, report.document()["answer"]) == (0, None)


def test_dumps_without_a_hang_do_not_show_an_end(tmp_path: Path) -> None:
    report = report_of(*sorted((DATA / "flight-recorder").glob("rank*")))
    assert not [one for one in report.findings if one.severity is Severity.PROBLEM]
    assert report.exit_code == 3


def test_wrong_results_of_a_table_are_in_the_answer_of_its_log(tmp_path: Path) -> None:
    path = case_path(tmp_path, "a benchmark with its footer")
    text = path.read_text().replace("0.00      0    25.64", "0.00      2    25.64")
    path.write_text(text.replace("values : 0 OK", "values : 1 FAILED"))
    report = report_of(path)
    assert report.exit_code == 1
    assert report.answer.text.startswith("1 measurement with wrong results, footer FAILED")


def test_rows_on_stdout_come_with_damage_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [*start(0, num_ranks=1), coll(0, Issued(), num_ranks=1)]
    path = written(tmp_path, [*whole * 9, whole[0][2:]])
    options = LogsOptions(files=(str(path),), histogram=True, csv="-")
    assert run(options) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert "1 line were left out: torn" in err


LIMIT = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT ***"
)
KILLED = "srun: error: n1: task 0: Killed"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [((LIMIT, KILLED), "failure-time-limit"), ((KILLED, LIMIT), "failure-killed")],
)
def test_a_signal_after_the_end_of_a_job_is_its_consequence(
    tmp_path: Path, lines: tuple[str, str], cause: str
) -> None:
    path = tmp_path / "job.out"
    path.write_text("step 4200\n" + "\n".join(lines) + "\n")
    report = read_report(collect([str(path)]), LogsOptions(files=(str(path),)))
    (one,) = [one for one in report.findings if one.severity is Severity.PROBLEM]
    assert one.rule == cause
    assert len(one.consequences) == 1


def test_a_table_that_stops_is_unknown_and_failed_if_the_job_ended(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    rows = '{"size": 1048576, "count": 262144, "type": "float", "redop": "sum", "root": "-1", '
    rows += '"out_of_place": {"time": 40.0, "alg_bw": 26.2, "bus_bw": 39.3, "nwrong": "0"}}'
    config = '{"minimum_bytes": 1048576, "maximum_bytes": 67108864, "step_factor": 4}'
    path.write_text(
        f'{{"version": 2, "args": ["all_reduce_perf"], "config": {config}, "results": [{rows},'
    )
    for is_ended, code in ((False, 3), (True, 1)):
        options = LogsOptions(files=(str(path),), ended=is_ended)
        report = read_report(collect([str(path)]), options)
        assert report.exit_code == code
        assert "stops after 1 of 4 sizes" in report.answer.text


@pytest.mark.parametrize(
    "text",
    [
        "In step 3 of the recipe the flour is added.\nThen step 4 begins.\n",
        "The loss of step 3 is high, see chapter 4.\n",
        "# Training\nRun it for 100 steps.\n1. Step 1: install\n2. Step 2: run\n",
        "step: 10\nepoch: 3\nloss: mse\n",
    ],
)
def test_a_text_that_no_trainer_printed_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="output of a job that trained or failed"):
        collect([str(path)])


NO_GPU = "RuntimeError: no CUDA-capable device"
BAD_ACCESS = "RuntimeError: CUDA error: misaligned address"


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "is_known"),
    [
        ("[rank0]:[E1231 23:59:58.1 x] {}", "[rank1]:[E1231 23:59:59.1 x] {}", True),
        ("[rank0]:[E1013 23:59:58.1 x] {}", "[rank1]:[E1014 00:00:03.1 x] {}", True),
        ("[2026-01-31 23:59:58] {}", "[2026-02-01 00:00:03] {}", True),
        ("x 01:00:00 {}", "x 02:00:00 {}", True),
        ("x 23:59:58 {}", "x Error handling 23:59:58\nx 00:00:03 {}", True),
        ("x 23:59:58 {}", "x 00:00:03 {}", False),
        ("[rank0]:[E1231 23:59:58.1 x] {}", "[rank1]:[E0101 00:00:03.1 x] {}", False),
    ],
)
def test_midnight_does_not_turn_the_order_of_failures_round(
    tmp_path: Path, before: str, after: str, is_known: bool, is_swapped: bool
) -> None:
    names = ("b.log", "a.log") if is_swapped else ("a.log", "b.log")
    paths = [tmp_path / name for name in names]
    paths[0].write_text(before.format(BAD_ACCESS) + "\n")
    paths[1].write_text(after.format(NO_GPU) + "\n")
    report = report_of(*sorted(paths))
    rules = [one.rule for one in report.findings]
    assert ("unknown-order" in rules) != is_known
    if is_known:
        assert rules == ["failure-illegal-access", "failure-no-gpu"]
