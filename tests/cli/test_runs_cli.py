"""stepmark runs: the verbs, their streams, and a fast --help."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.parsing import run
from tests.store.test_codec import ALL
from tests.store.test_runs import INFO
from tests.store.writers import new_run

from stepmark.ground.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with new_run(tmp_path / "runs", INFO) as writer:
        for record in ALL:
            writer.append(record)
    return tmp_path / "runs"


def call(*words: str) -> str:
    code, shown = run("runs", *words)
    assert code == 0
    return shown


def test_list(root: Path) -> None:
    (row,) = json.loads(call("list", "--runs", str(root), "--json", "-"))
    assert row["run"] == INFO.run_id
    # Every case of ALL occurs thrice, and failed last.
    assert (row["measured"], row["skipped"], row["failed"]) == (0, 0, len(ALL) // 3)
    assert INFO.run_id in call("list", "--runs", str(root))


def test_list_names_a_run_that_cannot_be_read(root: Path) -> None:
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    rows = json.loads(call("list", "--runs", str(root), "--json", "-"))
    assert [row["run"] for row in rows if "unreadable" in row] == ["broken"]


def test_list_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("runs", "list", "--runs", str(tmp_path), "--json", "-") == (0, "[]\n")
    assert "no runs" in capsys.readouterr().err


def test_show_prints_only_the_document_on_stdout(root: Path) -> None:
    document = json.loads(call("show", "latest", "--runs", str(root), "--json", "-"))
    assert document["run"]["run_id"] == INFO.run_id
    # At least one row per case; a case with several labels may have several.
    assert len(document["rows"]) >= len(ALL) // 3
    assert call("show", INFO.run_id[:12], "--runs", str(root))


def test_show_to_files(root: Path, tmp_path: Path) -> None:
    call("show", "--runs", str(root), "--json", f"{tmp_path}/", "--csv", f"{tmp_path}/x.csv")
    assert (tmp_path / f"{INFO.run_id}.json").is_file()
    assert (tmp_path / "x.csv").read_text().count("\n") > len(ALL) // 3


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_export(root: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / f"rows.{kind}"
    call("export", "latest", "--to", kind, str(target), "--runs", str(root))
    assert target.stat().st_size > 0


def test_sql(root: Path) -> None:
    query = "SELECT kind, count(*) AS n FROM records GROUP BY kind ORDER BY kind"
    assert json.loads(call("sql", query, "--runs", str(root), "--json", "-")) == [
        {"kind": kind, "n": len(ALL) // 3} for kind in ("failed", "measured", "skipped")
    ]
    assert call("sql", query, "--runs", str(root), "--csv", "-").splitlines()[0] == "kind,n"
    assert "measured" in call("sql", query, "--runs", str(root))


def test_errors_reach_the_caller(root: Path) -> None:
    for words in (["show", "x"], ["sql", "SELEC"], ["export", "latest", "f", "--to", "excel"]):
        with pytest.raises(ConfigError):
            call(*words, "--runs", str(root))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom stepmark.cli.main import status\n"
        "assert status(['runs', 'show', '--help']) == 0\n"
        "print([m for m in 'duckdb msgspec numpy torch'.split() if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
