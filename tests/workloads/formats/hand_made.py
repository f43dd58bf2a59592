"""Small workloads written by hand: stages, nested runs, asynchronous collectives."""

from types import ModuleType

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import RedOp
from stepmark.model.ops import Attention, EmbeddingBag, Gemm, Layout, Norm, Op, Optimizer, Phase
from stepmark.step.workload import Block, CommOp, ComputeOp, Group, Kernel, Run, Stage, Workload
from stepmark.workloads.formats.loss import losses

HIDDEN, TOKENS = 64, 32


def not_held(form: ModuleType, workload: Workload) -> list[str]:
    """Return all that the files of all stages are said to lack."""
    stages = range(len(workload.stages))
    return [*form.omissions(workload), *losses(workload, form.kept, stages)]


QKV = Gemm(m=TOKENS, n=96, k=HIDDEN)
QKV_DGRAD = Gemm(m=TOKENS, n=HIDDEN, k=96, layout=Layout.NN)
QKV_WGRAD = Gemm(m=96, n=HIDDEN, k=TOKENS, layout=Layout.TN)
ADD = Kernel(name="add", flops=0, bytes_moved=3 * TOKENS * HIDDEN * 2)


def core(phase: Phase) -> Attention:
    return Attention(
        batch=1,
        seq_q=TOKENS,
        seq_kv=TOKENS,
        heads=2,
        kv_heads=2,
        head_dim_qk=16,
        head_dim_v=16,
        phase=phase,
    )


def op(what: Op | Kernel, phase: Phase, module: str, **more: object) -> ComputeOp:
    values = {"layer": 0, "microbatch": 0} | more
    return ComputeOp(op=what, phase=phase, module=module, **values)  # type: ignore[arg-type]


def tp_all_reduce(phase: Phase) -> CommOp:
    return CommOp(
        collective="all_reduce",
        dtype=DType.BF16,
        count=TOKENS * HIDDEN,
        group="tp",
        phase=phase,
        module="attention.out",
        layer=0,
        microbatch=0,
        redop=RedOp.SUM,
    )


def passed_on(collective: str, phase: Phase, peer: int) -> CommOp:
    return CommOp(
        collective=collective,
        dtype=DType.BF16,
        count=TOKENS * HIDDEN,
        group="pp",
        phase=phase,
        module="pipeline",
        microbatch=0,
        peer=peer,
    )


def dp(collective: str, **more: object) -> CommOp:
    values = {"stream": "dp", "redop": RedOp.NONE} | more
    return CommOp(
        collective=collective,
        dtype=DType.FP32,
        count=1000,
        group="dp",
        phase=Phase.OPTIM,
        module="optimizer",
        **values,  # type: ignore[arg-type]
    )


def pipeline(*, stages: int = 2, microbatches: int = 3, layers: int = 2) -> Workload:
    """tp 2 x dp 2 x stages ranks: all forward, then all backward, then the optimizer."""
    blocks: dict[str, Block] = {
        "layer fwd": (
            op(Norm(tokens=TOKENS, hidden=HIDDEN), Phase.FWD, "attention.norm"),
            op(QKV, Phase.FWD, "attention.qkv"),
            op(core(Phase.FWD), Phase.FWD, "attention.core"),
            tp_all_reduce(Phase.FWD),
            op(ADD, Phase.FWD, "attention.residual"),
        ),
        "layer bwd": (
            op(core(Phase.BWD), Phase.BWD, "attention.core"),
            op(QKV_DGRAD, Phase.DGRAD, "attention.qkv"),
            tp_all_reduce(Phase.DGRAD),
            op(QKV_WGRAD, Phase.WGRAD, "attention.qkv", name="grads"),
        ),
    }
    made = []
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        run = {"times": layers, "layer": stage * layers}
        before: Block = () if first else (passed_on("recv", Phase.FWD, stages - 1),)
        behind: Block = () if last else (passed_on("send", Phase.FWD, 1),)
        blocks[f"fwd {stage}"] = (
            *before,
            Run(block="layer fwd", layer_step=1, **run),
            *behind,
        )
        before = () if last else (passed_on("recv", Phase.BWD, 1),)
        behind = () if first else (passed_on("send", Phase.BWD, stages - 1),)
        back = run | {"layer": stage * layers + layers - 1}
        blocks[f"bwd {stage}"] = (
            *before,
            Run(block="layer bwd", layer_step=-1, **back),
            *behind,
        )
        blocks[f"step {stage}"] = (
            Run(block=f"fwd {stage}", times=microbatches, microbatch_step=1),
            Run(block=f"bwd {stage}", times=microbatches, microbatch_step=1),
            dp("reduce_scatter", name="reduced", after=("grads",), redop=RedOp.SUM),
            ComputeOp(
                op=Optimizer(num_params=1000),
                phase=Phase.OPTIM,
                module="optimizer",
                after=("reduced",),
                name="updated",
            ),
            dp("all_gather", after=("updated",)),
        )
        held = tuple(range(stage * layers, (stage + 1) * layers))
        made.append(Stage(step=f"step {stage}", layers=held))
    workload = Workload(
        name="by hand",
        rules="hand",
        source="a test",
        world_size=4 * stages,
        num_microbatches=microbatches,
        groups={
            "tp": Group(digits=((2, 1),)),
            "dp": Group(digits=((2, 2),)),
            "pp": Group(digits=((stages, 4),)),
        },
        blocks=blocks,
        stages=tuple(made),
    )
    workload.check()
    return workload


def message(collective: str, **more: object) -> CommOp:
    values = {"dtype": DType.FP32, "count": 1024, "group": "all", "phase": Phase.FWD} | more
    return CommOp(collective=collective, module=collective, **values)  # type: ignore[arg-type]


def every_kind() -> Workload:
    """Two ranks, every collective, calls in one, waits at once, later and never."""
    gemm = Gemm(m=8, n=16, k=32, dtype=DType.FP32, layout=Layout.NN)
    looked_up = EmbeddingBag(rows=1000, dim=64, pooling=20, batch=512)
    swap = (message("send", peer=1), message("recv", peer=1, fused=True))
    later = {"stream": "pp", "peer": 1}
    block = (
        message("all_reduce", redop=RedOp.SUM, dtype=DType.BF16),
        message("all_gather", layer=3, microbatch=1),
        message("reduce_scatter", redop=RedOp.SUM, phase=Phase.BWD, recompute=True),
        message("broadcast", root=0, dtype=DType.INT64, count=7),
        message("reduce", root=1, redop=RedOp.SUM),
        message("all_to_all", dtype=DType.UINT8),
        message("all_to_all_v", dtype=DType.FP16),
        message("gather", root=1, dtype=DType.FP64),
        message("scatter", root=0, dtype=DType.INT8),
        message("barrier", count=0),
        *swap,
        message("send", name="sent", **later),
        message("recv", fused=True, name="received", **later),
        op(gemm, Phase.FWD, "one", after=("sent", "received"), time_s=2e-6),
        message("all_reduce", stream="dp", name="reduced", redop=RedOp.SUM, dtype=DType.INT32),
        message("all_gather", stream="dp", name="reduced"),
        op(looked_up, Phase.FWD, "two", time_s=1.5e-6),
        op(gemm, Phase.DGRAD, "three", after=("reduced~1",), recompute=True, time_s=0.25e-6),
        op(ADD, Phase.STEP, "four", after=("reduced",), layer=None, microbatch=None),
        message("reduce_scatter", stream="dp", redop=RedOp.SUM, phase=Phase.OPTIM),
    )
    workload = Workload(
        name="every kind",
        rules="hand",
        world_size=2,
        groups={"all": Group(digits=((2, 1),))},
        blocks={"step": block},
        stages=(Stage(step="step", layers=(0, 3)),),
    )
    workload.check()
    return workload
