"""CSV and JSON of every published run, byte for byte as they were written before.

The files in tests/data/published-* were written by the code before columns were declared. To
renew them after a wanted change: `STEPMARK_RENEW=1 pytest tests/runs/test_published_rows.py`,
and say in CHANGELOG.md what changed.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest

from stepmark.cli.main import status
from stepmark.store import view
from stepmark.store.codec import to_plain
from stepmark.store.reader import read_info
from stepmark.store.view import View
from stepmark.tables.export import write_csv, write_json

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "published-rows.json"
# One of each kind as a whole: the others are digests.
WHOLE = (
    "h200-attention-burst",
    "h200-x4-comm-torch-api",
    "h200-x2-train-llama-3.1-8b-fsdp-8k",
)
RUNS = sorted(
    path.parent
    for path in (*ROOT.glob("results/*/run.json"), *ROOT.glob("results/*/runs/*/run.json"))
)


def files_of(seen: View, folder: Path) -> dict[str, bytes]:
    rows = seen.rows + seen.comm_rows + seen.train_rows
    write_csv(rows, folder / "rows.csv")
    write_json({"run": to_plain(seen.run), "rows": rows}, folder / "rows.json")
    return {file.suffix[1:]: file.read_bytes() for file in sorted(folder.glob("rows.*"))}


def digests(folder: Path) -> dict[str, dict[str, str]]:
    """By run and format."""
    found = {}
    for path in RUNS:
        seen = view.view(path)
        files = files_of(seen, folder)
        name = path.relative_to(ROOT / "results").as_posix()
        found[name] = {kind: hashlib.sha256(data).hexdigest() for kind, data in files.items()}
        if name in WHOLE:
            (folder / f"{name}.csv").write_bytes(files["csv"])
    return found


def test_rows_of_published_runs_are_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was written depends on the run alone: shares of other runs' times are left out.
    monkeypatch.setattr(view, "published_times", list)
    found = digests(tmp_path)
    if os.environ.get("STEPMARK_RENEW"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        for name in WHOLE:
            whole = (tmp_path / f"{name}.csv").read_bytes()
            GOLDEN.with_name(f"published-{name}.csv").write_bytes(whole)
    assert found == json.loads(GOLDEN.read_text())
    for name in WHOLE:
        kept = GOLDEN.with_name(f"published-{name}.csv").read_bytes()
        assert (tmp_path / f"{name}.csv").read_bytes() == kept


@pytest.mark.parametrize("name", ["h100-run", "h100-x4-predictions-3", "h200-x2-gemm"])
def test_tables_of_published_runs_are_shown(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of several kinds have rows that lack each other's columns."""
    assert status(["runs", "show", str(ROOT / "results" / name)]) == 0
    assert capsys.readouterr().out.startswith(read_info(ROOT / "results" / name).run_id)
