"""Costs of operations: every measured nanosecond goes to an operation, and scales with it."""

import random
from dataclasses import replace

import pytest

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, DataParallel, Precision, Recompute
from stepmark.efficiency.kernel_times import Style, kernel_times
from stepmark.model.device import load_devices
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Attention, Gemm, Phase
from stepmark.model.packing import Packing
from stepmark.model.parallel import ParallelConfig
from stepmark.predictions.costs import (
    OperatorCosts,
    ProfiledCosts,
    SheetCosts,
    first_of,
    sources,
)
from stepmark.predictions.framework_job import basis_of, options_class, workload_of
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.prediction_notes import notes_of
from stepmark.step.trace_ops import COMM, COMPUTE, MEMORY, MeasuredOp, OpKey, OpTable
from stepmark.step.workload import ComputeOp, Kernel, Workload
from stepmark.timeline.ledger import Work, work_of_op
from stepmark.timeline.step_cost import Source, known_time
from stepmark.workloads.rules.pytorch.case import of_case

MODEL = ModelConfig(
    name="small",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=512,
    seq_len=64,
)
CASE = TrainCase(model=MODEL, mbs=2, device="cuda", precision=Precision.AMP)
KERNELS = {
    Work.MATMUL: "nvjet_tst_128x256",
    Work.ATTENTION: "flash_fwd_kernel",
    Work.ELEMENTWISE: "triton_poi_fused_add_0",
    Work.LOSS: "softmax_warp_forward",
    Work.OPTIMIZER: "multi_tensor_apply_kernel",
}


def test_a_prediction_says_first_what_is_assumed_of_packed_sequences() -> None:
    job = options_class("fsdp")(
        models=("llama-3.1-8b",),
        framework="fsdp",
        world_size=8,
        packing=Packing(mean=1000, longest=4096),
        device="h100-sxm",
    )
    prediction = predict(inputs_of(basis_of(job), workload_of(job)))
    note = next(iter(notes_of(prediction)))
    assert note.startswith("packing 1000,4096: lengths of pieces are assumed to have the law")
    assert "attends to 893 keys without windows, at least to 500 (equal pieces)" in note


def computations(workload: Workload) -> list[ComputeOp]:
    return [op for op in workload.expand() if isinstance(op, ComputeOp)]


def row(
    work: Work, role: str, phase: str, *, layer: int | None, time_ns: int, kernels: int = 1
) -> MeasuredOp:
    key = OpKey(role, "", layer, phase, False, COMPUTE, "aten::mm", KERNELS[work])
    return MeasuredOp(1, key, time_ns, kernels, kernels, 1, 1)


def table(*ops: MeasuredOp) -> OpTable:
    steps = tuple(sorted({op.step for op in ops})) or (1,)
    return OpTable(
        steps=steps,
        step_ns=(1,) * len(steps),
        is_marked=True,
        is_host=False,
        outside_ns=0,
        ops=ops,
    )


def total_s(costs: ProfiledCosts, workload: Workload) -> float:
    return sum(cost.total_s for op in computations(workload) if (cost := costs(op)))


@pytest.mark.parametrize("compile_", [CompileScope.NONE, CompileScope.BLOCK])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL, Recompute.OPS])
@pytest.mark.parametrize("seed", range(4))
def test_all_measured_time_goes_to_operations(
    compile_: CompileScope, recompute: Recompute, seed: int
) -> None:
    workload = of_case(replace(CASE, compile=compile_, recompute=recompute, grad_accum=2))
    rng = random.Random(seed)
    roles = ["block", "output", "model", "", "data", "gradients", "unheard of", "head | loss"]
    roles += sorted({op.module for op in computations(workload)})
    phases = ["fwd", "dgrad", "wgrad", "bwd", "optim", ""]
    ops = []
    for _ in range(60):
        key = OpKey(
            rng.choice(roles),
            "",
            rng.choice([None, 0, 1]),
            rng.choice(phases),
            rng.random() < 0.3,
            rng.choice([COMPUTE, MEMORY]),
            "aten::mm",
            rng.choice(list(KERNELS.values())),
        )
        ops.append(MeasuredOp(1, key, rng.randrange(1, 10**6), 1, 2, 1, 1))
    measured = table(*ops)
    costs = ProfiledCosts(workload, measured)
    assert total_s(costs, workload) == pytest.approx(1e-9 * sum(op.time_ns for op in ops))
    counts = sum(cost.num_kernels for op in computations(workload) if (cost := costs(op)))
    assert counts == pytest.approx(2 * len(ops))


def test_communication_is_no_compute() -> None:
    key = OpKey("blocks", "", 0, "fwd", False, COMM, "c10d::x", "ncclDevKernel_AllGather")
    workload = of_case(CASE)
    costs = ProfiledCosts(workload, table(MeasuredOp(1, key, 5, 1, 1, 5, 5)))
    assert total_s(costs, workload) == 0


def test_a_product_has_the_time_of_its_own_role_and_phase() -> None:
    costs = ProfiledCosts(
        of_case(CASE),
        table(
            row(Work.MATMUL, "mlp.down", "dgrad", layer=0, time_ns=300),
            row(Work.MATMUL, "mlp.down", "dgrad", layer=1, time_ns=500),
            row(Work.ELEMENTWISE, "block", "fwd", layer=0, time_ns=80),
        ),
    )
    by_place = {
        (op.module, op.phase, op.layer): costs(op) for op in computations(of_case(CASE))
    }
    cost = by_place["mlp.down", Phase.DGRAD, 1]
    assert cost is not None
    assert cost.time_s == {Work.MATMUL: pytest.approx(400e-9)}  # the mean of both layers
    assert cost.source is Source.MEASURED
    product = by_place["mlp.down", Phase.FWD, 0]
    assert product is not None
    assert product.total_s == 0
    norm = by_place["attention.norm", Phase.FWD, 0]
    assert norm is not None
    assert set(norm.time_s) == {Work.ELEMENTWISE}
    assert norm.total_s > 0


def test_what_the_trace_names_is_no_part_of_a_compiled_block() -> None:
    """FSDP's copies have rows of their own, and do not grow with the batch as a block does."""
    case = replace(CASE, parallel=ParallelConfig(dp_shard=2), data_parallel=DataParallel.FSDP)
    costs = ProfiledCosts(
        of_case(case),
        table(
            row(Work.ELEMENTWISE, "blocks", "fwd", layer=0, time_ns=600),
            row(Work.ELEMENTWISE, "block", "fwd", layer=0, time_ns=80),
        ),
    )
    copies = [
        cost.total_s
        for op in computations(of_case(case))
        if (op.module, op.phase) == ("blocks", Phase.FWD) and (cost := costs(op))
    ]
    assert sum(copies) == pytest.approx(600e-9)


def test_a_deeper_model_has_as_much_more_of_its_layers() -> None:
    measured = table(
        row(Work.MATMUL, "mlp.up", "fwd", layer=0, time_ns=100),
        row(Work.MATMUL, "mlp.up", "fwd", layer=1, time_ns=100),
        row(Work.MATMUL, "head", "fwd", layer=None, time_ns=70),
    )
    costs = ProfiledCosts(of_case(CASE), measured)
    deep = of_case(replace(CASE, model=replace(MODEL, num_layers=10)))
    assert total_s(costs, deep) == pytest.approx(1070e-9)
    sources = {cost.source for op in computations(deep) if (cost := costs(op))}
    assert sources == {Source.MEASURED}


def test_another_batch_is_scaled_and_says_so() -> None:
    measured = table(row(Work.MATMUL, "head", "fwd", layer=None, time_ns=70))
    costs = ProfiledCosts(of_case(CASE), measured)
    large = of_case(replace(CASE, mbs=6))
    (head,) = (op for op in computations(large) if op.module == "head" and op.phase == "fwd")
    cost = costs(head)
    assert cost is not None
    assert cost.total_s == pytest.approx(210e-9)
    assert cost.source is Source.SCALED


def test_the_optimizer_is_proportional_to_its_parameters() -> None:
    workload = of_case(CASE)
    measured = table(row(Work.OPTIMIZER, "update", "optim", layer=None, time_ns=1000))
    costs = ProfiledCosts(workload, measured)
    deep = of_case(replace(CASE, model=replace(MODEL, num_layers=20)))
    ratio = replace(MODEL, num_layers=20).num_params / MODEL.num_params
    assert total_s(costs, deep) / total_s(costs, workload) == pytest.approx(ratio)


@pytest.mark.parametrize(("kernel_ns", "grows"), [(2900, False), (3100, True)])
def test_kernels_that_combine_norms_are_as_many_for_more_parameters(
    kernel_ns: int, grows: bool
) -> None:
    """They are the short ones. The others go through parameters in chunks."""
    large = row(Work.OPTIMIZER, "update", "optim", layer=None, time_ns=4 * 90_000, kernels=4)
    other = row(Work.OPTIMIZER, "clip", "optim", layer=None, time_ns=2 * kernel_ns, kernels=2)
    costs = ProfiledCosts(of_case(CASE), table(large, other))
    deeper = replace(MODEL, num_layers=20)
    ratio = deeper.num_params / MODEL.num_params
    for model, expected in ((MODEL, 6), (deeper, 4 * ratio + 2 * (ratio if grows else 1))):
        ops = computations(of_case(replace(CASE, model=model)))
        counts = [cost.num_kernels for op in ops if (cost := costs(op))]
        assert sum(counts) == pytest.approx(expected)


def test_steps_are_combined_by_their_median() -> None:
    first = row(Work.MATMUL, "head", "fwd", layer=None, time_ns=100)
    others = [
        replace(first, step=2, time_ns=110),
        replace(first, step=3, time_ns=9000),  # a hiccup
    ]
    costs = ProfiledCosts(of_case(CASE), table(first, *others))
    assert total_s(costs, of_case(CASE)) == pytest.approx(110e-9)


def test_windows_and_sinks_of_pytorch_run_flex_attention() -> None:
    """Other frameworks have fused kernels for them; neither was measured as such."""
    device = load_devices()["h200-sxm"]
    of_pytorch = SheetCosts(device, {"compile": CompileScope.NONE})
    of_another = SheetCosts(device)
    sizes = {"batch": 2, "heads": 64, "kv_heads": 8, "head_dim_qk": 64, "head_dim_v": 64}
    full = Attention(seq_q=8192, seq_kv=8192, **sizes)
    for op in (
        replace(full, window=1024),
        replace(full, sinks=True),
        replace(full, softcap=50),
    ):
        times = []
        for costs in (of_pytorch, of_another):
            cost = costs(ComputeOp(op=op, phase=Phase.FWD, module="attention.core"))
            assert cost
            assert cost.source is Source.RULE
            times += cost.time_s.values()
        assert times[0] == pytest.approx(1.168 * times[1], rel=0.01)
    costs_of_full = [
        costs(ComputeOp(op=full, phase=Phase.FWD, module="attention.core"))
        for costs in (of_pytorch, of_another)
    ]
    assert costs_of_full[0] == costs_of_full[1]
    # Keys that the indexer of latent attention chooses are no window.
    latent = {"heads": 64, "kv_heads": 64, "head_dim_qk": 192, "head_dim_v": 128, "batch": 2}
    chosen = Attention(seq_q=8192, seq_kv=8192, window=2048, **latent)
    costs_of_chosen = [
        costs(ComputeOp(op=chosen, phase=Phase.FWD, module="attention.core"))
        for costs in (of_pytorch, of_another)
    ]
    assert costs_of_chosen[0] == costs_of_chosen[1]


def test_a_cost_by_data_sheet_never_beats_it() -> None:
    costs = SheetCosts(load_devices()["h100-sxm"])
    for op in computations(of_case(CASE)):
        cost = costs(op)
        if cost is None:
            continue
        assert cost.source in (Source.SHEET, Source.RULE)
        assert cost.total_s > (op.op.flops or 0) / 989.4e12
        assert cost.total_s > (op.op.bytes_moved or 0) / 3.35e12
    assert costs(ComputeOp(op=Kernel(name="x"), phase=Phase.FWD, module="x")) is None
    few = Gemm(m=16, n=8192, k=8192)  # of which the fit has none
    cost = costs(ComputeOp(op=few, phase=Phase.FWD, module="head"))
    assert cost is not None
    assert cost.total_s > few.bytes_moved / 3.35e12


def test_costs_by_data_sheet_reach_measured_shares_of_it() -> None:
    """Products: 0.60 to 0.73 (README of the data); AdamW: 3.50 of 4.8 TB/s (docs/diary)."""
    h200 = load_devices()["h200-sxm"]
    costs = SheetCosts(h200)
    gemm = Gemm(m=8192, n=8192, k=8192)
    product = costs(ComputeOp(op=gemm, phase=Phase.FWD, module="x"))
    assert product is not None
    assert 0.66 <= gemm.flops / (h200.peak(gemm.dtype) or 0) / product.total_s <= 0.73
    (update,) = (op for op in computations(of_case(CASE)) if op.module == "update")
    step = costs(update)
    assert step is not None
    assert (update.op.bytes_moved or 0) / step.total_s == pytest.approx(3.50e12, rel=0.01)


def test_autocast_casts_weights_and_their_gradients_by_data_sheet() -> None:
    """Twelve bytes a weight and micro-batch, and six more where a block is computed again."""
    h200 = load_devices()["h200-sxm"]

    def cast_bytes(case: TrainCase) -> float:
        workload = of_case(case)
        kernels = kernel_times(h200)
        of_byte = kernels.time_of(Kernel(name="cast", flops=0, bytes_moved=10**9), Style.EAGER)
        costs = SheetCosts(h200, workload.settings)
        products = [
            op
            for op in workload.expand()
            if isinstance(op, ComputeOp) and isinstance(op.op, Gemm)
        ]
        times = (costs(op).time_s.get(Work.ELEMENTWISE, 0.0) for op in products)
        return sum(times) / of_byte.time_s * 10**9

    weights = MODEL.num_layers * MODEL.layer_params() + MODEL.head_params
    weights -= MODEL.num_layers * 2 * MODEL.hidden_size  # norms
    assert cast_bytes(CASE) == pytest.approx(12 * weights)
    assert cast_bytes(replace(CASE, grad_accum=2)) == pytest.approx(24 * weights)
    assert cast_bytes(replace(CASE, precision=Precision.BF16)) == 0
    sharded = replace(
        CASE, parallel=ParallelConfig(dp_shard=2), data_parallel=DataParallel.FSDP
    )
    assert cast_bytes(sharded) == 0  # what it gathers has 16 bits
    again = cast_bytes(replace(CASE, recompute=Recompute.FULL)) - 12 * weights
    # All of a block but its last product, whose result nothing needs.
    last = MODEL.num_layers * MODEL.hidden_size * MODEL.ffn_hidden_size
    assert again == pytest.approx(6 * (weights - MODEL.head_params - last))


@pytest.mark.parametrize(
    ("setting", "faster", "slower"),
    [
        ("compile", "layers", "none"),
        ("compile", "loss", "none"),
        ("compile", "block", "layers"),
        ("compile", "model", "loss"),
        ("attention_backend", "auto", "flash"),
    ],
)
def test_what_is_compiled_and_the_kernel_of_attention_change_times(
    setting: str, faster: str, slower: str
) -> None:
    cls = options_class("pytorch")

    def seconds(word: str) -> float:
        job = cls(
            framework="pytorch",
            models=("llama-3.1-8b",),
            nproc=1,
            num_layers=8,
            device="h100-sxm",
            host="fast",
            **{setting: word},
        )
        return predict(inputs_of(basis_of(job), workload_of(job))).step_s

    assert seconds(faster) < 0.97 * seconds(slower)


@pytest.mark.parametrize(("time_s", "known_s"), [(5e-8, None), (2e-7, 2e-7), (None, None)])
def test_a_filler_of_a_file_is_no_time(time_s: float | None, known_s: float | None) -> None:
    """AICB writes 1 ns for what it does not know, and sums these."""
    gemm = Gemm(m=64, n=64, k=64)
    op = ComputeOp(op=gemm, phase=Phase.FWD, module="x", time_s=time_s)
    assert known_time(op) == known_s


def test_the_first_source_that_knows_an_operation_counts() -> None:
    gemm = Gemm(m=64, n=64, k=64)
    known = ComputeOp(op=gemm, phase=Phase.FWD, module="x")
    other = replace(known, op=Gemm(m=64, n=64, k=128))
    cost = first_of(sources(load_devices()["h200-sxm"], [OperatorCosts({gemm: 3e-6})]))
    measured, estimated = cost(known), cost(other)
    assert measured is not None
    assert estimated is not None
    assert (measured.total_s, measured.source) == (3e-6, Source.OPERATOR)
    assert estimated.source is Source.SHEET


def test_kinds_of_work() -> None:
    works = {op.module: work_of_op(op) for op in computations(of_case(CASE))}
    assert works["mlp.down"] is Work.MATMUL
    assert works["attention.core"] is Work.ATTENTION
    assert works["attention.norm"] is Work.ELEMENTWISE
    assert works["loss"] is Work.LOSS
    assert works["update"] is works["clip"] is Work.OPTIMIZER
