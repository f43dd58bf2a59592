"""Objects have the figures of the command line, and show() prints its text."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.process import stepmark

import stepmark as sm

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
TRACES = ROOT / "tests" / "data" / "traces" / "fsdp8"
GENERATE = {"framework": "fsdp", "world_size": 4, "tp": 2, "mbs": 2, "scale": "tiny"}
WORDS = "workload generate --model llama-3.1-8b --framework fsdp --world-size 4 --tp 2 --mbs 2"
MODEL = "llama-3.1-8b"


def printed(words: str, folder: Path) -> str:
    done = stepmark(*words.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(words: str, folder: Path) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(printed(f"{words} --json -", folder))
    return plain


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value, default=str))


def test_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, words = sm.workload(sm.Model(MODEL), **GENERATE), f"{WORDS} --scale tiny"
    tables = {name: table.rows() for name, table in own.tables().items()}
    assert as_json(tables) == document(words, tmp_path)
    own.show()
    assert capsys.readouterr().out == printed(words, tmp_path)
    for name, format in (("w.json", "native"), ("w.csv", "aicb"), ("w.txt", "simai")):
        own.write(tmp_path / f"own-{name}", format)
        printed(f"{words} --format {format} -o {name}", tmp_path)
        assert (tmp_path / f"own-{name}").read_bytes() == (tmp_path / name).read_bytes()
    again = sm.read_workload(tmp_path / "w.json")
    assert again.rows() == own.rows()
    assert again.world_size == own.world_size == 4


def test_operations_are_those_of_the_csv(tmp_path: Path) -> None:
    own = sm.workload(MODEL, framework="megatron", pp=2, world_size=4, gbs=8, scale="tiny")
    printed(
        f"workload generate --model {MODEL} --framework megatron --pp 2 --world-size 4 --gbs 8 "
        "--scale tiny --format csv -o w.csv",
        tmp_path,
    )
    lines = list(csv.DictReader(io.StringIO((tmp_path / "w.csv").read_text())))
    rows = own.rows()
    assert len(rows) == len(own) == len(lines) > 100
    same = set(lines[0]) - {"time_us"}
    for row, line in zip(rows, lines, strict=True):
        assert {k: "" if row[k] is None else str(row[k]) for k in same} == {
            k: line[k] for k in same
        }
    assert list(own.ops(1)) == [row for row in rows if row["stage"] == 1]
    flops = sum(row["flops"] or 0 for row in own.ops(0) if row["operation"] == "gemm")
    assert flops == sum(
        row["flops"] for row in own.tables(0)["computation"] if row["family"] == "gemm"
    )


def test_a_stage_that_is_not_there_is_refused() -> None:
    own = sm.workload(MODEL, framework="megatron", pp=2, world_size=2, scale="tiny")
    assert "2 ranks, 2 pipeline stages" in repr(own)
    for call in (own.ops, own.tables):
        with pytest.raises(sm.ConfigError, match="stage 2 is invalid: it must be from 0 to 1"):
            call(2)


def test_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"predict {MODEL} --device h200 --nproc 8 --strategy fsdp --mbs 2 --what-if link=2x"
    own = sm.predict(
        sm.Model(MODEL), device="h200", nproc=8, strategy="fsdp", mbs=2, what_if="link=2x"
    )
    expected = document(words, tmp_path)
    assert as_json(own.document) == expected
    assert own.step_s == expected["step_s"]
    assert as_json(own.rows()) == expected["ledger"]
    assert sum(int(str(row["time_ns"])) for row in own) == pytest.approx(own.step_s * 1e9)
    assert own.memory is not None
    assert own.memory.allocated_bytes == expected["memory"]["allocated_bytes"]
    own.show()
    assert capsys.readouterr().out == printed(words, tmp_path)
    assert "predicted step" in own._repr_html_()
    assert {type(value) for row in own for value in row.values()} == {int, float, str}


def test_prediction_of_a_workload(tmp_path: Path) -> None:
    own = sm.workload(MODEL, **GENERATE)
    own.write(tmp_path / "w.json")
    expected = document("predict w.json --device h200", tmp_path)
    prediction = sm.predict(own, device="h200")
    assert as_json(prediction.document) == expected
    assert prediction.memory is not None
    assert prediction.memory.allocated_bytes == expected["memory"]["allocated_bytes"]


def test_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queued = [RESULTS / f"h200-x4-comm-queued-{number}" for number in (1, 2, 3)]
    graph = [RESULTS / f"h200-x4-comm-graph-{number}" for number in (1, 2, 3)]
    own = sm.compare({"queued": queued, "graph": [*map(sm.read_run, graph)]}, allow="method")
    texts = [",".join(map(str, paths)) for paths in (queued, graph)]
    words = f"compare queued={texts[0]} graph={texts[1]} --allow method"
    expected = document(words, tmp_path)
    assert as_json(own.rows()) == expected["lines"]
    assert as_json(own.overall.rows()) == expected["overall"]
    assert own.names == ("queued", "graph")
    assert own.verdicts == [row["verdict"] for row in own.rows()]
    assert "faster" in own.verdicts
    assert "faster" in own._repr_html_()
    own.show()
    assert capsys.readouterr().out == printed(words, tmp_path)


def test_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = sm.read_trace(TRACES, ranks=[0, 1], jobs=1)
    words = f"trace breakdown {TRACES} --ranks 0,1"
    expected = document(words, tmp_path)
    tables = {name: table.rows() for name, table in own.tables.items()}
    assert as_json(tables) == {name: expected[name] for name in tables}
    assert own.rows() == own.tables["steps"].rows()
    assert list(own.missing_ranks) == expected["missing_ranks"]
    own.show()
    assert capsys.readouterr().out == printed(words, tmp_path)
    assert "took" in own._repr_html_()


@pytest.mark.parametrize(
    "name", ["h200-gemm-sustained-1", "h200-x4-comm-queued-1", "h200-x4-train-gpt2-1.5b-fsdp"]
)
def test_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = sm.read_run(name, runs=RESULTS)
    words = f"runs show {RESULTS / name}"
    expected = document(words, tmp_path)
    assert as_json(own.rows()) == expected["rows"]
    assert own.info.run_id == sm.read_run(RESULTS / name).info.run_id
    capsys.readouterr()
    own.show()
    assert capsys.readouterr().out == printed(words, tmp_path)
    assert own.info.environment.devices[0].name in own._repr_html_()


def test_models() -> None:
    model = sm.Model(MODEL)
    assert (model.num_params, model.num_layers, model.num_experts) == (8030261248, 32, 0)
    assert repr(model).startswith("Model('llama-3.1-8b'): 8.03 billion")
    file = sm.Model(ROOT / "examples" / "hf" / "qwen3-30b-a3b")
    assert (file.num_layers, file.num_experts) == (48, 128)
    experts = sm.Model("mixtral-8x7b")
    assert experts.num_experts == 8
    assert experts.num_active_params < experts.num_params / 3
