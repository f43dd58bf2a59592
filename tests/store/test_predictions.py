"""A prediction is written once, and one that was changed is refused."""

import csv
import subprocess
from pathlib import Path

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.store import predictions

ROOT = Path(__file__).parents[2]


def test_what_was_committed_is_read(tmp_path: Path) -> None:
    assert predictions.read(tmp_path) is None
    digest = predictions.commit(tmp_path, {"step_s": 0.4})
    assert predictions.read(tmp_path) == ({"step_s": 0.4}, digest)


def test_it_is_committed_once(tmp_path: Path) -> None:
    predictions.commit(tmp_path, {"step_s": 0.4})
    with pytest.raises(ConfigError, match="has none yet"):
        predictions.commit(tmp_path, {"step_s": 0.5})
    read = predictions.read(tmp_path)
    assert read is not None
    assert read[0] == {"step_s": 0.4}


def test_a_later_edit_is_refused(tmp_path: Path) -> None:
    predictions.commit(tmp_path, {"step_s": 0.4})
    file = tmp_path / predictions.FILE
    file.write_text(file.read_text().replace("0.4", "0.5"))
    with pytest.raises(ConfigError, match="changed since"):
        predictions.read(tmp_path)


def test_a_prediction_without_its_hash_is_refused(tmp_path: Path) -> None:
    predictions.commit(tmp_path, {"step_s": 0.4})
    (tmp_path / predictions.HASH_FILE).unlink()
    with pytest.raises(ConfigError, match="missing"):
        predictions.read(tmp_path)


def test_sha256sum_agrees(tmp_path: Path) -> None:
    predictions.commit(tmp_path, {"step_s": 0.4})
    command = ["sha256sum", "-c", predictions.HASH_FILE]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


def test_published_predictions_have_the_hashes_of_their_table() -> None:
    """Each row of the table names the prediction that was committed before its measurement."""
    table = ROOT / "src" / "stepmark" / "data" / "predictions.csv"
    with table.open(newline="") as file:
        hashes = {row["run"]: row["sha256"] for row in csv.DictReader(file)}
    kept = {name for name in hashes if (ROOT / "results" / name).is_dir()}
    assert len(kept) >= 6
    for name in kept:
        read = predictions.read(ROOT / "results" / name)
        assert read is not None, name
        assert read[1] == hashes[name], name
