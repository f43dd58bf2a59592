"""What stepmark predict writes: the timeline, read back, is the step of the ledger."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import status
from stepmark.core.ledger import Group
from stepmark.trace.kineto.ledger import ledgers
from stepmark.trace.kineto.reader import read_trace

STEP = [
    "--model",
    "llama-3.1-8b",
    "--scale",
    "tiny",
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
    if event["cat"] == "communication":
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
            predicted[row["group"]] += row["time_ns"] * (row["stage"] == stage)
        for group in (Group.COMPUTE, Group.OVERLAPPED, Group.COMM, Group.COPIES):
            assert read.total(group) == pytest.approx(predicted[group], abs=5)
        assert max(event["ts"] + event["dur"] for event in own) * 1e-6 <= document["step_s"]
