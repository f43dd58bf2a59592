"""Kernels belong to the operation, module and role that asked for them; sums stay exact."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from stepmark.ground.dtypes import DType
from stepmark.model.ops import Gemm, Phase
from stepmark.step.trace_ops import MeasuredOp
from stepmark.step.workload import ComputeOp, Stage, Workload
from stepmark.traces.kineto.host_ops import product_shape
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.kineto.reader import read_trace

from .comm_traces import AUTOGRAD, MAIN, TraceWriter
from .trace_truth import events_by_step, kernel_sums, read

TRACES = Path(__file__).parents[1] / "data" / "traces"
WITH_GPU = sorted(
    path.name
    for path in TRACES.iterdir()
    if path.is_dir() and path.name not in ("cpu-only", "mtia")
)


@pytest.mark.parametrize("folder", WITH_GPU)
def test_sums_are_those_of_the_kernels(folder: str) -> None:
    """By a slow and independent computation, in nanoseconds."""
    file = sorted((TRACES / folder).glob("*.json*"))[0]
    steps = events_by_step(read(file))
    outside = steps.pop("outside") + steps.pop("unlinked")
    table = measured_ops(read_trace(file))
    if not table.is_marked:
        steps, outside = {"ProfilerStep#0": outside}, []
    for name, events in steps.items():
        sums: dict[str, list[int]] = {}
        for op in table.ops:
            if op.step == int(name.partition("#")[2]):
                count_total = sums.setdefault(op.key.name, [0, 0])
                count_total[0] += op.kernels
                count_total[1] += op.time_ns
        assert sums == kernel_sums(events)
    assert table.outside_ns == sum(event.end - event.start for event in outside)
    assert all(op.shortest_ns <= op.time_ns / op.kernels <= op.longest_ns for op in table.ops)


def test_communication_of_fsdp_has_its_block() -> None:
    """Eight layers, gathered in both passes and reduced once."""
    table = measured_ops(read_trace(TRACES / "fsdp8" / "rank3.json.gz"))
    calls: Counter[tuple[object, ...]] = Counter()
    for op in table.ops:
        if op.key.kind == "comm" and op.step == 6:
            kind = "gather" if "AllGather" in op.key.name else "reduce"
            calls[op.key.role, op.key.layer, op.key.phase, kind] += op.kernels
    for layer in range(8):
        assert calls.pop(("blocks", layer, "fwd", "gather")) == 1
        assert calls.pop(("blocks", layer, "bwd", "gather")) == 1
        assert calls.pop(("blocks", layer, "bwd", "reduce")) == 1
    assert calls == {("root", None, "fwd", "gather"): 1, ("root", None, "bwd", "reduce"): 1}


def test_steps_without_work_and_graphs_are_said() -> None:
    table = measured_ops(read_trace(next((TRACES / "mi250").glob("*.json*"))))
    assert table.steps == (1,)
    assert table.notes == ("no work of step 2 is in the trace: it does not count",)
    table = measured_ops(read_trace(next((TRACES / "hip-graph").glob("*.json*"))))
    assert table.notes[0].startswith("544 kernels and copies were launched by graphs")
    assert sum(op.kernels for op in table.ops if not op.key.op) == 544 + 3


class Step(TraceWriter):
    """A forward and a backward pass on two threads."""

    def mark(self, name: str, ts: float, dur: float) -> None:
        self.add("user_annotation", f"stepmark::{name}", ts, dur, MAIN)

    def op(self, name: str, ts: float, dur: float, tid: int = MAIN, **args: object) -> None:
        self.add(
            "cpu_op",
            name,
            ts,
            dur,
            tid,
            **{key.replace("_", " "): v for key, v in args.items()},
        )

    def product(
        self, ts: float, shapes: object, tid: int = MAIN, kernel: str = "fwd", **args: object
    ) -> None:
        self.op("aten::mm", ts, 8, tid, Input_Dims=shapes, **args)
        self.kernel(kernel, ts + 2, 1000 + ts, 5, tid=tid)


def trained(folder: Path, *, marks: bool = True) -> list[MeasuredOp]:
    """Return the operations of a step: qkv, a residual and up, of 64 tokens, and an update."""
    step = Step(rank=0, world_size=1)
    step.step(4, 0, 1000)
    if marks:
        step.mark("forward", 1, 200)
        step.mark("blocks.7", 2, 150)
        step.mark("blocks.7.attention", 5, 50)
        step.mark("blocks.7.attention.qkv", 10, 20)
        step.mark("blocks.7.ffn", 100, 40)
        step.mark("blocks.7.ffn.up", 105, 30)
        step.mark("optimizer", 600, 300)
        step.add("user_annotation", "Optimizer.step#AdamW.step", 700, 100, MAIN)
    forward = {"Fwd_thread_id": 0}
    step.product(12, [[64, 16], [16, 48]], Sequence_number=20, **forward)
    step.op("aten::add", 60, 8, Sequence_number=21, **forward)
    step.kernel("add", 62, 1062, 5)
    # Nothing made a node here: the next product of another module has its number.
    step.op("aten::detach", 52, 2, Sequence_number=22, **forward)
    step.product(110, [[64, 16], [16, 32]], Sequence_number=22, **forward)
    for start, number in ((300, 22), (340, 20)):
        named = {"Sequence_number": number, "Fwd_thread_id": 1}
        step.op(
            "autograd::engine::evaluate_function: MmBackward0", start, 30, AUTOGRAD, **named
        )
        n = 32 if number == 22 else 48
        step.product(start + 2, [[n, 64], [64, 16]], AUTOGRAD, "wgrad")
        step.product(start + 12, [[64, n], [n, 16]], AUTOGRAD, "dgrad")
    name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    step.op(name, 380, 10, AUTOGRAD)
    step.kernel("add", 382, 1382, 5, tid=AUTOGRAD)
    step.op("aten::_foreach_norm", 610, 8)
    step.kernel("norm", 612, 1612, 5)
    step.op("aten::_fused_adamw_", 710, 8)
    step.kernel("adam", 712, 1712, 5)
    step.kernel("fill", 950, 1950, 7)
    trace = read_trace(step.write(folder))
    return list(measured_ops(trace, workload=None if marks else shapes()).ops)


def shapes(*, times: int = 1) -> Workload:
    """Return qkv and up of a layer of its own; `times`: products of one shape and two roles."""
    gemms = [("attention.qkv", 48), ("mlp.up", 32)]
    items = []
    for role, n in gemms:
        for phase, (m, columns, k) in {
            Phase.FWD: (64, n, 16),
            Phase.WGRAD: (n, 16, 64),
            Phase.DGRAD: (64, 16, n),
        }.items():
            op = Gemm(m=m, n=columns, k=k, dtype=DType.FP32)
            items.append(ComputeOp(op=op, phase=phase, module=role, layer=3, microbatch=0))
    return Workload(
        name="w", rules="r", blocks={"b": tuple(items) * times}, stages=(Stage(step="b"),)
    )


def found(ops: list[MeasuredOp]) -> dict[tuple[object, ...], int]:
    return dict(Counter((op.key.role, op.key.layer, op.key.phase, op.key.name) for op in ops))


def test_marks_and_sequence_numbers_tell_module_and_phase(tmp_path: Path) -> None:
    ops = trained(tmp_path)
    assert found(ops) == {
        ("attention.qkv", 7, "fwd", "fwd"): 1,
        ("attention.qkv", 7, "wgrad", "wgrad"): 1,
        ("attention.qkv", 7, "dgrad", "dgrad"): 1,
        ("attention.qkv", 7, "bwd", "add"): 1,  # the sum after this node
        ("attention.residual", 7, "fwd", "add"): 1,
        ("mlp.up", 7, "fwd", "fwd"): 1,
        ("mlp.up", 7, "wgrad", "wgrad"): 1,
        ("mlp.up", 7, "dgrad", "dgrad"): 1,
        ("clip", None, "optim", "norm"): 1,
        ("update", None, "optim", "adam"): 1,
        ("", None, "", "fill"): 1,
    }
    assert {op.key.module for op in ops if op.key.role == "mlp.up"} == {"blocks.7.ffn.up"}


def test_shapes_tell_products_without_marks(tmp_path: Path) -> None:
    gemms = {
        key: count
        for key, count in found(trained(tmp_path, marks=False)).items()
        if key[3] in ("fwd", "wgrad", "dgrad")
    }
    assert gemms == {
        (role, 3, phase, phase): 1
        for role in ("attention.qkv", "mlp.up")
        for phase in ("fwd", "wgrad", "dgrad")
    }


@pytest.mark.parametrize(("count", "roles"), [(2, {"a", "b"}), (1, {"a | b"}), (3, {"a | b"})])
def test_products_of_one_shape_are_taken_in_order_or_have_all_roles(
    tmp_path: Path, count: int, roles: set[str]
) -> None:
    step = Step(rank=0, world_size=1)
    step.step(0, 0, 1000)
    for number in range(count):
        step.product(10 + 20 * number, [[64, 16], [16, 48]])
    base = shapes().blocks["b"][0]
    assert isinstance(base, ComputeOp)
    items = tuple(replace(base, module=role, layer=None) for role in "ab")
    workload = replace(shapes(), blocks={"b": items})
    table = measured_ops(read_trace(step.write(tmp_path)), workload=workload)
    assert {op.key.role for op in table.ops} == roles
    ordered = [op.key.role for op in sorted(table.ops, key=lambda op: op.key.role)]
    assert ordered == sorted(roles)
    step.op("CompiledFunction", 900, 8)
    table = measured_ops(read_trace(step.write(tmp_path)), workload=workload)
    assert {op.key.role for op in table.ops} == {"a | b"}, "the order of a graph is its own"
    other = replace(base, op=Gemm(m=1, n=1, k=1), module="c")
    table = measured_ops(
        read_trace(step.write(tmp_path)), workload=replace(workload, blocks={"b": (other,)})
    )
    assert {op.key.role for op in table.ops} == {""}
    assert table.notes == (
        f"{count} of {count} products have a shape that the workload has not",
    )


def test_weights_of_others_may_be_transposed(tmp_path: Path) -> None:
    """x W has W's gradient x.T dy, whose shape is that of another linear layer's gradient."""
    base = shapes().blocks["b"][0]
    assert isinstance(base, ComputeOp)
    sizes = {"mlp.down": (16, 48), "mlp.up": (48, 16)}
    items = tuple(
        replace(base, module=role, phase=Phase.WGRAD, op=replace(base.op, m=m, n=n, k=64))
        for role, (m, n) in sizes.items()
    )
    workload = replace(shapes(), blocks={"b": items})
    for marks, role in ((False, "mlp.down | mlp.up"), (True, "mlp.down")):
        step = Step(rank=0, world_size=1)
        step.step(0, 0, 1000)
        if marks:
            step.mark("data", 950, 1)
        step.product(10, [[16, 64], [64, 48]])
        table = measured_ops(read_trace(step.write(tmp_path)), workload=workload)
        assert {op.key.role for op in table.ops} == {role}
    step = Step(rank=0, world_size=1)
    step.step(0, 0, 1000)
    step.product(10, [[48, 64], [64, 16]])  # down as x W
    step.product(30, [[16, 64], [64, 48]], kernel="second")
    table = measured_ops(read_trace(step.write(tmp_path)), workload=workload)
    assert {op.key.name: op.key.role for op in table.ops} == {
        "fwd": "mlp.down",
        "second": "mlp.up",
    }


def test_a_product_counts_once(tmp_path: Path) -> None:
    """Its workspace is set by a memset before, and split products end with a sum."""
    step = Step(rank=0, world_size=1)
    step.step(0, 0, 1000)
    step.op("aten::mm", 10, 20, Input_Dims=[[64, 16], [16, 48]])
    step.kernel("Memcpy of a workspace", 12, 1012, 1)
    step.kernel("gemm", 14, 1014, 5)
    step.kernel("splitKreduce", 16, 1020, 3)
    ops = measured_ops(read_trace(step.write(tmp_path))).ops
    assert {op.key.name: (op.calls, op.kernels) for op in ops} == {
        "Memcpy of a workspace": (0, 1),
        "gemm": (1, 1),
        "splitKreduce": (0, 1),
    }


@pytest.mark.parametrize(
    ("name", "dims", "shape"),
    [
        ("aten::mm", "[[64,16],[16,48]]", (64, 48, 16)),
        ("aten::addmm", "[[48],[64,16],[16,48],[],[]]", (64, 48, 16)),
        ("aten::bmm", "[[3,64,16],[3,16,48]]", (64, 48, 16)),
        ("aten::mm", "[[64],[16,48]]", None),
        ("aten::mm", "[[],[]]", None),
        ("aten::mm", "{}", None),
        ("aten::mm", "[1, 2", None),
    ],
)
def test_shapes_of_products(name: str, dims: str, shape: object) -> None:
    assert product_shape(name, dims) == shape
