"""Figures are attributes, and plot() draws what the verbs' pages draw."""

import csv
import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.process import stepmark

import stepmark as sm
from stepmark.api.sweep import _swept as swept
from stepmark.cases.sweep import split_values
from stepmark.cli.main import status
from stepmark.traces.trace_messages_text import slow_rank

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
MODEL = "llama-3.1-8b"
QUEUED = [RESULTS / f"h200-x4-comm-queued-{number}" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def prediction() -> sm.Prediction:
    return sm.predict(MODEL, device="h200", nproc=8, strategy="fsdp", mbs=1)


def total(traces: Any) -> float:
    """Return the sum of the bars of a plotly figure."""
    return sum(float(value) for trace in traces for value in trace.x)


def test_figures_of_a_prediction_are_those_of_its_document(prediction: sm.Prediction) -> None:
    document = prediction.document
    for name in ("tokens_per_s", "tokens_per_s_gpu", "mfu_pct", "hfu_pct", "exposed_comm_s"):
        assert getattr(prediction, name) == document[name] > 0
    assert prediction.tokens_per_s == pytest.approx(8 * 8192 / prediction.step_s)
    assert prediction.bubble_s == 0
    assert prediction.interval is not None
    low_s, high_s = prediction.interval.low_s, prediction.interval.high_s
    assert low_s is not None
    assert high_s is not None
    assert low_s < prediction.step_s < high_s
    assert prediction.interval.coverage == 0.9
    assert prediction.ledger.rows() == prediction.rows() == document["ledger"]


def test_a_framework_s_step_is_that_of_the_command_line(tmp_path: Path) -> None:
    own = sm.predict(MODEL, framework="megatron", nproc=16, tp=2, gbs=32, device="h200")
    words = f"predict {MODEL} --framework megatron --nproc 16 --tp 2 --gbs 32 --device h200"
    stepmark(*words.split(), "--json", "p.json", cwd=tmp_path)
    document = json.loads(json.dumps(own.document))  # tuples as lists
    assert document == json.loads((tmp_path / "p.json").read_text())
    options: dict[str, Any] = {"nproc": 16, "gbs": 32, "device": "h200"}
    several = sm.predict(MODEL, framework="megatron", tp=[1, 2], **options)
    assert own.step_s in [row["step_s"] for row in several]
    assert len(several) == 2


def test_what_a_framework_s_step_refuses() -> None:
    of_8: dict[str, Any] = {"nproc": 8, "device": "h200", "use_distributed_optimizer": True}
    for framework in (None, "pytorch"):
        message = refused(lambda name=framework: sm.predict(MODEL, framework=name, **of_8))
        assert message.endswith("it works only with framework megatron.")
    assert "did you mean megatron?" in refused(lambda: sm.predict(MODEL, framework="megatrom"))
    own = sm.workload(MODEL, framework="fsdp", world_size=8)
    message = refused(lambda: sm.predict(own, framework="fsdp", device="h200"))
    assert "left out: the workload has its rules" in message


@pytest.mark.parametrize(
    ("mbs", "device", "verdict", "fits"),
    [
        (1, "h200", "fits", True),
        (2, "h200", "close", None),
        (2, "h100-sxm", "does not fit", False),
    ],
)
def test_a_close_fit_is_no_fit(mbs: int, device: str, verdict: str, fits: bool | None) -> None:
    memory = sm.predict(MODEL, device=device, nproc=8, strategy="fsdp", mbs=mbs).memory
    assert memory is not None
    assert (memory.verdict, memory.fits) == (verdict, fits)
    assert memory.reserved_bytes is not None
    assert memory.allocated_bytes < memory.reserved_bytes


def test_the_bars_of_a_ledger_add_up_to_its_step(prediction: sm.Prediction) -> None:
    figure = prediction.ledger.plot()
    assert total(figure.data) == pytest.approx(prediction.step_s * 1e3)
    assert figure.layout.title.text == "Ledger of the step by stage"


def test_figures_of_a_plan_are_those_of_its_best_layout() -> None:
    options = {"gbs": 64, "device": "h200", "jobs": 1, "framework": "pytorch"}
    options |= {"tp": [1, 2], "pp": 1, "mbs": 1, "recompute": "none"}
    one = sm.plan(MODEL, gpus=8, **options)
    best = one.best[0]
    for name in ("step_s", "tokens_per_s", "tokens_per_s_gpu", "mfu_pct"):
        assert getattr(one, name) == best[name] > 0
    assert one.memory is not None
    assert one.memory.reserved_bytes == best["reserved_bytes"]
    assert one.memory.fits is (best["verdict"] == "fits")
    several = sm.plan(MODEL, gpus=[8, 16], **options)
    assert len(several.best) == 2
    for number in (0, len(several) - 1):  # a row of each number of GPUs
        row = several.rows()[number]
        own = several.predict(number)
        assert own.document["num_ranks"] == row["gpus"]
        assert own.step_s == pytest.approx(row["step_s"])
    assert one.predict().step_s == pytest.approx(best["step_s"])
    assert list(one.plot().data[-1].y) == [row["step_s"] for row in one]
    assert several[:1].rows() == [several[0]] == several.best[:1]
    assert several[-1] == several.rows()[-1]
    assert (several.step_s, several.mfu_pct, several.memory) == (None, None, None)


def test_figures_of_a_comparison_are_those_of_its_only_other_side() -> None:
    graph = [RESULTS / f"h200-x4-comm-graph-{number}" for number in (1, 2, 3)]
    own = sm.compare({"queued": QUEUED, "graph": graph}, allow="method", placement="in")
    [mean] = own.overall.rows()
    assert (own.speed, own.low, own.high) == (mean["speed"], mean["low"], mean["high"])
    assert own.verdict == mean["verdict"]
    assert own.speed is not None
    assert own.speed > 1.05
    assert own.too_slow is None
    three = sm.compare(*QUEUED)
    assert len(three.overall) == 2
    assert (three.speed, three.verdict) == (None, None)


def test_unnamed_launches_of_a_side_have_a_short_name() -> None:
    own = sm.compare(QUEUED, QUEUED, allow="mbs,dtype")
    assert own.names == (
        "h200-x4-comm-queued-1 and 2 more",
        "h200-x4-comm-queued-1 and 2 more (2)",
    )


def test_a_limit_says_whether_something_is_too_slow() -> None:
    file = ROOT / "examples" / "frontier-rccl.txt"
    tcp, plugin = (f"{file}:{number}" for number in (2, 3))
    options: dict[str, Any] = {"placement": "in", "noise": "2%", "fail_if_slower": "5%"}
    assert sm.compare(tcp, plugin, **options).too_slow is False
    assert sm.compare(plugin, tcp, **options).too_slow is True
    untested = sm.compare(*QUEUED[:2], fail_if_slower="5%")
    assert untested.too_slow is None


def test_a_comparison_of_one_table_is_drawn_by_size_and_of_several_by_line() -> None:
    file = ROOT / "examples" / "frontier-rccl.txt"
    one = sm.compare(f"{file}:2", f"{file}:3", placement="in", noise="2%")
    sizes = [row["size_bytes"] for row in one]
    traces = one.plot().data
    assert [list(trace.x) for trace in traces] == [sizes, sizes, [], sizes]
    assert list(traces[-1].y) == [row["speed"] for row in one]
    several = sm.compare(*QUEUED[:2])
    [points] = several.plot().data
    assert len(points.x) == len(several)


def test_figures_of_a_trace_are_means_over_its_steps() -> None:
    own = sm.read_trace(ROOT / "tests/data/traces/fsdp8", ranks=[0, 1], jobs=1)
    rows = own.rows()
    for name in ("window_ns", "exposed_comm_ns", "idle_ns"):
        figure = {"window_ns": own.step_s}.get(name, getattr(own, name[:-2] + "s", None))
        mean = sum(int(str(row[name])) for row in rows) / len(rows) * 1e-9
        assert figure == pytest.approx(mean)
    assert own.step_s is not None
    assert sum(float(str(row["time_ns"])) for row in own.ledger) == pytest.approx(
        own.step_s * 1e9
    )
    bars = sum(sum(trace.y) for trace in own.plot().data)
    assert bars == pytest.approx(2 * own.step_s * 1e3)  # of two ranks
    assert {row["collective"] for row in own.messages} >= {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("name", ["cpu-only", "dlrm8", "mtia"])
def test_the_ledger_of_a_trace_adds_up_to_its_step(name: str) -> None:
    """Also without a GPU, where idle time has no cause, and without a step."""
    own = sm.read_trace(ROOT / "tests/data/traces" / name, jobs=1)
    total_ns = sum(float(str(row["time_ns"])) for row in own.ledger)
    assert total_ns == pytest.approx((own.step_s or 0.0) * 1e9)
    assert (own.step_s is None) == (name == "mtia")
    if own.step_s is None:
        with pytest.raises(sm.StepmarkError, match="no steps to plot"):
            own.plot()


@pytest.mark.parametrize(
    ("last", "slowest"), [((1, 3), 1), ((2, 2), None), ((0, 0), None), ((3,), None), ((), None)]
)
def test_the_slow_rank_arrives_last_in_most_calls(
    last: tuple[int, ...], slowest: int | None
) -> None:
    assert slow_rank(dict(enumerate(last))) == slowest


def test_figures_of_a_workload_are_of_all_ranks() -> None:
    own = sm.workload(MODEL, framework="megatron", world_size=4, pp=2, gbs=4, scale="tiny")
    rows = own.tables()["totals"].rows()
    job = next(row for row in rows if row["of"] == "job")
    assert (own.flops, own.comm_bytes) == (job["flops"], job["comm_bytes"])
    one = next(row for row in rows if row["of"] == "stages")
    assert own.flops == 2 * int(str(one["flops"]))  # two ranks in each of two stages


def test_sizes_of_a_workload_are_bars_that_add_up() -> None:
    own = sm.workload(MODEL, framework="fsdp", world_size=8)
    sent = sum(int(str(row["bytes"])) for row in own.tables()["sizes"])
    gib = sum(value for trace in own.plot().data for value in trace.y if value)
    assert gib == pytest.approx(sent / 2**30)
    alone = sm.workload(MODEL, framework="ddp", world_size=1, scale="tiny")
    with pytest.raises(sm.StepmarkError, match="has no messages to plot"):
        alone.plot()


def test_figures_of_a_run_are_those_of_its_training_step() -> None:
    own = sm.read_run("h200-x4-train-gpt2-1.5b-fsdp", runs=RESULTS)
    [row] = (row for row in own.rows() if row["rank"] is None)
    assert own.step_s == pytest.approx(8 * float(str(row["time_s"])))  # of 8 micro-batches
    for name in ("tokens_per_s", "tokens_per_s_gpu", "mfu_pct"):
        assert getattr(own, name) == row[name]
    assert own.steps == []
    operators = sm.read_run("h200-gemm-sustained-1", runs=RESULTS)
    assert (operators.step_s, operators.mfu_pct) == (None, None)
    several = sm.read_run("h200-predictions-1", runs=RESULTS)
    assert several.step_s is None


def test_steps_of_a_run_have_both_ledgers() -> None:
    own = sm.read_run("h100-run", runs=RESULTS)
    [step] = own.steps
    document = json.loads((RESULTS / "h100-run" / "prediction.json").read_text())
    predicted = document["predictions"][0]["prediction"]
    assert step.predicted_s == pytest.approx(predicted["step_s"])
    assert own.step_s == pytest.approx(step.step_s, rel=1e-3)
    for name, seconds in (("predicted_ns", step.predicted_s), ("measured_ns", step.step_s)):
        assert seconds is not None
        assert sum(int(str(row[name])) for row in step.ledger) == round(seconds * 1e9)
    bars = [total([trace]) for trace in step.ledger.plot().data]
    assert sum(bars) == pytest.approx(1e3 * (step.step_s + step.predicted_s))
    assert "measured 199 ms" in step.answer
    assert step.suggestions[0].command.startswith("stepmark train gpt2-1.5b ")


def test_without_plotly_it_says_what_to_install(
    prediction: sm.Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    rule = r"^plotly is not installed: use pip install 'stepmark\[notebook\]'\.$"
    with pytest.raises(ImportError, match=rule):
        prediction.ledger.plot()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {each.partition(">")[0] for each in extras["optional-dependencies"]["notebook"]}
    assert names == {"pandas", "plotly"}


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "examples" / "logs" / "megatron.log"
    own = sm.logs(file, model=sm.Model(MODEL), device="h200")
    done = stepmark(
        *("logs", str(file), "--model", MODEL, "--device", "h200", "--json", "w.json"),
        cwd=tmp_path,
    )
    expected = json.loads((tmp_path / "w.json").read_text())
    assert json.loads(json.dumps(own.document)) == expected
    source = expected["sources"][0]
    assert own.step_s == source["training"][0]["median"]
    assert own.mfu_pct == source["flops"][0]["mfu_pct"]
    assert (own.state, own.exit_code) == ("finished", done.returncode)
    assert own.answer == expected["answer"]["text"]
    assert own.steps.rows() == source["steps"]
    assert sum(len(trace.x) for trace in own.plot().data[:3]) >= len(own.steps)
    own.show()
    assert capsys.readouterr().out == done.stdout


def test_logs_of_a_failure_are_no_exception() -> None:
    own = sm.logs(ROOT / "tests/data/faults/dtype")
    assert (own.state, own.exit_code) == ("failed or hung", 1)
    assert "problem" in [row["severity"] for row in own]
    assert (own.step_s, own.mfu_pct) == (None, None)
    tables = sm.logs(ROOT / "tests/data/nccl-tests/8xH200-all_reduce.txt")
    assert (tables.answer, tables.state, tables.exit_code) == (None, None, 0)
    assert not tables.steps.rows()
    with pytest.raises(sm.StepmarkError, match="no steps to plot"):
        tables.plot()


def test_a_finished_sweep_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RESULTS / "h200-x4-sweep-all_reduce", tmp_path / "one")
    own = sm.sweep(resume="one", out=tmp_path)
    expected = json.loads((tmp_path / "one" / "sweep.json").read_text())
    assert len(own.settings) == len(expected["settings"])
    assert own.names[0] == expected["baseline"]
    assert len(own) == len(own.verdicts) > 0
    assert own.failed == {}
    capsys.readouterr()
    own.show()
    done = stepmark("sweep", "--resume", "one", "--out", ".", cwd=tmp_path)
    assert capsys.readouterr().out == done.stdout


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(sm.ConfigError) as raised:
        call()
    return str(raised.value)


def test_what_a_sweep_refuses_is_in_keywords() -> None:
    env = {"NCCL_ALGO": ["Ring", None]}
    assert refused(lambda: sm.sweep("comm all_reduce")).startswith("env is missing: give env ")
    assert "did you mean train?" in refused(lambda: sm.sweep("trian", env=env))
    assert "one of" in refused(lambda: sm.sweep("comm all_reduce", env=env, order="x"))
    assert "did you mean repeats?" in refused(lambda: sm.sweep("comm", env=env, repeat=3))
    for name in ("json", "emit_tuner", "dry_run"):
        assert "command line" in refused(lambda n=name: sm.sweep("comm", env=env, **{n: "x"}))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"ac": ["none", "full"]}, ["ac=none,full"]),
        ({"compile": [True, False], "mbs": range(1, 3)}, ["compile=on,off", "mbs=1,2"]),
        ({"NCCL_ALGO": ["Ring", None]}, ["NCCL_ALGO=Ring,"]),
        ({"NCCL_ALGO": "Ring,Tree", "mbs": 2}, ["NCCL_ALGO=Ring,Tree", "mbs=2"]),
        ({"PATHS": ["a,b", "c\\d"]}, [r"PATHS=a\,b,c\\d"]),
    ],
)
def test_values_of_a_sweep_are_python_s_own(
    values: dict[str, object], texts: list[str]
) -> None:
    assert swept(values) == texts
    parsed = [split_values(text.partition("=")[2]) for text in texts]
    assert parsed[-1][0] == {"PATHS": "a,b"}.get(next(iter(values)), parsed[-1][0])


@pytest.mark.ranks
def test_a_sweep_measures(tmp_path: Path) -> None:
    own = sm.sweep(
        ["op", "copy", "--num-bytes", "65536", "--device", "cpu", "--budget", "1s"],
        env={"MKL_NUM_THREADS": [1, None], "STEP_NAME": ["a,b"]},
        repeats=1,
        no_default=True,
        out=tmp_path,
    )
    assert own.settings == ("MKL_NUM_THREADS=1 STEP_NAME=a,b", "STEP_NAME=a,b")
    assert own.path.parent == tmp_path
    assert own.speed is not None
    assert repr(own).startswith("<Sweep of ")


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
def test_the_main_job(tmp_path: Path) -> None:
    own = sm.run(sm.Model(MODEL), scale="tiny", nproc=1, device="cpu", out=tmp_path)
    [step] = own.steps
    assert own.path.parent == tmp_path
    assert step.predicted_s is not None
    assert own.step_s == pytest.approx(step.step_s, rel=0.01)
    assert own.info.command.startswith("stepmark run llama-3.1-8b --scale tiny --nproc 1")
    with pytest.raises(sm.ConfigError, match=r"resume .* is no keyword here"):
        sm.run(resume="latest")


def test_waiting_in_a_pipeline_is_a_line_of_the_ledger() -> None:
    job = {"framework": "megatron", "nproc": 8, "gbs": 32, "device": "h200"}
    prediction = sm.predict(MODEL, pp=4, **job)
    rows = prediction.ledger.rows()
    slowest = max(row["stage"] for row in rows)  # with the head
    own = [row for row in rows if row["stage"] == slowest]
    seconds = {row["line"]: row["time_ns"] * 1e-9 for row in own}
    exposed_s = sum(row["time_ns"] for row in own if row["group"] == "exposed communication")
    assert exposed_s * 1e-9 == pytest.approx(prediction.exposed_comm_s) != 0
    assert seconds["waiting for other ranks"] == pytest.approx(prediction.bubble_s) != 0
    assert sum(seconds.values()) == pytest.approx(prediction.step_s)


def test_each_row_of_lists_has_its_prediction() -> None:
    job = {"framework": "megatron", "nproc": 8, "gbs": 32, "device": "h200"}
    rows = sm.predict(MODEL, pp=[1, 4], mbs=[1, 2], **job)
    for number, row in enumerate(rows):
        own = rows.predict(number)
        assert own.step_s == row["step_s"]
        assert own.document["contention_s"] == row["contention_s"]
        assert (own.document["mbs"], len(own.prediction.step.ledgers)) == (
            row["mbs"],
            row["pp"],
        )
    with pytest.raises(IndexError, match=r"row 4 is invalid: the number of rows is 4"):
        rows.predict(len(rows))


@pytest.mark.parametrize(
    "layout", [{"tp": 8}, {"pp": 4}, {"pp": 4, "vpp": 2}, {"tp": 2, "pp": 2}]
)
def test_python_json_csv_and_text_have_one_ledger(
    layout: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"framework": "megatron", "nproc": 8, "gbs": 32, "device": "h200", **layout}
    prediction = sm.predict(MODEL, **job)
    rows = prediction.rows()
    assert rows == prediction.document["ledger"]
    words = [f"--{name}={value}" for name, value in job.items()]
    files = [tmp_path / "p.json", tmp_path / "p.csv"]
    words += ["--stages", f"--json={files[0]}", f"--csv={files[1]}"]
    assert status(["predict", MODEL, *words]) == 0
    out = capsys.readouterr().out
    assert json.loads(files[0].read_text())["ledger"] == rows
    with files[1].open() as file:
        of_csv = [(row["line"], int(row["time_ns"])) for row in csv.DictReader(file)]
    assert of_csv == [(row["line"], row["time_ns"]) for row in rows]
    step = prediction.prediction.step
    for stage in range(layout.get("pp", 1)):
        own = [row for row in rows if row["stage"] == stage]
        assert sum(row["time_ns"] for row in own) == round(prediction.step_s * 1e9)
        assert all(f"{row['time_ns'] * 1e-6:.3f} " in out for row in own)
        exposed = sum(r["time_ns"] for r in own if r["group"] == "exposed communication")
        waiting = sum(r["time_ns"] for r in own if r["line"] == "waiting for other ranks")
        if stage == step.slowest:
            assert exposed == round(prediction.exposed_comm_s * 1e9)
            assert waiting == round((prediction.bubble_s or 0) * 1e9)
        assert bool(waiting) == ("pp" in layout)


def test_figures_of_a_training_run_and_notes_are_those_of_the_document() -> None:
    job = {"device": "h100-sxm", "nproc": 8, "strategy": "fsdp"}
    close = sm.predict(MODEL, tokens="15T", price="2/h", **job)
    assert close.notes == close.document["notes"]
    assert any("memory may run out" in note for note in close.notes)
    assert close.cost == pytest.approx(2 * (close.gpu_hours or 0))
    assert close.gpu_hours == pytest.approx(8 * 24 * (close.days or 0))
    assert sm.predict(MODEL, **job).days is None


def test_rows_that_are_not_there_are_named() -> None:
    plan = sm.plan(MODEL, gpus=16, gbs=64, device="h200")
    for call in (plan.predict, plan.__getitem__):
        with pytest.raises(IndexError, match=f"row 500 is invalid: .* is {len(plan)}"):
            call(500)
    with pytest.raises(IndexError, match="row 1 is invalid: the number of rows is 1"):
        plan.plot(1)
