"""What a verb shows and ends with, over ranks that write made-up records."""

import dataclasses
import json
from pathlib import Path

import pytest
from tests.collectives.comm_records import comm_case
from tests.store.writers import new_run
from tests.tables.records import COPY, measured, run_info
from tests.training.train_records import single

from stepmark.cases.plan import Plan, entries
from stepmark.cases.record import AnyCase, Record, Skipped
from stepmark.cli.main import status
from stepmark.collectives.comm_options import CommOptions
from stepmark.ground.options import plain
from stepmark.measuring import measure
from stepmark.operators import op
from stepmark.operators.op_options import options_class
from stepmark.runs.run_options import RunOptions
from stepmark.store import plans
from stepmark.store.runs import RunWriter
from stepmark.training.train_options import CalibrateOptions, TrainOptions


def write(run: Path, record: Record) -> None:
    with RunWriter.begin(run, dataclasses.replace(run_info(), run_id=run.name)) as writer:
        writer.append(dataclasses.replace(record, run_id=run.name))


def measure_with(
    record: Record, command: str, options: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Measure on ranks that write this record, while another process makes a later run."""

    def ranks(plan: Plan, run: Path, plan_file: Path, *, force: bool) -> int:
        write(run, record)
        info = dataclasses.replace(run_info(), run_id="99991231-235959-ffff")
        with new_run(folder, info) as writer:
            writer.append(dataclasses.replace(measured(COPY, 777.0), run_id=info.run_id))
        plans.write(folder / info.run_id, plan)
        return 0

    monkeypatch.setattr(measure, "_supervise", ranks)
    plan = Plan(
        command=command,
        device="cpu",
        world_size=1,
        entries=entries([record.case]),
        options=plain(options),
    )
    return measure.measure(lambda: plan, "cpu", str(folder))


VERBS: dict[str, tuple[object, AnyCase]] = {
    "op": (options_class("copy")(), COPY),
    "comm": (CommOptions(), comm_case()),
    "train": (TrainOptions(model="llama-3.1-8b"), single()),
    "run": (RunOptions(), COPY),
    "calibrate": (CalibrateOptions(model="llama-3.1-8b"), single()),
}


@pytest.mark.parametrize("command", VERBS)
def test_a_run_in_which_all_is_skipped_ends_with_3(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, case = VERBS[command]
    skipped = Skipped(run_id="", case=case, reason="no GPU")
    assert measure_with(skipped, command, options, tmp_path, monkeypatch) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("nothing was measured: every case was skipped") == 1
    assert not any("resume" in line for line in lines)


def test_a_search_in_which_all_is_skipped_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quietly(plan: Plan, out: str, settings: object) -> tuple[int, Path]:
        run = tmp_path / "search"
        run.mkdir()
        plans.write(run, plan)
        write(run, Skipped(run_id="", case=plan.entries[0].case, reason="no GPU"))
        return 0, run

    monkeypatch.setattr(op, "measure_quietly", quietly)
    assert op.find_max(options_class("gemm")(family="gemm", device="cpu", find_max=True)) == 3


def test_a_plan_of_which_all_is_left_out_ends_with_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "comm all_reduce -d fp8_e4m3,bf16 -o all --agg-iters 2 --nproc 2 --device cpu"
    assert status(words.split()) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stepmark: nothing to measure: left out: ")


@pytest.mark.parametrize("command", ["op", "run"])
def test_a_run_of_another_process_is_not_shown(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "rows.json"
    options = RunOptions() if command == "run" else options_class("copy")(json=str(target))
    assert measure_with(measured(COPY, 1e-3), command, options, tmp_path, monkeypatch) == 0
    written = capsys.readouterr().out
    if command == "op":
        (row,) = json.loads(target.read_text())["rows"]
        assert row["time_s"] == 1e-3
    assert ("1 ms" if command == "op" else "copy 2147 GB/s") in written
    assert "777 s" not in written
    assert not (tmp_path / "99991231-235959-ffff" / "report.html").exists()
