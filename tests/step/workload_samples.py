"""Workloads: one small and readable, and any that the types allow."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from tests.model.ops_samples import OPTIONS

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.layers import MoeConfig
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, Phase
from stepmark.step.workload import (
    Block,
    CommOp,
    ComputeOp,
    Group,
    Item,
    Kernel,
    Run,
    Stage,
    Workload,
)


def compute(module: str = "mlp.up", phase: Phase = Phase.FWD, **more: Any) -> ComputeOp:
    plain: dict[str, Any] = {"op": Gemm(m=64, n=48, k=32), "layer": 0, "microbatch": 0}
    return ComputeOp(module=module, phase=phase, **(plain | more))


def comm(collective: str = "all_reduce", count: int = 64, **more: Any) -> CommOp:
    plain: dict[str, Any] = {
        "dtype": DType.BF16,
        "group": "tp",
        "phase": Phase.FWD,
        "module": "mlp.down",
        "layer": 0,
        "microbatch": 0,
    }
    return CommOp(collective=collective, count=count, **(plain | more))


def small(num_microbatches: int = 4, num_layers: int = 3) -> Workload:
    """Two stages of three layers, two ranks of tensor parallelism each."""
    layer: Block = (compute(), comm(redop=RedOp.SUM))
    forward = Run(block="layer", times=num_layers, layer_step=1)
    sent = comm(SEND, module="pipeline", group="pp", layer=None, stream="pp", peer=1)
    received = comm(RECV, module="pipeline", group="pp", layer=None, stream="pp", peer=-1)
    each = {"times": num_microbatches, "microbatch_step": 1}
    return Workload(
        name="small",
        rules="test",
        world_size=4,
        num_microbatches=num_microbatches,
        groups={
            "tp": Group(digits=((2, 1),)),
            "pp": Group(digits=((2, 2),)),
        },
        blocks={
            "layer": layer,
            "first": (forward, sent),
            "second": (received, forward),
            "step 0": (Run(block="first", **each),),
            "step 1": (
                Run(block="second", **each),
                comm(count=1, dtype=DType.FP32, layer=None, microbatch=None),
            ),
            "setup": (comm(str(Collective.BROADCAST), layer=None, microbatch=None, root=0),),
        },
        stages=(
            Stage(step="step 0", setup="setup", layers=tuple(range(num_layers))),
            Stage(step="step 1", setup="setup", layers=tuple(range(num_layers))),
        ),
    )


texts = st.text(max_size=6)
relative = st.none() | st.integers(-3, 3)
times_s = st.none() | st.floats(0, 10, allow_nan=False)

computes = st.builds(
    ComputeOp,
    op=st.sampled_from(OPTIONS)
    | st.builds(
        Kernel,
        name=texts,
        flops=st.none() | st.integers(0, 2**70),
        bytes_moved=st.none() | st.integers(0, 9),
    ),
    phase=st.sampled_from(Phase),
    module=texts,
    layer=relative,
    microbatch=relative,
    stream=st.sampled_from(["compute", "dp"]),
    name=texts,
    after=st.lists(st.sampled_from(["", "~1"]), max_size=2).map(tuple),
    recompute=st.booleans(),
    time_s=times_s,
)


@st.composite
def comms(draw: st.DrawFn) -> CommOp:
    collective = draw(st.sampled_from([*map(str, Collective), SEND, RECV]))
    return CommOp(
        collective=collective,
        dtype=draw(st.sampled_from(MESSAGE_DTYPES)),
        count=draw(st.integers(0, 2**45)),
        group=draw(st.sampled_from(["tp", "dp"])),
        phase=draw(st.sampled_from(Phase)),
        module=draw(texts),
        layer=draw(relative),
        microbatch=draw(relative),
        stream=draw(st.sampled_from(["compute", "dp"])),
        name=draw(texts),
        after=tuple(draw(st.lists(st.sampled_from(["", "~1"]), max_size=2))),
        redop=draw(st.sampled_from(RedOp)),
        root=draw(st.none() | st.integers(0, 1)),
        peer=draw(st.integers(-2, 2)) if collective in (SEND, RECV) else None,
        fused=draw(st.booleans()),
        recompute=draw(st.booleans()),
        time_s=draw(times_s),
    )


runs = st.builds(
    dict,
    times=st.integers(1, 4),
    layer=st.integers(-2, 2),
    layer_step=st.integers(-2, 2),
    microbatch=st.integers(0, 2),
    microbatch_step=st.integers(0, 2),
)
plain = st.none() | st.booleans() | st.integers(-9, 2**60) | texts | st.floats(allow_nan=False)
MODELS = (None, find_model("llama-3.1-8b"), find_model("deepseek-v3"))
assert MODELS[2] is not None
assert isinstance(MODELS[2].moe, MoeConfig)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Blocks run only blocks before them, so none runs itself."""
    blocks: dict[str, Block] = {}
    awaited = draw(st.text(min_size=1, max_size=6))
    for index in range(draw(st.integers(1, 5))):
        items: list[Item] = [
            replace(one, after=tuple(f"{awaited}{back}" for back in one.after))
            for one in draw(st.lists(computes | comms(), max_size=4))
        ]
        if any(isinstance(one, ComputeOp | CommOp) and one.after for one in items):
            items.append(compute(name=awaited))
        for name in draw(st.lists(st.sampled_from(list(blocks)), max_size=2)) if blocks else []:
            place = draw(st.integers(0, len(items)))
            items.insert(place, Run(block=name, **draw(runs)))
        blocks[f"block {index}"] = tuple(items)
    num_stages = draw(st.integers(1, 2))
    names = st.sampled_from(list(blocks))
    origin: Mapping[str, object] = {"simai": {"rows": {"0": ["a", "b"]}, "n": 1}}
    return Workload(
        name=draw(texts),
        rules=draw(texts),
        source=draw(texts),
        world_size=8,
        num_microbatches=draw(st.integers(1, 9)),
        model=draw(st.sampled_from(MODELS)),
        settings=draw(st.dictionaries(texts, plain.filter(is_finite), max_size=3)),
        groups={"tp": Group(digits=((2, 1),)), "dp": Group(digits=((2, 2), (2, 4)))},
        blocks=blocks,
        stages=tuple(
            Stage(
                step=draw(names),
                setup=draw(names | st.just("")),
                layers=tuple(draw(st.lists(st.integers(0, 200), max_size=3))),
                has_embedding=draw(st.booleans()),
                has_head=bool(index),
            )
            for index in range(num_stages)
        ),
        notes=tuple(draw(st.lists(texts, max_size=2))),
        origin=draw(st.sampled_from([{}, origin])),
    )


def is_finite(value: object) -> bool:
    return not isinstance(value, float) or abs(value) < 1e300
