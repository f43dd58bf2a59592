"""What an export says that it drops: each thing when it is there, and not when it is not."""

import csv
import io
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import RedOp
from stepmark.model.ops import EmbeddingBag, Gemm, Layout, Op, Phase
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Group, Kernel, Workload
from stepmark.workloads.formats import FORMATS, aicb, chakra, op_csv, param_trace, simai
from stepmark.workloads.formats.loss import Representable, losses

from .hand_made import every_kind, message, not_held, op, pipeline

PRODUCT = Gemm(m=8, n=16, k=32, layout=Layout.NN)
PLAIN = (
    op(PRODUCT, Phase.FWD, "x", time_s=1e-6, layer=None, microbatch=None),
    message("all_reduce", redop=RedOp.SUM),
)
Change = Callable[[Workload], Workload]


def step(*ops: CommOp | ComputeOp) -> Workload:
    return replace(every_kind(), blocks={"step": ops})


def plus(*ops: CommOp | ComputeOp) -> Change:
    return lambda workload: replace(workload, blocks={"step": (*PLAIN, *ops)})


def computing(what: Op | Kernel, **more: object) -> Change:
    return plus(op(what, Phase.FWD, "y", **({"time_s": 1e-6} | more)))


def with_setup(workload: Workload) -> Workload:
    stages = tuple(replace(one, setup="step") for one in workload.stages)
    return replace(workload, stages=stages)


def alone(workload: Workload) -> Workload:
    return replace(workload, groups={"all": Group(digits=((1, 1),))})


CASES: list[tuple[ModuleType, str, Change]] = [
    (chakra, "1 computations without a time", computing(PRODUCT, time_s=None)),
    (chakra, "1 computations without FLOPs or bytes", computing(Kernel(name="k", flops=1))),
    (
        chakra,
        "1 computations without FLOPs or bytes",
        computing(Kernel(name="k", bytes_moved=1)),
    ),
    (chakra, "below a microsecond", computing(PRODUCT, time_s=1.5e-6)),
    (chakra, "uneven parts", plus(message("all_to_all_v"))),
    (
        chakra,
        "barrier, reduce: in the file",
        plus(message("barrier"), message("reduce", root=0)),
    ),
    (chakra, "gather: in the file", plus(message("gather", root=0))),
    (chakra, "scatter: in the file", plus(message("scatter", root=0))),
    (chakra, "broadcast: in the file", plus(message("broadcast", root=0))),
    (chakra, "all_reduce of all: 1 message, 4 KiB", alone),
    (chakra, "all_reduce of all before the first step: 1 message, 4 KiB", with_setup),
    (chakra, "1 computations before the first step", with_setup),
    (param_trace, "1 computations that are no product", computing(Kernel(name="k"))),
    (param_trace, "1 computations that", computing(replace(PRODUCT, dtype=DType.FP8_E4M3))),
    (param_trace, "layouts", computing(replace(PRODUCT, layout=Layout.NT))),
    (param_trace, "layouts", computing(replace(PRODUCT, out_dtype=DType.FP32))),
    (
        param_trace,
        "skew and type of lookups",
        computing(EmbeddingBag(rows=9, dim=8, pooling=2, batch=4, alpha=1.1)),
    ),
    (
        param_trace,
        "skew and type of lookups",
        computing(EmbeddingBag(rows=9, dim=8, pooling=2, batch=4, dtype=DType.BF16)),
    ),
    (param_trace, "streams", plus(message("all_gather", stream="dp"))),
    (
        param_trace,
        "fp8_e4m3, uint32",
        plus(*(message("all_gather", dtype=one) for one in (DType.FP8_E4M3, DType.UINT32))),
    ),
    (param_trace, "other than sum: max", plus(message("all_reduce", redop=RedOp.MAX))),
    (param_trace, "uneven parts", plus(message("all_to_all_v"))),
    (param_trace, "broadcast: in the file", plus(message("broadcast", root=0))),
    (param_trace, "roots: in the file", plus(message("reduce", root=1, redop=RedOp.SUM))),
    (
        param_trace,
        "one call",
        plus(message("send", peer=1), message("recv", peer=1, fused=True)),
    ),
    (param_trace, "all_reduce of all: 1 message, 4 KiB", alone),
    (param_trace, "all_reduce of all before the first step: 1 message, 4 KiB", with_setup),
    (op_csv, "all_reduce of all before the first step: 1 message, 4 KiB", with_setup),
]


@pytest.mark.parametrize(
    ("form", "says", "change"),
    CASES,
    ids=[f"{one.__name__[27:]}: {says}".replace(" ", "_") for one, says, _ in CASES],
)
def test_what_is_there_is_said_and_else_not(
    form: ModuleType, says: str, change: Change
) -> None:
    plain = step(*PLAIN)
    assert not any(says in line for line in not_held(form, plain))
    assert any(says in line for line in not_held(form, change(plain)))


@pytest.mark.parametrize("form", [chakra, param_trace])
def test_waiting_is_not_computation(form: ModuleType) -> None:
    waits = op(Kernel(name="wait", flops=0, bytes_moved=0), Phase.FWD, "x")
    assert not any("computations" in line for line in not_held(form, step(*PLAIN, waits)))


def changed(one: CommOp | ComputeOp, two: CommOp | ComputeOp) -> set[str]:
    """Fields in which two operations differ."""
    names = [field.name for field in fields(one)]
    return {name for name in names if getattr(one, name) != getattr(two, name)}


@pytest.mark.parametrize(
    ("form", "dropped"),
    [
        # after and name become dependencies; test_chakra compares these
        (chakra, {"op", "collective", "group", "name", "after", "peer"}),
        (
            param_trace,
            {
                *("group", "name", "after", "peer", "stream", "layer", "microbatch", "fused"),
                *("recompute", "time_s", "op"),
            },
        ),
    ],
    ids=["chakra", "param"],
)
@pytest.mark.parametrize("workload", [every_kind(), pipeline()], ids=["every", "pipeline"])
def test_nothing_else_is_lost_on_the_way(
    form: ModuleType, dropped: set[str], workload: Workload, tmp_path: Path
) -> None:
    for name, chunks in form.files(workload):
        data = b"".join(one if isinstance(one, bytes) else one.encode() for one in chunks)
        (tmp_path / name).write_bytes(data)
    again = form.read(tmp_path)
    ours = [one for one in workload.expand() if form is chakra or _has_entry(one)]
    pairs = zip(ours, again.expand(), strict=True)
    lost = set().union(*(changed(one, two) for one, two in pairs))
    assert lost <= dropped


def _has_entry(one: CommOp | ComputeOp) -> bool:
    return isinstance(one, CommOp) or isinstance(one.op, Gemm | EmbeddingBag)


def test_every_field_has_a_column_or_is_said_to_have_none() -> None:
    """Fields of operations are in the table, by column, or in what `omissions` returns."""
    held = {
        *("op", "phase", "module", "layer", "microbatch", "stream", "name", "after", "time_s"),
        *("collective", "dtype", "count", "group"),
    }
    words = {
        "redop": "reductions",
        "root": "roots",
        "peer": "peers",
        "fused": "one call",
        "recompute": "recomputed",
        "start_s": "start times",
    }
    begun = replace(PLAIN[1], start_s=0.5)
    said = " ".join(op_csv.omissions(every_kind()) + op_csv.omissions(step(begun)))
    every = {field.name for kind in (ComputeOp, CommOp) for field in fields(kind)}
    assert every == held | set(words)
    assert all(word in said for word in words.values())
    (row,) = csv.DictReader(io.StringIO("".join(op_csv.write(step(PLAIN[1])))))
    assert (row["stream"], row["shape"], row["dtype"]) == (COMPUTE, "1024", "fp32")


@pytest.mark.parametrize("stages", [[0], [1], [0, 1]])
def test_notes_count_the_calls_of_the_stages_that_are_written(stages: list[int]) -> None:
    workload = pipeline()
    ops = [one for stage in stages for one in workload.expand(stage)]
    computes = [one for one in ops if isinstance(one, ComputeOp)]
    untimed = sum(one.time_s is None for one in computes)
    others = sum(not isinstance(one.op, Gemm) for one in computes)
    said = "; ".join(
        line for form in (chakra, param_trace) for line in form.omissions(workload, stages)
    )
    assert f"; {untimed} computations without a time" in said
    assert f"; {others} computations that are no product" in said
    lines = aicb.omissions(workload, stages)
    counts = [int(line.split()[1]) for line in lines if "only matrix" in line]
    assert sum(counts) == others


@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].framework])
def test_every_format_that_writes_says_what_it_drops(name: str) -> None:
    module = FORMATS[name].load()
    said = module.omissions(every_kind())
    assert all(isinstance(line, str) and "\n" not in line for line in said)
    assert bool(said) is (name != "native")


@pytest.mark.parametrize(
    ("ranks", "count", "stated"),
    [
        (2, 1024, []),
        (2, 512, ["all_gather of all: 1 message, 8 KiB; in the file 1 message, 4 KiB"]),
        (
            4,
            512,
            [
                "all_gather of all: 1 message, 8 KiB over 2 ranks; in the file 1 message, "
                "8 KiB over 4 ranks"
            ],
        ),
    ],
)
def test_another_size_or_group_is_stated(ranks: int, count: int, stated: list[str]) -> None:
    sent = message("all_gather")

    def kept(workload: Workload, stage: int) -> Representable:
        file = Representable()
        file.add(replace(sent, count=count), Group(digits=((ranks, 1),)), 1)
        return file

    assert losses(step(sent), kept, [0]) == stated


@pytest.mark.parametrize("kind", [aicb, chakra, op_csv, param_trace, simai])
def test_start_times_are_in_no_other_format(kind: ModuleType) -> None:
    plain = step(*PLAIN)
    begun = step(PLAIN[0], replace(PLAIN[1], start_s=0.5))
    assert not any("start times" in line for line in kind.omissions(plain, [0]))
    assert any("start times" in line for line in kind.omissions(begun, [0]))
