"""Every row of the recipe is a command that `stepmark train` takes."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stepmark.cli.main import status

FILE = Path(__file__).parents[2] / "recipes" / "llm_train_bench.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llm_train_bench", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["llm_train_bench"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RECIPE = loaded()
ROWS = RECIPE.ROWS


def given(out: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=out, device="cpu", nproc="2", more="", resume=False, schedules="micro,step"
    )


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_is_planned(
    row: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = RECIPE.command(row, given(tmp_path))
    assert status([*words[3:], "--dry-run"]) == 0, capsys.readouterr().err
    planned = capsys.readouterr().out.splitlines()
    assert len(planned) == 2
    for schedule, line in zip(("micro", "step"), planned, strict=True):
        assert f"--schedule {schedule}" in line


def test_names_are_unique_and_all_cells_of_the_document_are_there() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    cells = [row for row in ROWS if row.document and row.published_on == "H100"]
    assert len(cells) == 3 * 3 * 2 + 3  # strategies x techniques x models, SAC but "Crashes"


def test_the_table_shows_what_was_measured(tmp_path: Path) -> None:
    row = ROWS[0]
    found = {"rank": None, "num_ranks": 1, "mbs": 8, "tflops_palm_all": 700.0, "time_s": 0.1}
    told = [found | {"schedule": "micro"}, found | {"schedule": "step", "tflops_palm_all": 5.0}]
    (tmp_path / f"{row.name}.json").write_text(json.dumps({"rows": told}))
    line = RECIPE.table([row], given(tmp_path)).splitlines()[2]
    assert line.startswith(
        f"| {row.name} | 1 | 8 | 350 (H100) | 700.0 | 2.00 |  | 100.0 | 5.0 |"
    )
