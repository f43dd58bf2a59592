"""What stepmark predict writes: the timeline, read back, is the step of the ledger."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import stepmark as sm
from stepmark.cli.main import status
from stepmark.predictions.predict import changed, predict
from stepmark.predictions.prediction import shares_pct
from stepmark.timeline.bars import bars
from stepmark.timeline.ledger import Group, Work
from stepmark.timeline.timeline import Span, Timeline
from stepmark.traces.kineto.ledger import ledgers
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.trace_page import MOST_BARS

STEP = [
    "--model",
    "llama-3.1-8b",
    "--num-layers",
    "2",
    "--pp",
    "2",
    "--nproc",
    "4",
    "--mbs",
    "4",
    "--device",
    "h100-sxm",
]


def as_kernels(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event as a profiler writes it."""
    args = {"device": event["pid"], "stream": event["tid"]}
    if event["cat"] in ("communication", "waiting for other ranks"):
        args["Collective name"] = event["name"]
    category = "gpu_memcpy" if event["cat"] == "copy" else "kernel"
    return {**event, "cat": category, "name": "kernel", "args": args}


def test_a_readers_ledger_of_the_timeline_is_the_predicted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, answer = tmp_path / "timeline.json", tmp_path / "answer.json"
    assert status(["predict", *STEP, "--timeline", str(file), "--json", str(answer)]) == 0
    capsys.readouterr()
    document, events = (
        json.loads(answer.read_text()),
        json.loads(file.read_text())["traceEvents"],
    )
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert {type(event[key]) for event in spans for key in ("pid", "tid")} == {int}
    threads = {(event["pid"], event["tid"]) for event in spans}
    assert {names["process_name", *thread] for thread in threads} == {"stage 0", "stage 1"}
    streams = [names["thread_name", *thread] for thread in sorted(threads)]
    assert streams[0] == "compute"
    assert len(streams) == len(threads) == len({tid for _, tid in threads}) > 3
    for stage in (0, 1):
        own = [as_kernels(event) for event in spans if event["pid"] == stage]
        trace = tmp_path / f"rank{stage}.json"
        trace.write_text(json.dumps({"traceEvents": own}))
        ((_, read),) = ledgers(read_trace(trace), lambda number: True)
        predicted: Counter[str] = Counter()
        for row in document["ledger"]:
            # In a trace a call that waits for another rank runs.
            waits = row["line"] == "waiting for other ranks"
            group = Group.COMM if waits else row["group"]
            predicted[group] += row["time_ns"] * (row["stage"] == stage)
        for group in (Group.COMPUTE, Group.OVERLAPPED, Group.COMM, Group.COPIES):
            assert read.total(group) == pytest.approx(predicted[group], abs=5)
        assert (
            max(event["ts"] + event["dur"] for event in own) * 1e-6 <= document["step_s"] + 1e-9
        )


def test_the_page_of_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, answer = tmp_path / "step.html", tmp_path / "step.json"
    words = ["predict", *STEP, "--stages", "--html", str(file), "--json", str(answer)]
    assert status(words) == 0
    html = file.read_text()
    assert re.findall("<h2>(.*?)</h2>", html) == [
        *("Prediction", "Ledger of the step by stage", "Streams", "Memory of a rank"),
        *("Sources and notes", "Lines"),
    ]
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=", html)
    assert "stage 1, compute" in html
    first = capsys.readouterr().out
    answer_text = " ".join(first.partition("\n  ")[0].split())
    assert " tokens/s/GPU, " in answer_text
    assert f"<h1>{answer_text}" in html
    assert "<dt>MFU</dt>" in html
    assert not re.search(r"<dt>MFU</dt><dd>[^<]*MFU", html)
    assert "sheet</dd>" not in html
    # Of a pipeline most of send and recv is the bubble, which is no transfer.
    out = first
    assert re.findall(r"\d +(\d) +idle +waiting for other ranks", out) == ["0", "1"]
    document = json.loads(answer.read_text())
    parts = {(row["stage"], row["part"]): row["time_ns"] for row in document["ledger_parts"]}
    for stage in (0, 1):
        own = [row for row in document["ledger"] if row["stage"] == stage]
        exposed = sum(r["time_ns"] for r in own if r["group"] == "exposed communication")
        assert parts[stage, "transfer"] == exposed
    _, _, ledger, _, memory, _ = out.split("\n\n")
    for table in (ledger, memory):
        assert table.replace(">", "&gt;") in html
    assert status(["predict", *STEP, "--html", str(file), "--what-if", "link=2x"]) == 0
    assert " H100 80GB HBM3 with link=2x: predicted step" in capsys.readouterr().out
    assert " H100 80GB HBM3 with link=2x" in file.read_text()
    assert status(["predict", *STEP, "--html", "-", "--timeline", "-"]) == 2
    assert "--timeline" in capsys.readouterr().err


LIMITS = {
    "llama-3.1-8b --nproc 1": r"bound by computation \(99\.\d % of the step\)\n",
    "llama-3.1-70b --nproc 256 --seq-len 256": r"bound by communication \(99\.\d % of the",
    "llama-3.1-405b --nproc 128 --tp 8 --pp 16": "bound by the pipeline bubble .*, computation",
    "llama-3.1-8b --nproc 4 --pp 2 --tp 2": "computation .*, the pipeline bubble .* and commun",
    "llama-3.1-8b --nproc 1 --scale tiny": r"step .* ms.*,\s+bound by the host \(device idle",
    "llama-3.1-8b --nproc 1 --scale tiny --cuda-graph": "bound by computation .* launch gaps",
}


@pytest.mark.parametrize("words", LIMITS)
def test_the_limit_of_a_step_is_what_has_the_largest_share(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "answer.json"
    more = ["--device", "h100-sxm", "--json", str(answer)]
    assert status(["predict", *words.split(), *more]) == 0
    text, document = capsys.readouterr().out, json.loads(answer.read_text())
    assert re.search(LIMITS[words], text), text
    shares = document["shares_pct"]
    assert sum(shares.values()) == pytest.approx(100)
    assert sorted(shares.values(), reverse=True) == [*shares.values()]
    seconds = {name: share * document["step_s"] / 100 for name, share in shares.items()}
    assert seconds.get("the pipeline bubble", 0.0) == pytest.approx(
        document["bubble_s"], abs=2e-9
    )
    hidden_s = seconds.get("communication", 0.0) - document["exposed_comm_s"]
    assert hidden_s >= -2e-9
    assert hidden_s <= document["comm_s"]


def communicating_job(rng: random.Random) -> dict[str, Any]:
    """Return options of a step that may wait for messages under which it computes."""
    model = rng.choice(["llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2-1.5b"])
    device = rng.choice(["h100-sxm", "a100-80gb-sxm", "b200", "h200"])
    options = {"what": model, "nproc": rng.choice([8, 16, 64]), "device": device}
    options |= {"seq_len": rng.choice([256, 1024]), "mbs": rng.choice([1, 2])}
    kind = rng.choice(["fsdp", "ddp", "pytorch", "deepspeed", "megatron"])
    if kind in ("fsdp", "ddp"):
        return {**options, "strategy": kind, "ac": rng.choice(["none", "selective"])}
    more = {"zero_stage": rng.choice([1, 2, 3])} if kind == "deepspeed" else {}
    return {**options, "framework": kind, "gbs": 128, **more}


@pytest.mark.parametrize("seed", range(24))
def test_what_bounds_a_step_shortens_it_most_when_it_is_twice_as_fast(seed: int) -> None:
    rng = random.Random(seed)
    prediction = sm.predict(**communicating_job(rng))
    slower = {"link": rng.choice([0.3, 1.0, 3.0])}
    inputs = changed(prediction.prediction.inputs, slower)
    whole = predict(inputs)
    if whole.step.is_host_bound:
        return
    shares = shares_pct(whole.step.ledger)
    faster = {
        "computation": {**slower, "flops": 2, "hbm": 2},
        "communication": {"link": 2 * slower["link"]},
    }
    saved = {
        name: 1 - predict(changed(inputs, factors)).step_s / whole.step_s
        for name, factors in faster.items()
    }
    first, second = sorted(saved, key=lambda name: -shares.get(name, 0.0))
    assert saved[first] >= saved[second] - 0.001, (shares, saved)


def test_gathers_without_a_break_bound_a_step_that_computes_under_them() -> None:
    options = {"nproc": 64, "strategy": "fsdp", "ac": "selective", "mbs": 2, "seq_len": 1024}
    prediction = sm.predict("mixtral-8x7b", device="h100-sxm", **options)
    document = prediction.document
    parts = {row["part"]: row["time_ns"] * 1e-9 for row in document["ledger_parts"]}
    assert document["comm_s"] > 0.95 * document["step_s"]
    assert parts["under critical communication"] > 0.1 * document["step_s"]
    assert next(iter(document["shares_pct"])) == "communication"
    assert document["shares_pct"]["communication"] > 90
    twice = sm.predict("mixtral-8x7b", device="h100-sxm", what_if="flops=2x", **options)
    assert twice.step_s == pytest.approx(prediction.step_s, rel=0.02)


def test_a_dry_run_has_the_time_and_the_limit_of_each_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are those of the predicted step, whose timeline has every product by itself."""
    file, table = tmp_path / "timeline.json", tmp_path / "rows.json"
    words = ["--model", "llama-3.1-8b", "--device", "h100-sxm"]
    assert status(["predict", *words, "--nproc", "1", "--timeline", str(file)]) == 0
    assert status(["op", "all", *words, "--dry-run", "--json", str(table)]) == 0
    out, err = capsys.readouterr()
    assert "predicted times are by operators that were measured sustained on h100-sxm" in err
    assert re.search(r"qkv fwd +8192x6144x4096 +32 +416.7 us +642 us +2.4 %", out)
    rows = {(row["role"], row["pass"]): row for row in json.loads(table.read_text())}
    assert {row["bound"] for row in rows.values()} == {"compute", "memory"}
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    spans = [e for e in events if e["cat"] == "matmul"]  # without casts of weights
    times_us = {(e["args"]["module"], e["args"]["phase"]): e["dur"] for e in spans}
    assert len(times_us) > 10
    roles = {"attention.qkv": "qkv", "attention.out": "out", "mlp.down": "down", "head": "head"}
    for (module, phase), time_us in times_us.items():
        if module in roles:
            row = rows[roles[module], phase]
            assert row["predicted_s"] * 1e6 == pytest.approx(time_us, abs=2e-3)
            rate = row["flops"] / row["predicted_s"] / 1e12
            assert row["predicted_tflops"] == pytest.approx(rate)
    assert rows["rope", "fwd"]["predicted_s"] > rows["rope", "fwd"]["least_s"]
    few = ["--m", "16", "--n", "8192", "--k", "8192", "--device", "h100-sxm", "--dry-run"]
    assert status(["op", "gemm", *few]) == 0
    last = capsys.readouterr().out.split("\n")[-2]
    least, predicted = re.findall(r"([0-9.]+) us", last)
    assert float(least) < float(predicted) < 2 * float(least)  # bound by memory


def test_no_line_of_a_long_step_is_below_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are sums of floats, which miss the step by less than a nanosecond."""
    words = "llama-3.1-405b --nproc 64 --strategy fsdp --grad-accum 16 --device h100-sxm"
    assert status(["predict", *words.split(), "--json", "-"]) == 0
    assert min(row["time_ns"] for row in json.loads(capsys.readouterr().out)["ledger"]) > 0


# The smallest change: activation checkpointing, smaller micro-batches, sharding, more GPUs.
TOO_LARGE = {
    "gpt2-1.5b --nproc 8 --strategy fsdp --mbs 30": "--ac selective",
    "llama-3.1-8b --nproc 8 --strategy fsdp --mbs 4": "--ac full",
    "gpt2-1.5b --nproc 1 --mbs 64": "--mbs 8 --grad-accum 8",
    "llama-3.1-8b --nproc 8 --strategy fsdp --mbs 16": "--mbs 2 --grad-accum 8 --ac full",
    "llama-3.1-8b --nproc 4 --pp 4 --mbs 64": "--ac full --pp-microbatches 64",
    "llama-3.1-8b --nproc 8 --strategy ddp": "--strategy fsdp --nproc 8 --ac selective",
    "llama-3.1-8b --nproc 1": "--strategy tp --nproc 4 --tp 4",
    "llama-3.1-8b --nproc 1 --gbs 8": "--strategy fsdp --nproc 4 --grad-accum 2 --ac full",
    "llama-3.1-70b --nproc 2 --pp 2 --num-layers 12": "--nproc 4 --tp 2 --pp 2 --ac full",
    "qwen3-8b --nproc 1 --precision master --mbs 8": "--mbs 2 --precision amp --ac full",
    "llama-3.1-70b --nproc 1 --cuda-graph": "",
    "llama-3.1-70b --nproc 8 --strategy ddp --bucket-mb 50": "",
}


@pytest.mark.parametrize("words", TOO_LARGE)
def test_the_options_that_would_fit_do(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", *words.split(), "--device", "h100-sxm", "--json", "-"]
    assert status(command) == 0
    before = json.loads(capsys.readouterr().out)
    fitting = before["memory"]["fitting"]
    assert fitting.endswith(TOO_LARGE[words])
    assert bool(fitting) == bool(TOO_LARGE[words])
    if fitting:
        given = [*command[2:], *fitting.split()]  # what fits goes before what was given
        more = itertools.chain(*dict(zip(given[::2], given[1::2], strict=True)).items())
        assert status(["predict", command[1], *more]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["memory"]["verdict"] == "fits"
        assert document["tokens"] == before["tokens"]


@pytest.mark.parametrize(
    ("seq_len", "is_uncertain"), [("4096", False), ("5632", True), ("8192", False)]
)
def test_a_step_that_may_run_out_of_memory_may_take_longer(
    seq_len: str, is_uncertain: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--model qwen3-8b --strategy fsdp --nproc 4 --mbs 1 --seq-len {seq_len}".split()
    assert status(["predict", *words, "--device", "h100", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["memory"]["verdict"] == "close") is is_uncertain
    assert any("frees its cache" in note for note in document["notes"]) is is_uncertain


RUN_OF_THREE = str(Path(__file__).parents[2] / "results" / "h100-x4-predictions-1")


@pytest.mark.parametrize(
    ("model", "mbs", "tokens"), [("gpt2-1.5b", 8, 1024), ("llama-3.1-8b", 1, 8192)]
)
def test_a_run_of_several_steps_predicts_the_one_of_the_model(
    model: str, mbs: int, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", model, "--from-run", RUN_OF_THREE, "--json", "-"]
    assert status(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["mbs"], document["seq_len"]) == (mbs, tokens)
    assert document["name"] == f"{model} fsdp"


@pytest.mark.parametrize("words", [[], ["qwen3-8b"]])
def test_a_run_of_several_steps_does_not_choose(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["predict", *words, "--from-run", RUN_OF_THREE]) == 2
    error = capsys.readouterr().err
    assert "--seq-len 8192" in error
    assert "--strategy" not in error  # all steps have it


def test_a_misspelt_model_goes_before_a_run_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(["predict", "llama-3.1-8c", "--from-run", RUN_OF_THREE]) == 2
    assert "did you mean llama-3.1-8b or" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--csv", "--timeline", "--html"])
def test_a_file_that_cannot_be_written_is_named_with_its_flag(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "missing" / "file"
    assert status(["predict", *STEP, flag, str(file)]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"stepmark: {flag} /")
    assert "/missing/file is invalid: it must be a file that can be written" in message


def test_bars_of_a_page_hold_all_spans() -> None:
    """Of many spans, neighbours are one bar; times of a stream are still those of its spans."""
    chance, spans, free = random.Random(1), [], {0: 0, 1: 0}
    for number in range(20_000):
        stage = chance.randrange(2)
        start = free[stage] + chance.choice((0, 1, 300))
        free[stage] = start + chance.choice((5, 20, 900))
        kind = chance.choice((Work.MATMUL, Work.ELEMENTWISE))
        spans.append(Span(stage, "compute", kind, f"op {number}", start, free[stage]))
    timelines = bars(Timeline(spans, (0, max(free.values()))))
    for stage, timeline in timelines.items():
        assert len(timeline.bars) <= MOST_BARS // 2
        own = [span for span in spans if span.rank == stage]
        assert sum(bar.num_events for bar in timeline.bars) == len(own)
        assert sum(bar.busy for bar in timeline.bars) == sum(s.end_ns - s.start_ns for s in own)
        for before, after in itertools.pairwise(timeline.bars):
            assert before.end <= after.start
    few = bars(Timeline(spans[:9], (0, 10_000)))
    assert {bar.num_events for each in few.values() for bar in each.bars} == {1}


@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.1-70b"])
def test_one_stage_waits_for_no_other(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding of its lines is no waiting."""
    answer = tmp_path / "step.json"
    line = f"predict {model} --strategy tp --nproc 4 --mbs 1 --device h100-sxm --json {answer}"
    assert status(line.split()) == 0
    assert "waiting" not in capsys.readouterr().out
    assert [row["part"] for row in json.loads(answer.read_text())["ledger_parts"]] == [
        "transfer"
    ]
