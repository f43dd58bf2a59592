"""The answer of `stepmark logs`: failed or hung (1), finished (0), unknown whether it ended (3)."""

import tomllib
from pathlib import Path

import pytest

from stepmark.findings.finding import Severity
from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.log_sources import collect
from stepmark.job_logs.logs import LogReport, read_report

DATA = Path(__file__).parents[1] / "data"
CASES = tomllib.loads((DATA / "job-endings.toml").read_text())["case"]


def report_of(*paths: Path, **options: object) -> LogReport:
    words = tuple(map(str, paths))
    return read_report(collect(words), LogsOptions(files=words, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_output_has_its_answer(tmp_path: Path, case: dict[str, str]) -> None:
    path = tmp_path / "job.out"
    path.write_text(case["lines"].lstrip("\n"))
    report = report_of(path)
    problems = [one.rule for one in report.findings if one.severity is Severity.PROBLEM]
    rules = problems[:1] or [one.rule for one in report.findings]
    assert (report.exit_code, case["answer"] in report.answer.text) == (case["exit_code"], True)
    assert case.get("rule", "") in ["", *rules]
    assert bool(problems) == (case["exit_code"] == 1)
