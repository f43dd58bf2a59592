"""stepmark trace ledger, and the ledger of a training case without the profiler's cost."""

import csv
import hashlib
import io
import json
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.traces.comm_traces import TraceWriter
from tests.training.train_records import fsdp, micro, train_measured, train_run

from stepmark.cases.case import Label
from stepmark.cases.plan import STEP_LAUNCH
from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.predictions.interval import Interval
from stepmark.runs import step_report
from stepmark.runs.step_ledger import measured_ledger
from stepmark.store import predictions
from stepmark.store.runs import RunWriter
from stepmark.store.view import view
from stepmark.timeline.ledger import WAITING, Group, Ledger, without_profiler

pytestmark = pytest.mark.ranks

EARLY, LATE = "2020-01-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00"
FSDP8 = Path(__file__).parents[1] / "data" / "traces" / "fsdp8"


def traced(
    folder: Path, samples_s: list[float], case: TrainCase | None = None, *, marks: bool = True
) -> Measured:
    """Return a record with traces of two ranks: steps of 1, 1.2 and 1.1 ms.

    Rank 1 works for 0.5 ms, rank 0 for 0.4 ms; then they communicate.
    """
    for rank in (0, 1):
        writer = TraceWriter(rank=rank, world_size=2)
        at = 0.0
        for number, took in enumerate((1000, 1200, 1100)):
            if marks:
                writer.step(number, at, took)
            work = 400 + 100 * rank
            writer.kernel("gemm", at + 50, at + 60, work)
            writer.collective("allreduce", 8, 8, at + 70, at + 60 + work, took - 60 - work)
            at += took
        writer.write(folder / "traces")
    record = train_measured(case or fsdp(2), [samples_s, [0.9 * s for s in samples_s]])
    assert record.training is not None
    training = replace(record.training, traces=("rank0.json", "rank1.json"))
    return replace(record, training=training)


def test_the_profilers_cost_is_taken_off(tmp_path: Path) -> None:
    """Of the median step, of the rank that works the longest; lines add up to the real step."""
    own = measured_ledger(tmp_path, traced(tmp_path, [1.08e-3] * 3))
    assert (own.rank, own.num_ranks, own.step, own.num_steps) == (1, 2, 2, 3)
    assert own.profiled is not None
    assert (own.profiled.window_ns, own.ledger.window_ns) == (1_100_000, 1_080_000)
    assert own.profiled.lines[Group.IDLE, "host"] == 51_000
    assert own.ledger.lines == {**own.profiled.lines, (Group.IDLE, "host"): 31_000}
    assert own.ledger.within == {"transfer": 540_000, WAITING: 0, "recomputed": 0}


def test_a_step_is_a_whole_cycle(tmp_path: Path) -> None:
    """The optimizer, in one of four samples, counts; what no line explains is idle."""
    record = traced(tmp_path, [1e-3, 1e-3, 1e-3, 5e-3] * 2, micro(2))
    own = measured_ledger(tmp_path, record).ledger
    assert own.window_ns == 8_000_000
    assert own.lines[Group.IDLE, "unexplained"] == 8_000_000 - 1_100_000


@pytest.mark.parametrize(
    ("step_ns", "idle"),
    [
        (1000, {"host": 50, "launch gap": 30, "data": 20}),
        (960, {"host": 10, "launch gap": 30, "data": 20}),
        (930, {"launch gap": 10, "data": 20}),
        (905, {"data": 5}),
        (870, {"unexplained": -30}),
        (1070, {"host": 50, "launch gap": 30, "data": 20, "unexplained": 70}),
    ],
)
def test_the_host_pays_for_the_profiler_first(step_ns: int, idle: dict[str, int]) -> None:
    lines = {(Group.IDLE, "host"): 50, (Group.IDLE, "launch gap"): 30, (Group.IDLE, "data"): 20}
    busy = {(Group.COMPUTE, "matmul"): 900}
    closed = without_profiler(Ledger(window_ns=1000, lines=lines | busy), step_ns)
    assert closed.lines == busy | {(Group.IDLE, cause): ns for cause, ns in idle.items()}


def test_what_has_no_step_is_refused(tmp_path: Path) -> None:
    record = traced(tmp_path, [1e-3], marks=False)
    with pytest.raises(ConfigError, match="marks of its steps"):
        measured_ledger(tmp_path, record)
    with pytest.raises(ConfigError, match="the run was kept without it"):
        measured_ledger(tmp_path / "other", record)
    assert record.training is not None
    bare = replace(record, training=replace(record.training, traces=()))
    with pytest.raises(ConfigError, match="profile is missing: give train --profile"):
        measured_ledger(tmp_path, bare)


def test_a_trace_of_another_step_is_refused_or_noted(tmp_path: Path) -> None:
    record = traced(tmp_path, [1.08e-3] * 3)
    training = record.training
    assert training is not None
    assert not measured_ledger(tmp_path, record).notes
    for samples_s in ([1.3e-3] * 3, [0.3e-3] * 3):  # no profiler makes steps so much faster
        slower = replace(record, samples=replace(record.samples, seconds=(tuple(samples_s),)))
        (note,) = measured_ledger(tmp_path, slower).notes
        assert "the trace may be of another step" in note
    files = [tmp_path / "traces" / name for name in training.traces]
    hashes = tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    record = replace(record, training=replace(training, trace_sha256=hashes))
    assert measured_ledger(tmp_path, record)
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(ConfigError, match=r"rank1.json is invalid: .* changed or replaced"):
        measured_ledger(tmp_path, record)


def written(folder: Path, samples_s: list[float], case: TrainCase, **changes: Any) -> Path:
    """Write a run of one profiled step. changes: of its record."""
    folder.mkdir()
    info = replace(train_run(2), run_id=folder.name)
    with RunWriter.begin(folder, info) as writer:
        record = replace(traced(folder, samples_s, case), run_id=folder.name, **changes)
        writer.append(record)
    return folder


def test_traces_of_a_run_are_those_of_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`stepmark run` has those of its calibration, too, which are other windows of a rank."""
    path = tmp_path / "20260101-000000-aaaa"
    step = traced(path, [1.08e-3] * 3, fsdp(2))
    assert step.training is not None
    part = replace(step.training, traces=("part-rank0.json", "part-rank1.json"))
    case = replace(fsdp(2, clip=0.0), labels=(Label(role="kernels"),))
    for rank in (0, 1):
        own = path / "traces" / f"rank{rank}.json"
        (path / "traces" / f"part-rank{rank}.json").write_bytes(own.read_bytes())
    info = replace(train_run(2), run_id=path.name)
    with RunWriter.begin(path, info) as writer:
        for record in (replace(step, case=case, training=part), step):
            writer.append(replace(record, run_id=path.name))
    for place in (path, path / "traces"):
        assert status(["trace", "ledger", str(place)]) == 0
        assert "steps 0-2 of ranks 0-1" in capsys.readouterr().out


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path / "20260101-000000-aaaa", [1.08e-3] * 3, fsdp(2))
    second = written(tmp_path / "20260101-000000-bbbb", [1.05e-3] * 3, fsdp(2, clip=0.0))
    assert status(["report", str(first), str(second)]) == 0
    page = first / f"report-{second.name}.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    assert f"A: {first.name}; B: {second.name}" in text
    assert re.search(r"\n    host +0\.031 +0\.001 +-0\.030 +-2\.9\n", text)
    assert status(["report", str(first)]) == 0
    assert (first / "report.html").exists()
    assert status(["report", str(first), str(second), "-o", f"{tmp_path}/"]) == 0
    assert (tmp_path / page.name).exists()


def test_runs_without_a_common_step_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = written(tmp_path / "20260101-000000-aaaa", [1.08e-3] * 3, fsdp(2))
    other = tmp_path / "20260101-000000-bbbb"
    other.mkdir()
    with RunWriter.begin(other, replace(train_run(2), run_id=other.name)) as writer:
        writer.append(train_measured(fsdp(2), [[1.0], [1.0]]))
    assert status(["report", str(first), str(other)]) == 2
    assert "a run with a profiled training step of a case that" in capsys.readouterr().err


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert status(["trace", "ledger", str(FSDP8), "--jobs", "1", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_lines_of_traces_add_up_to_their_windows(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "--json", "-"))
    sums: Counter[tuple[int, int, int]] = Counter()
    for row in document["rows"]:
        key = row["rank"], row["step"], row["window_ns"]
        sums[key] += 0 if row["is_part"] else row["time_ns"]
    assert len(sums) == 16
    assert all(total == window for (_, _, window), total in sums.items())
    assert any("outside the windows" in note for note in document["notes"])
    rows = list(csv.DictReader(io.StringIO(run(capsys, "--steps", "6", "--csv", "-"))))
    waits = {row["rank"]: int(row["time_ns"]) for row in rows if row["line"].startswith("wait")}
    assert 20 * waits.pop("7") < min(waits.values())
    assert {row["group"] for row in rows if row["is_part"] == "True"} == {"within"}


def test_the_text_has_groups_and_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys).splitlines()
    assert lines[0].startswith("steps 5-6 of ranks 0-7, in ms ")
    assert lines[0].split()[-5:] == ["mean", "share", "min", "median", "max"]
    assert lines[1].split() == [
        "step",
        "102.744",
        "100.0",
        "%",
        "100.892",
        "102.551",
        "103.315",
    ]
    titles = [line[:30].rstrip() for line in lines]
    place = titles.index("  exposed communication")
    assert titles[place + 1 : place + 3] == ["    all_gather", "    reduce_scatter"]
    assert "Definitions: docs/traces.md." in lines


INTERVAL = Interval(low_s=0.9e-3, high_s=1.1e-3, num_rows=4, basis="rows", coverage=0.8)


def predicted(
    folder: Path, created_at: str, interval: object = asdict(INTERVAL)
) -> tuple[Path, str]:
    """Write a run of one profiled step whose committed prediction is 1 ms; return its hash."""
    path = written(folder, [1.08e-3] * 3, fsdp(2), launch=STEP_LAUNCH, started_at=1.7e9)
    lines = (("compute", "matmul", 600_000), ("exposed communication", "all_reduce", 400_000))
    ledger = [
        {"stage": 0, "group": group, "line": line, "time_ns": time_ns}
        for group, line, time_ns in lines
    ]
    known = {"step_s": 1e-3, "bound": "device", "device": "H200", "interval": interval}
    power = dict.fromkeys(("clock_hz", "power_w", "energy_j"))
    parts = [{"stage": 0, "part": WAITING, "time_ns": 100_000}]
    entry = {**known, **power, "memory": None, "ledger": ledger, "ledger_parts": parts}
    document = {
        "version": 1,
        "created_at": created_at,
        "predictions": [
            {"case_id": fsdp(2).case_id, "problem": "", "prediction": entry},
        ],
    }
    return path, predictions.commit(path, document)


@pytest.mark.parametrize(
    ("created_at", "when"),
    [(EARLY, "before"), (LATE, "after the start of")],
    ids=["early", "late"],
)
def test_the_page_of_a_predicted_step(
    tmp_path: Path, created_at: str, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, digest = predicted(tmp_path / "20260101-000000-aaaa", created_at)
    assert status(["report", str(path)]) == 0
    capsys.readouterr()
    html = (path / "report.html").read_text()
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert titles[0].startswith("Lines of ")
    assert titles[1] == "Prediction"
    assert titles[2].startswith("Samples: ")
    (headline,) = re.findall("<h1>(.*?)</h1>", html)
    assert headline.endswith(f"measured 1.08 ms, predicted 1 ms (7.4 % too low; {INTERVAL})")
    assert html.index(headline) < html.index('aria-label="Ledger of ') < html.index("<nav>")
    assert f"committed {when} the measurement, {created_at[:10]} 00:00:00 UTC, and not" in html
    assert digest in html
    assert re.search(r"\n    matmul +0\.600 +0\.\d+ ", html)
    assert re.search(rf"\nof which {WAITING} +0\.100 +0\.000 +-0\.100 ", html)
    assert "sum of absolute differences" in html
    assert status(["runs", "show", str(path)]) == 0
    sentence = capsys.readouterr().out.splitlines()[-1]
    assert f"measured 1.08 ms, predicted 1 ms (7.4 % too low; {INTERVAL}); " in sentence
    (path / "traces" / "rank1.json").unlink()
    assert status(["report", str(path)]) == 0
    html = (path / "report.html").read_text()
    assert f"measured 1.1 ms, predicted 1.0 ms ({INTERVAL})" in html
    assert "Ledger of" not in html


@pytest.mark.parametrize(
    ("interval", "words"),
    [("no interval: 0 rows", ""), (None, ""), (asdict(INTERVAL), f"; {INTERVAL}")],
)
def test_the_interval_of_older_predictions_is_text(
    tmp_path: Path, interval: object, words: str
) -> None:
    path, _ = predicted(tmp_path / "20260101-000000-aaaa", EARLY, interval)
    report = step_report.step_report(path, view(path))
    assert report is not None
    assert f"predicted 1 ms (7.4 % too low{words})" in report.steps[0].sentence


def test_the_page_of_a_prediction_that_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, digest = predicted(tmp_path / "20260101-000000-aaaa", EARLY)
    file = path / predictions.FILE
    file.write_text(file.read_text().replace("0.001", "0.00108"))
    assert status(["report", str(path)]) == 0
    assert "it was changed since" in capsys.readouterr().err
    assert status(["runs", "show", str(path)]) == 2
    assert "it was changed since" in capsys.readouterr().err
    html = (path / "report.html").read_text()
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert not any(title.startswith(("Lines of", "Prediction")) for title in titles)
    assert html.index('class="warning"') < html.index("<nav>")
    assert f"committed (sha256 {digest[:16]}): it was changed since" in html
    assert "predicted 1" not in html


@pytest.mark.parametrize(("name", "is_hot"), [("1", False), ("3", True)])
def test_a_gpu_that_heat_slowed_down_is_named(name: str, is_hot: bool) -> None:
    run = Path(__file__).parents[2] / "results" / f"h100-x4-predictions-{name}"
    report = step_report.step_report(run, view(run))
    assert report is not None
    notes = [note for note in report.notes if "heat slowed down" in note]
    assert bool(notes) is is_hot
    assert all("GPU of rank 3 (" in note for note in notes)
