"""The host's time of steps by data sheet: hosts, ratios, and what a prediction says of them."""

import csv
import itertools
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.cases.record import Measured
from stepmark.cli import main
from stepmark.ground.options import build
from stepmark.model.ops import Phase
from stepmark.predictions import simulation
from stepmark.predictions.framework_job import basis_of, options_class, workload_of
from stepmark.predictions.host_times import passes_s
from stepmark.predictions.hosts import DEFAULT, HostTimes, Launch, load_hosts, ratio
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.predict_options import PredictOptions
from stepmark.step.workload import ComputeOp
from stepmark.store.reader import read_records
from stepmark.workloads.rules.pytorch.case import of_case

from .predicted_runs import GPT2, WORDS, Predict

ROOT = Path(__file__).parents[2]
SMALL = "gpt2-125m --nproc 1 --device h200"


def rows() -> list[dict[str, str]]:
    with (ROOT / "validation" / "data" / "host-times.csv").open() as file:
        return [*csv.DictReader(line for line in file if not line.startswith("#"))]


def inputs(model: str, **values: object) -> Inputs:
    return inputs_of(build(PredictOptions, {"models": [model], "device": "h200", **values}))


def test_an_operation_takes_what_was_measured() -> None:
    """Medians of the measured passes, each by itself, where the fit takes all together."""
    measured = defaultdict(list)
    for row in rows():
        if "mixtral" not in row["model"] and row["ac"] == "none":
            key = row["compile"], row["pass"]
            measured[key].append(float(row["us_per_operation"]) * 1e-6)
    host = load_hosts()[DEFAULT]
    for launch, factor in (("none", 1.0), ("block", ratio("compiled"))):
        for name, time_s in (("fwd", host.forward_s), ("bwd", host.backward_s)):
            assert time_s * factor == pytest.approx(median(measured[launch, name]), rel=0.2)


def test_hosts_are_in_the_order_of_their_names() -> None:
    for fast, slow in itertools.pairwise(load_hosts()[n] for n in ("fast", "typical", "slow")):
        assert fast.forward_s < slow.forward_s
        assert fast.backward_s < slow.backward_s


def test_a_step_that_the_host_bounds_takes_its_launches() -> None:
    """gpt2-125m: 10 operations forward and 14 backward a layer, and those around the layers."""
    own = inputs("gpt2-125m", nproc="1")
    host = load_hosts()[DEFAULT]
    layers = 12
    forward = 10 * layers + 4
    backward = 14 * layers + 5
    optimizer_s = ratio("optimizer") * layers * host.backward_s
    expected_s = forward * host.forward_s + backward * host.backward_s + optimizer_s
    prediction = predict(own)
    assert prediction.step.is_host_bound
    assert prediction.step_s == pytest.approx(expected_s, rel=1e-6)


def test_measured_steps_are_predicted_within_their_noise() -> None:
    """Sums over passes of a step; those of two launches differ by up to 44 % (docs/diary)."""
    steps = defaultdict(float)
    for row in rows():
        names = ("model", "scale", "layers", "precision", "compile", "ac")
        steps[tuple(row[name] for name in names)] += float(row["time_ms"]) * 1e-3
    for (model, scale, layers, precision, compiled, ac), time_s in steps.items():
        more = {"num_layers": int(layers), "seq_len": 64, "compile": compiled != "none"}
        own = inputs(model, nproc="1", scale=scale, precision=precision, ac=ac, **more)
        assert predict(own).step_s == pytest.approx(time_s, rel=0.44)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_eager_step_with_tensor_parallelism_takes_what_dtensor_does(number: int) -> None:
    """llama-3.1-8b on machines with two H200, by the forward time of each machine's fit."""
    forward_us = {2: 171, 3: 245, 4: 225}[number]
    (record,) = [
        record
        for record in read_records(ROOT / "results" / f"h200-x2-predictions-{number}")
        if isinstance(record, Measured)
        and record.case.kind == "train"
        and record.train.model.name == "llama-3.1-8b@1/16"
    ]
    workload = of_case(record.train)
    times = HostTimes(load_hosts()[DEFAULT], workload)
    operations = (op for op in workload.expand() if op.phase is Phase.FWD and not op.recompute)
    predicted_s = sum(map(times, operations)) * forward_us / 109
    assert predicted_s == pytest.approx(passes_s(record)["fwd"], rel=0.3)


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        # Embedding, output and blocks: gathers forward and backward, and as many scatters.
        ({"nproc": "2", "strategy": "fsdp"}, {"fsdp_collective": 11, "collective": 1}),
        (
            {"nproc": "2", "strategy": "tp", "tp": 2},
            {"dtensor_collective": 23, "dtensor_norm": 11},
        ),
        ({"nproc": "4", "pp": 2, "pp_microbatches": 2, "mbs": "2"}, {"transfer": 4}),
    ],
    ids=["fsdp", "tp", "pp"],
)
def test_calls_of_communication_have_their_kinds(
    values: dict[str, object], counts: dict[str, int]
) -> None:
    own = inputs("llama-3.1-8b", num_layers=2, **values)
    times = own.host_s
    assert isinstance(times, HostTimes)
    kinds = [times.kinds(op) for op in own.workload.expand() if not isinstance(op, ComputeOp)]
    for kind, count in counts.items():
        assert kinds.count((kind,)) == count, kinds


def test_experts_and_compilation() -> None:
    for is_compiled in (False, True):
        own = inputs("mixtral-8x7b", num_layers=1, nproc="1", compile=is_compiled)
        times = own.host_s
        assert isinstance(times, HostTimes)
        kinds = {
            op.module: times.kinds(op)
            for op in own.workload.expand()
            if isinstance(op, ComputeOp) and op.phase is Phase.FWD
        }
        expected = ("compiled",) if is_compiled else ("experts",)
        assert kinds["mlp.router"] == kinds["mlp.experts_down"] == expected
        assert kinds["attention.qkv"] == (("compiled",) if is_compiled else ())


@settings(max_examples=20, deadline=None)
@given(
    mbs=st.integers(1, 4),
    num_layers=st.integers(1, 4),
    strategy=st.sampled_from(["ddp", "fsdp", "tp"]),
)
def test_a_slower_host_makes_no_step_faster(mbs: int, num_layers: int, strategy: str) -> None:
    steps_s = [
        predict(
            inputs(
                "gpt2-125m",
                nproc="2",
                strategy=strategy,
                mbs=str(mbs),
                num_layers=num_layers,
                host=host,
            )
        ).step_s
        for host in ("fast", "typical", "slow")
    ]
    assert steps_s == sorted(steps_s)


def test_the_first_line_says_that_the_host_bounds_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, is_bound in ((SMALL, True), (f"{SMALL} --mbs 64", False)):
        assert main.status(["predict", *words.split()]) == 0
        first = capsys.readouterr().out.partition("\n  by data sheet")[0]
        assert ("bound by the host (device idle 8" in first) is is_bound


def test_a_graph_is_one_launch(run: Predict) -> None:
    _, document, _ = run(f"{SMALL} --cuda-graph")
    assert document["bound"] == "device"
    assert any("one CUDA graph" in note for note in document["notes"])


def test_compiling_makes_the_host_faster(run: Predict) -> None:
    (_, eager, _), (_, compiled, _) = run(SMALL), run(f"{SMALL} --compile")
    assert compiled["step_s"] < eager["step_s"]
    assert not any("as long without" in note for note in compiled["notes"])


REFUSED = {
    f"{SMALL} --host fats": "host fats is invalid: did you mean fast?",
    f"--from-run {GPT2} --host fast": "left out: the calibration has the host's time",
    f"{WORDS[GPT2]} --calibration {GPT2} --device h200 --host fast": "left out: the calibr",
    f"{SMALL} --host {GPT2}": f"host {GPT2} is invalid: it must be a run with the host's part",
    f"w.json --device h200 --host {GPT2}": "slow, typical, fast: a run has the host of its own",
    "timed.json --host fast": "left out: the file has times of its own",
}


@pytest.mark.parametrize("words", REFUSED)
def test_hosts_that_are_refused(run: Predict, runs: Path, words: str) -> None:
    job = ["workload", "generate", "--model", "gpt2-125m", "--framework", "fsdp"]
    job += ["--world-size", "4", "-o"]
    assert main.status([*job, str(runs.parent / "w.json")]) == 0
    timed = [str(runs.parent / "timed.json"), "--compute-from", "roofline:h200"]
    assert main.status([*job, *timed]) == 0
    code, document, error = run(words)
    assert (code, document) == (2, None)
    assert REFUSED[words] in error


def test_a_run_has_the_host_of_a_step_on_another_device(run: Predict) -> None:
    """The calibrated step with all layers, whose host takes as long on any device."""
    words = f"{WORDS[GPT2]} --mbs 1 --device"
    _, calibrated, _ = run(f"{words} h200 --calibration {GPT2}")
    _, other, _ = run(f"{words} b200 --host {GPT2}")
    assert calibrated["bound"] == other["bound"] == "host"
    assert other["step_s"] == pytest.approx(calibrated["step_s"], rel=1e-3)
    assert any(f"the host's part of run {GPT2}" in note for note in other["notes"])


def test_launches_have_names() -> None:
    assert [*Launch] == ["eager", "compiled", "graph"]


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("megatron", {"tp": 2, "pp": 4, "nproc": 16, "gbs": 32}),
        ("megatron", {"pp": 2, "nproc": 8, "gbs": 16, "overlap_grad_reduce": True}),
        ("pytorch", {"nproc": 8, "gbs": 16}),
        ("pytorch", {"nproc": 8, "tp": 2, "pp": 2, "gbs": 8, "untied": True}),
    ],
    ids=["tp x pp", "pp", "fsdp", "all"],
)
def test_steps_computed_at_once_are_those_of_events(
    framework: str, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing slows anything, an item starts at the latest end or issue before it."""
    cls = options_class(framework)
    job = cls(
        framework=framework,
        models=("gpt2-125m",),
        device="h100-sxm",
        host="slow",
        **words,
    )
    inputs = inputs_of(basis_of(job), workload_of(job))
    at_once = predict(inputs).step
    monkeypatch.setattr(simulation, "is_serial", lambda _programs: False)
    by_events = predict(inputs).step
    assert at_once.is_host_bound
    assert at_once.step_s == pytest.approx(by_events.step_s, rel=1e-9)
    for own, other in zip(at_once.ledgers, by_events.ledgers, strict=True):
        assert own.lines.keys() == other.lines.keys()
        for line, time_ns in own.lines.items():
            assert time_ns == pytest.approx(other.lines[line], abs=0.002 * own.window_ns)
