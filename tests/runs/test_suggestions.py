"""What is worth doing after a step: only what its data show, and commands that run."""

import shlex
from dataclasses import replace
from typing import Any

import pytest
from tests.parsing import parse
from tests.training.train_records import fsdp, single, train_run

from stepmark.cases.training import CompileScope, Fp8
from stepmark.measuring.machine import Machine
from stepmark.predictions import predict_options
from stepmark.predictions.predict_options import PredictOptions
from stepmark.predictions.predicted_steps import Suggestion
from stepmark.runs.first_screen import WIDTH
from stepmark.runs.suggestions import MOST, Measurement, suggestions
from stepmark.timeline.ledger import RECOMPUTED, WAITING, Group, Idle, Ledger, Line, Work
from stepmark.traces import trace_options
from stepmark.training import train
from stepmark.training.train_options import TrainOptions

H200 = Machine(
    device="cuda",
    name="NVIDIA H200",
    num_accelerators=8,
    memory_bytes=140 * 2**30,
    capability=(9, 0),
)
PRODUCTS: Line = (Group.COMPUTE, Work.MATMUL)
REDUCE: Line = (Group.COMM, "reduce_scatter")
TRACES: dict[str, type[Any]] = {
    "kernels": trace_options.KernelsOptions,
    "messages": trace_options.MessagesOptions,
    "breakdown": trace_options.BreakdownOptions,
    "critical-path": trace_options.CriticalPathOptions,
}


def ledger(lines_ms: dict[Line, float], **within_ms: float) -> Ledger:
    lines = {line: round(ms * 1e6) for line, ms in lines_ms.items()}
    within = {name: round(ms * 1e6) for name, ms in within_ms.items()}
    return Ledger(window_ns=sum(lines.values()), lines=lines, within=within)


def step(own: Ledger, **more: Any) -> Measurement:
    given: dict[str, Any] = {
        "case": fsdp(),
        "predicted": None,
        "measured": own,
        "run": "runs/a b",
        "has_trace": True,
        "row": {},
        "environment": train_run().environment,
        **more,
    }
    return Measurement(**given)


def check_runs(suggestion: Suggestion) -> None:
    """Check that a command is read as its verb reads it; training is planned, too."""
    program, verb, *words = shlex.split(suggestion.command)
    assert program == "stepmark"
    if verb == "train":
        options = parse(TrainOptions, words)
        assert train.plan(options, H200).entries
    elif verb == "predict":
        assert parse(PredictOptions, words).from_run == "runs/a b"
    else:
        assert verb == "trace"
        assert parse(TRACES[words[0]], words[1:]).files == ("runs/a b",)


STEPS = {
    "communication": step(ledger({PRODUCTS: 60, REDUCE: 40})),
    "waiting": step(ledger({PRODUCTS: 60, REDUCE: 40}, **{WAITING: 30})),
    "eager": step(ledger({PRODUCTS: 60, (Group.IDLE, Idle.HOST): 40}), case=single()),
    "compiled": step(
        ledger({PRODUCTS: 60, (Group.IDLE, Idle.LAUNCH_GAP): 40}),
        case=single(compile=CompileScope.BLOCK),
    ),
    "data": step(ledger({PRODUCTS: 60, (Group.IDLE, Idle.DATA): 40})),
    "recomputed": step(ledger({PRODUCTS: 100}, **{RECOMPUTED: 25})),
    "difference": step(
        ledger({PRODUCTS: 60, REDUCE: 40}), predicted=ledger({PRODUCTS: 60, REDUCE: 10})
    ),
    "products": step(
        ledger({PRODUCTS: 60, REDUCE: 40}), predicted=ledger({PRODUCTS: 90, REDUCE: 40})
    ),
    "idle": step(
        ledger({PRODUCTS: 60, (Group.IDLE, Idle.HOST): 40}),
        predicted=ledger({PRODUCTS: 55, (Group.IDLE, Idle.HOST): 10}),
    ),
    "unexplained": step(
        ledger({PRODUCTS: 95, (Group.IDLE, Idle.UNEXPLAINED): 5}),
        predicted=ledger({PRODUCTS: 95}),
    ),
    "unknown": step(
        ledger({PRODUCTS: 60, (Group.IDLE, Idle.UNEXPLAINED): 40}),
        predicted=ledger({PRODUCTS: 60}),
    ),
    "doubtful": step(ledger({PRODUCTS: 100}), row={"validity": "busy host"}),
    "memory": step(ledger({PRODUCTS: 1}), row={"reserved_gib": 20.0, "device_gib": 140.0}),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_command_runs(name: str) -> None:
    given = suggestions(STEPS[name])
    assert 1 <= len(given) <= MOST
    for suggestion in given:
        check_runs(suggestion)
        assert len(suggestion.text) <= WIDTH - 4  # with its number and a colon
        assert (suggestion.gain_ns or 0) <= STEPS[name].measured.window_ns


@pytest.mark.parametrize(
    ("name", "words", "command", "gain_ms"),
    [
        ("communication", "reduce_scatter", "--what-if link=2x", 20),
        ("waiting", "wait 30 ms", "critical-path", 30),
        ("eager", "40 ms (40.0 %)", "--compile ", 40),
        ("compiled", "40 ms (40.0 %)", "--cuda-graph", 40),
        ("data", "40 ms (40.0 %)", "--workers 2", 40),
        ("recomputed", "25 ms (25.0 %)", "--ac none", 25),
        (
            "difference",
            "All of the 30 ms above the prediction is exposed",
            "trace messages",
            None,
        ),
        ("products", "All of the 30 ms below the prediction is matmul", "trace kernels", None),
        ("idle", "30 ms of the 35 ms above the prediction is idle", "critical-path", None),
        ("unexplained", "5 ms above the prediction is unexplained", "trace breakdown", None),
        ("unknown", "unexplained", "--profile", None),
        ("doubtful", "busy host", "--launches 3", None),
        ("memory", "20 of 140 GiB", "--find-batch", None),
    ],
)
def test_a_suggestion_has_its_reason_and_its_gain(
    name: str, words: str, command: str, gain_ms: float | None
) -> None:
    (own,) = [each for each in suggestions(STEPS[name]) if command in each.command]
    assert words in own.text
    assert own.gain_ns == (None if gain_ms is None else gain_ms * 1e6)


def test_gains_add_up_to_no_more_than_the_step() -> None:
    """What is computed again may be matrix products, too: one of both is suggested."""
    lines = {PRODUCTS: 60, (Group.IDLE, Idle.HOST): 40}
    own = step(ledger(lines, **{RECOMPUTED: 60}), case=single())
    gains = [each.gain_ns for each in suggestions(own)]
    assert gains == [60e6, 40e6]


def test_a_line_explains_at_most_the_difference_of_the_steps() -> None:
    """The gather is 30 ms longer and the host 20 ms faster: of the 10 ms it is all."""
    own = step(
        ledger({PRODUCTS: 60, REDUCE: 40, (Group.IDLE, Idle.HOST): 10}),
        predicted=ledger({PRODUCTS: 60, REDUCE: 10, (Group.IDLE, Idle.HOST): 30}),
    )
    words = "All of the 10 ms above the prediction is exposed reduce_scatter"
    assert suggestions(own)[0].text == words
    assert suggestions(own)[0].gain_ns is None


def test_what_the_data_do_not_show_is_not_suggested() -> None:
    norms = step(ledger({(Group.COMPUTE, Work.ELEMENTWISE): 99, (Group.COPIES, "copy"): 1}))
    assert suggestions(norms) == ()
    other = replace(STEPS["waiting"], has_trace=False)
    assert not any("trace" in each.command for each in suggestions(other))
    assert len(suggestions(STEPS["unknown"])) == 1  # its lines are not known, nor their gains
    on_cpu = replace(STEPS["eager"], case=single(device="cpu"))
    assert not any("--compile" in each.command for each in suggestions(on_cpu))


def test_fp8_is_suggested_where_it_can_be_measured() -> None:
    environment = train_run().environment
    devices = tuple(replace(device, capability="9.0") for device in environment.devices)
    hopper = replace(environment, devices=devices, versions={"torchao": "0.18"})
    own = replace(STEPS["memory"], environment=hopper)
    (fp8,) = [each for each in suggestions(own) if "--fp8 " in each.command]
    check_runs(fp8)
    assert fp8.gain_ns == 500_000  # half of the products
    again = suggestions(replace(own, case=fsdp(fp8=Fp8.TENSORWISE)))
    assert not any("--fp8" in each.text for each in again)


def test_words_of_what_if_are_those_of_predict() -> None:
    assert {"link", "flops"} <= set(predict_options.FACTORS)
