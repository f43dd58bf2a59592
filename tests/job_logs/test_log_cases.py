"""Inputs that users of `logs` have: each has its answer, its exit code, and no line is lost."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.log_sources import collect
from stepmark.job_logs.logs import read_report

CASES = tomllib.loads((Path(__file__).parents[1] / "data" / "log-cases.toml").read_text())[
    "case"
]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_input_has_its_answer(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / case["file"]
    path.write_text(case["text"].removeprefix("\n"))
    only_tables = case.get("tables", False)
    options = LogsOptions(files=(str(path),), tables=only_tables)
    report = read_report(collect([str(path)], only_tables=only_tables), options)
    text = "\n".join(report.text())
    assert report.exit_code == case["exit"]
    for word in case["words"]:
        assert word in text
