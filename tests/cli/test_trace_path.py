"""stepmark trace critical-path on the command line."""

import json
from pathlib import Path

import pytest

from stepmark.cli.main import status

DATA = Path(__file__).parents[1] / "data" / "traces"


def test_text_and_json_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "path.json"
    words = [str(DATA / "fsdp8"), "--ranks", "0,7", "--jobs", "1"]
    assert status(["trace", "critical-path", *words, "--steps", "5-6"]) == 0
    text = capsys.readouterr().out
    assert "step 6, rank 7: 100.892 ms" in text
    assert "launch path on the host" in text
    assert "host-bound in a breakdown counts only" in " ".join(text.split())
    assert "clocks of ranks are set by the ends of common collectives" in " ".join(text.split())
    assert "no trace of ranks 1-6" in text
    assert status(["trace", "critical-path", *words, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert {row["step"] for row in document["categories"]} == {6}
    for table in ("categories", "names"):
        assert sum(row["time_ns"] for row in document[table]) == 100891910
    (path,) = document["paths"]
    assert path["end_ns"] - path["start_ns"] == 100891910
    assert (path["rank"], path["absent_ranks"]) == (7, [1, 2, 3, 4, 5, 6])
    spans = [row["end_ns"] - row["start_ns"] for row in document["segments"]]
    assert sum(spans) == 100891910


def test_a_trace_without_steps_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["trace", "critical-path", str(DATA / "hip-graph")]) == 0
    assert capsys.readouterr().out.startswith("whole trace, rank 0: 473.750 ms")


def test_a_trace_without_gpu_events_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["trace", "critical-path", str(DATA / "cpu-only")]) == 2
    assert "traces with GPU events" in capsys.readouterr().err
