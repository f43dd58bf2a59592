"""stepmark doctor on this machine: report, JSON and CSV."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests import parsing

from stepmark.ground.errors import ConfigError
from stepmark.nodes import doctor


def run(*args: str) -> str:
    code, shown = parsing.run("doctor", *args)
    assert code == 0, shown
    return shown


def test_report_has_every_section() -> None:
    shown = run()
    for word in ("Host", "Software", "Device 0", "Operators", "Warnings", "torch"):
        assert word in shown


def test_json_on_stdout_is_nothing_but_json() -> None:
    found = json.loads(run("--json", "-"))
    assert found["environment"]["torch"]
    assert found["devices"][0]["info"]["rank"] == 0
    assert {"backends", "nics", "peer_access", "warnings"} <= found.keys()


def test_csv_on_stdout_holds_the_lines() -> None:
    rows = list(csv.DictReader(io.StringIO(run("--csv", "-"))))
    assert {row["mark"] for row in rows} <= {"ok", "warning", "missing"}
    assert {"Host", "Software", "Warnings"} <= {row["section"] for row in rows}


def test_outputs_go_to_a_file_or_into_a_folder(tmp_path: Path) -> None:
    run("--json", str(tmp_path / "found.json"), "--csv", f"{tmp_path / 'new'}/")
    assert json.loads((tmp_path / "found.json").read_text())["devices"]
    assert (tmp_path / "new" / "doctor.csv").read_text().startswith("section,item,mark,detail")


def test_a_bracket_in_a_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    line = doctor.Line(section="[red]S", item="[bold]x[/bold]", mark="ok", detail="[/nope]")
    doctor.draw([line], to_stderr=False)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[red]S", "[bold]x[/bold]", "[/nope]"))


def test_help_imports_no_torch() -> None:
    heavy = "{'torch', 'numpy', 'rich.console', 'msgspec'}"
    code = "import sys; from stepmark.cli import main; main.command('doctor', []); "
    code += f"assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_outputs_on_one_stdout_are_refused() -> None:
    with pytest.raises(ConfigError):
        run("--json", "-", "--csv", "-")


def test_an_unwritable_path_names_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no/x\.csv"):
        run("--csv", "no/x.csv")
