"""What torch itself says was sent, on the four gloo ranks of test_truth.

None of stepmark measures here. Names and sizes are those of torch's profiler, which sees the
operators of c10d below all else; types and ranks those of gloo's flight recorder, which both
list in the order of their calls. Sends and receives are not in the flight recorder, so lack a
type; their phase is for the test to know.
"""

import contextlib
import functools
import importlib
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.capture.user_code import CASES, NUM_WARM_UPS
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import ProfilerActivity, profile, record_function

# c10d's operators: ours, and which argument has a rank's part.
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "scatter_": ("scatter", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "barrier": ("barrier", 0),
}
PAIRS = ("send", "recv")
DTYPES = {
    "Float": "fp32",
    "Double": "fp64",
    "BFloat16": "bf16",
    "Half": "fp16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
}
# gloo reduces the whole and keeps a part; the flight recorder has what it does.
GLOO = {"reduce_scatter": "all_reduce"}
ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "20000"}  # read before the group is made
Message = dict[str, Any]


def recorded(work: Callable[[], object]) -> list[Message]:
    before = len(entries())
    with tempfile.TemporaryDirectory() as folder:
        cpu = [ProfilerActivity.CPU]
        with profile(activities=cpu, record_shapes=True) as profiler, phases():
            work()
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = sorted((one for one in events if "ts" in one), key=lambda one: one["ts"])
    flights = iter(entries()[before:])
    found = list(messages(events, flights))
    rest = list(flights)
    assert not rest, f"the profiler did not see {rest}"
    return found


def entries() -> list[dict[str, Any]]:
    dump: Callable[[], str] = vars(c10d)["_dump_fr_trace_json"]
    found: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return found


def phases() -> contextlib.ExitStack:
    """Marks in the trace around backward passes, FSDP's part in them, and models' calls."""
    stack = contextlib.ExitStack()
    for owner, name, phase in (
        (torch.autograd, "backward", "bwd"),
        (FSDPParamGroup, "post_backward", "bwd"),
        (nn.Module, "__call__", "fwd"),
    ):
        made = marked(getattr(owner, name), phase)
        stack.enter_context(mock.patch.object(owner, name, made))
    return stack


def marked(original: Callable[..., Any], phase: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"phase {phase}"):
            return original(*args, **kwargs)

    return call


def messages(events: list[dict[str, Any]], flights: Any) -> Any:
    """A message's phase: of the outermost mark around it; after a backward pass optim."""
    phase, ends, between = "fwd", 0.0, "fwd"
    for event in events:
        name, start = event.get("name", ""), event["ts"]
        if start >= ends:
            phase = between
        if name.startswith("phase ") and start >= ends:
            phase, ends = name.removeprefix("phase "), start + event["dur"]
            between = "optim" if phase == "bwd" else "fwd"
        space, _, operator = name.partition("::")
        if event.get("cat") == "cpu_op" and space == "c10d" and operator in OPERATORS:
            yield message(operator, event["args"], phase, flights)


def message(operator: str, args: dict[str, Any], phase: str, flights: Any) -> Message:
    collective, position = OPERATORS[operator]
    dims = args["Input Dims"][position]
    tensors = dims if args["Input type"][position] == "TensorList" else [dims]
    count = 0 if collective == "barrier" else sum(map(math.prod, tensors))
    found: Message = {"collective": collective, "count": count, "phase": phase}
    if collective in PAIRS:
        return found | {"peer": int(args["Concrete Inputs"][2])}
    flight = next(flights)
    said = flight["profiling_name"].removeprefix("gloo:")
    assert said == GLOO.get(collective, collective), (said, operator)
    ranks = ranks_of(flight["process_group"][0])
    if collective == "all_to_all":
        larger = max(math.prod(args["Input Dims"][at]) for at in (0, 1))
        splits = [json.loads(args["Concrete Inputs"][at]) for at in (3, 4)]
        found["count"] = larger // len(ranks)
        if any(len(set(sizes)) > 1 for sizes in splits):
            found["collective"] = "all_to_all_v"
    types = flight["output_dtypes"] or flight["input_dtypes"]
    return found | {"dtype": DTYPES[types[0]] if types else "uint8", "ranks": ranks}


def ranks_of(name: str) -> list[int]:
    groups = dist.distributed_c10d._world.pg_names
    group = next(one for one, called in groups.items() if called == name)
    return dist.get_process_group_ranks(group)


def sent_by_all(_ranks: object) -> dict[str, dict[str, list[Message]]]:
    """Of each case the messages of its setup and of a step, of this rank."""
    torch.manual_seed(0)
    found = {}
    for name, build in CASES.items():
        steps: list[Callable[[], None]] = []
        setup = recorded(lambda build=build, steps=steps: steps.append(build()))  # type: ignore[misc]
        for _ in range(NUM_WARM_UPS.get(name, 0)):
            setup += recorded(steps[0])
        step = recorded(steps[0])
        for sent in (one for one in (*setup, *step) if one["collective"] in PAIRS):
            sent["phase"] = ""
        found[name] = {"setup": setup, "step": step}
        dist.barrier()
    return found


def sent_by_jobs(_ranks: object, names: list[str]) -> dict[str, list[list[Message]]]:
    """Of each job the messages of its setup and of each step, of this rank."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        job = importlib.import_module(f"tests.capture.jobs.{name}")
        num_parts = 2 + getattr(job, "WARM_UPS", 0)
        sent = recorded(functools.partial(run_in_parts, job.build, num_parts))
        found[name] = [
            [{**one, "phase": ""} for one in sent if one["phase"] == f"part {part}"]
            for part in range(num_parts)
        ]
        assert sum(map(len, found[name])) == len(sent)
        dist.barrier()
    return found


def run_in_parts(build: Callable[[], Callable[[], None]], num_parts: int) -> None:
    """Part 0 is the setup. The mark around a part hides those of phases inside."""
    with record_function("phase part 0"):
        step = build()
    for part in range(1, num_parts):
        with record_function(f"phase part {part}"):
            step()
