"""Options with lists: one table, whose rows are those of single commands."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stepmark as sm
from stepmark.cli.main import status

JOBS = {
    "predict gpt2-125m --seq-len 256 --strategy fsdp": {
        "nproc": ("4", "8"),
        "mbs": ("1", "2", "3"),
        "ac": ("none", "full", "1/2"),
        "precision": ("amp", "bf16"),
        "device": ("h100-sxm", "b200"),
    },
    "predict gpt2-125m --framework megatron --num-layers 4 --seq-len 256 --tokens 1T": {
        "nproc": ("8", "16"),
        "tp": ("1", "2", "5"),
        "pp": ("1", "2"),
        "gbs": ("32", "64"),
        "recompute-granularity": ("none", "selective"),
        "device": ("h100-sxm", "mi300x"),
        "network": ("dgx-h100", "p5"),
    },
}
FIXED = {"nproc": "8", "device": "h100-sxm"}
SAME = ("step_s", "tokens_per_s_gpu", "mfu_pct", "days", "exposed_comm_s", "is_lower_bound")

Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def called(words: str) -> tuple[int, str, str]:
        code = status(words.split())
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return called


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_row_is_what_its_command_says(call: Call, data: st.DataObject) -> None:
    """Every combination is a row or is refused, with the figures or the sentence of its own."""
    job = data.draw(st.sampled_from([*JOBS]))
    names = data.draw(
        st.lists(st.sampled_from([*JOBS[job]]), min_size=1, max_size=3, unique=True)
    )
    lists = {
        name: data.draw(st.lists(st.sampled_from(JOBS[job][name]), min_size=1, unique=True))
        for name in names
    }
    given_words = {**{name: [word] for name, word in FIXED.items()}, **lists}
    axes = {name.replace("-", "_"): v for name, v in given_words.items() if len(v) > 1}
    if not axes:
        return
    flags = " ".join(f"--{name} {','.join(words)}" for name, words in given_words.items())
    code, out, _ = call(f"{job} {flags} --json -")
    grid = json.loads(out) if code == 0 else {"rows": [], "refused": []}
    places = set()
    for row in (*grid["rows"], *grid["refused"]):
        place = {name: str(row[name]) for name in axes}
        places.add(tuple(place.values()))
        words = {n: place.get(n.replace("-", "_"), v[0]) for n, v in given_words.items()}
        one = " ".join(f"--{name} {word}" for name, word in words.items())
        code_of_one, out, err = call(f"{job} {one} --json -")
        if "reason" in row:
            assert (code_of_one, err) == (2, f"stepmark: {row['reason']}\n")
            continue
        single = json.loads(out)
        assert {name: row[name] for name in SAME} == {name: single[name] for name in SAME}
        assert row["verdict"] == single["memory"]["verdict"]
        assert row["allocated_bytes"] == single["memory"]["allocated_bytes"]
        assert grid["notes"].keys() >= set(single["notes"])
    assert code == 2 or len(places) == math.prod(map(len, axes.values()))


TABLE = "predict llama-3.1-8b --nproc 16 --device h100-sxm,b200 --tp 1,2 --mbs 1,3"


def test_the_answer_is_the_fastest_row_that_fits(call: Call) -> None:
    _, out, _ = call(f"{TABLE} --json -")
    grid = json.loads(out)
    fitting = [row for row in grid["rows"] if row["verdict"] == "fits"]
    fastest = max(fitting, key=lambda row: row["tokens_per_s_gpu"])
    assert grid["best"] == grid["rows"][0] == fastest
    ranks = ["fits", "close", "does not fit"]
    order = [(ranks.index(row["verdict"]), -row["tokens_per_s_gpu"]) for row in grid["rows"]]
    assert order == sorted(order)
    assert order[-1][0] == 2
    code, out, _ = call(TABLE)
    assert code == 0
    (
        first,
        *_,
    ) = out.splitlines()
    place = f"device {fastest['device']}, tp {fastest['tp']}, mbs {fastest['mbs']}"
    assert first.startswith("llama-3.1-8b fsdp: fastest per GPU that fits of 8 combinations: ")
    assert place in first
    assert f"{fastest['tokens_per_s_gpu']:,.0f} tokens/s/GPU" in first


def test_the_cheapest_of_devices_with_prices(call: Call) -> None:
    """A price that makes the slower device the cheaper one."""
    prices = "--tokens 1T --price h100-sxm=1/h,b200=9/h"
    _, out, _ = call(f"{TABLE} {prices} --json -")
    best = json.loads(out)["best"]
    costs = [row["cost"] for row in json.loads(out)["rows"] if row["verdict"] == "fits"]
    assert best["device"] == "h100-sxm"
    assert best["cost"] == min(costs)
    _, out, _ = call(f"{TABLE} {prices}")
    assert "cheapest that fits of 8 combinations" in out
    _, out, _ = call(
        "predict llama-3.1-8b --device h100-sxm --nproc 8,16 --tokens 1T --price 1/h"
    )
    assert "fastest per GPU that fits" in out


def test_nothing_fits(call: Call) -> None:
    code, out, _ = call("predict llama-3.1-8b --device l40s --nproc 2 --mbs 1,2")
    assert code == 0
    assert out.startswith("llama-3.1-8b fsdp: none of 2 combinations fits: the least memory is")
    assert out.splitlines()[0].endswith("with mbs 1")


def test_what_is_refused_is_counted(call: Call) -> None:
    code, out, _ = call("predict llama-3.1-8b --device h200 --nproc 8,16,32 --tp 1,3")
    assert code == 0
    (refused,) = (line for line in out.splitlines() if "refused" in line)
    assert refused.startswith("3 refused, for example: --nproc 8 is invalid")
    code, out, err = call("predict llama-3.1-8b --device h200 --nproc 8,16 --tp 3")
    assert (code, out) == (2, "")
    assert err == "stepmark: --nproc 8 is invalid: it must be a multiple of --tp (3).\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--html x.html", "--html x.html is invalid: it must be left out with lists (--tp)"),
        ("--timeline x", "--timeline x is invalid"),
        ("--measured 2s", "--measured 2s is invalid"),
        ("--device h200,h20000", "--device h20000 is invalid: did you mean"),
        ("--network p5,p55", "--network p55 is invalid"),
        ("--mbs 1,x", "--mbs 1,x is invalid: it must be whole numbers"),
        ("--price 2/h", "--price 2/h is invalid: it works only with --tokens"),
        ("--compile-scope block,loss", "--compile-scope block,loss is invalid"),
    ],
)
def test_refusals(words: str, expected: str, call: Call) -> None:
    device = "" if "--device" in words else "--device h200"
    code, _, err = call(f"predict llama-3.1-8b {device} --nproc 8 --tp 1,2 {words}")
    assert code == 2
    assert expected in err


def test_rows_are_written(call: Call, tmp_path: Path) -> None:
    code, _, _ = call(f"{TABLE} --csv {tmp_path}/rows.csv")
    assert code == 0
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert {row["device"] for row in rows} == {"h100-sxm", "b200"}


def test_energy_is_shown_where_power_is_known(call: Call) -> None:
    root = Path(__file__).parents[2]
    run = f"predict --from-run {root}/results/h100-run --mbs 4,8"
    code, out, _ = call(run)
    assert code == 0
    (head,) = (line for line in out.splitlines() if "tokens/s/GPU  MFU" in line)
    assert head.split()[-1] == "mJ/token"
    _, single, _ = call(run.replace("4,8", "8"))
    energy = single.partition(" mJ per token")[0].split()[-1]
    (row,) = (line for line in out.splitlines() if line.startswith("  8 "))
    assert row.split()[-1] == energy


def test_a_table_has_80_columns(call: Call) -> None:
    layout = "--framework megatron --nproc 1024 --tp 4,8 --pp 4 --gbs 2048"
    _, out, _ = call(f"predict llama-3.1-70b {layout} --device h100-sxm,b200 --tokens 15T")
    start = out.splitlines().index("")
    assert max(map(len, out.splitlines()[start : start + 6])) <= 80


def test_the_same_in_python() -> None:
    predictions = sm.predict(
        "llama-3.1-8b", nproc=16, device=["h100-sxm", "b200"], tp=[1, 2, 3]
    )
    assert isinstance(predictions, sm.Predictions)
    best: dict[str, Any] = predictions.best or {}
    single = sm.predict("llama-3.1-8b", nproc=16, device=best["device"], tp=best["tp"])
    assert best["step_s"] == single.step_s
    assert len(predictions) == 4
    assert {row["tp"] for row in predictions.refused} == {3}
    workload = sm.workload("llama-3.1-8b", framework="fsdp", world_size=16)
    assert len(sm.predict(workload, device=["h100-sxm", "b200"])) == 2
    with pytest.raises(sm.ConfigError, match="left out with lists"):
        sm.predict("llama-3.1-8b", nproc=16, device="h200", tp=[1, 2], measured="2s")


def test_a_list_gives_a_table_whose_columns_are_keywords() -> None:
    job = {"framework": "megatron", "nproc": 8, "gbs": 32, "device": "h200", "pp": 4}
    for vpp in ([1, 2], [2], [2, 2]):
        rows = sm.predict("llama-3.1-8b", vpp=vpp, **job)
        assert isinstance(rows, sm.Predictions)
        assert {row["vpp"] for row in rows} == {*vpp}
        assert rows.document["rows"] == tuple(rows)
    refused = sm.predict("llama-3.1-8b", **{**job, "gbs": [3, 32]}).refused
    assert [row["reason"].partition(" is ")[0] for row in refused] == ["gbs 3"]


def test_the_figure_has_a_bar_for_each_combination() -> None:
    rows = sm.predict("llama-3.1-8b", nproc=8, device=["h100-sxm", "h200"], mbs=[1, 2])
    bars = {
        place: rate
        for series in rows.plot().data
        for place, rate in zip(series.y, series.x, strict=True)
    }
    assert bars == {
        f"device {row['device']}, mbs {row['mbs']}": row["tokens_per_s_gpu"] for row in rows
    }
