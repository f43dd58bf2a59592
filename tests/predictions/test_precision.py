"""Narrow products by data sheets: never slower than bf16, refused where units lack them."""

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.device import load_devices
from stepmark.model.ops import Attention, Gemm, GroupedGemm
from stepmark.predictions.costs import SheetCosts
from stepmark.predictions.framework_job import basis_of, options_class, workload_of
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.step.layout import is_cast
from stepmark.step.workload import ComputeOp, Workload
from stepmark.timeline.ledger import Work, work_of_op

PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
DTYPES = {"fp8": DType.FP8_E4M3, "mxfp8": DType.MXFP8, "nvfp4": DType.NVFP4}


def workload(framework: str, model: str, precision: str) -> Workload:
    cls = options_class(framework)
    job = cls(framework=framework, models=(model,), nproc=8, precision=precision, num_layers=2)
    return workload_of(job)


def inputs(precision: str, device: str) -> Inputs:
    job = options_class("megatron")(
        framework="megatron",
        models=("llama-3.1-8b",),
        nproc=8,
        precision=precision,
        num_layers=2,
        device=device,
    )
    return inputs_of(basis_of(job), workload_of(job))


def seconds(workload: Workload, device: str) -> dict[Work, float]:
    """Return the time of the products but the head's, and of all casts."""
    cost = SheetCosts(load_devices()[device])
    times = {Work.MATMUL: 0.0, Work.ELEMENTWISE: 0.0}
    for op, count in workload.issued().items():
        if not isinstance(op, ComputeOp) or op.module == "head":
            continue
        if is_cast(op) or work_of_op(op) is Work.MATMUL:
            found = cost(op)
            assert found is not None
            (time_s,) = found.time_s.values()
            times[Work.ELEMENTWISE if is_cast(op) else Work.MATMUL] += count * time_s
    return times


@pytest.mark.parametrize("framework", ["megatron", "fsdp", "ddp"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
def test_narrower_products_have_the_same_flops_and_are_not_slower(
    framework: str, model: str
) -> None:
    steps = [workload(framework, model, precision) for precision in PRECISIONS]
    assert len({step_flops(step) for step in steps}) == 1
    times = [seconds(step, "b200") for step in steps]
    bf16, fp8, mxfp8, nvfp4 = (each[Work.MATMUL] for each in times)
    assert bf16 > max(fp8, mxfp8) >= min(fp8, mxfp8) > nvfp4
    # Compute bounds large products: they are nearly twice as fast. nvfp4 has half the share of
    # its peak (validation/data/efficiency).
    assert fp8 < 0.6 * bf16
    assert nvfp4 < 0.75 * fp8
    assert times[0][Work.ELEMENTWISE] == 0 < min(step[Work.ELEMENTWISE] for step in times[1:])
    # Casts do not eat what the products gain (batches of 8,192 tokens).
    assert sum(times[1].values()) < sum(times[0].values())


def step_flops(step: Workload) -> int:
    return sum(
        count * (op.op.flops or 0)
        for op, count in step.issued().items()
        if isinstance(op, ComputeOp)
    )


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_experts_are_narrow_and_router_and_head_are_not(precision: str) -> None:
    kinds: dict[str, set[DType]] = {}
    for op in workload("megatron", "mixtral-8x7b", precision).issued():
        if isinstance(op, ComputeOp) and isinstance(op.op, Gemm | GroupedGemm | Attention):
            kinds.setdefault(op.module, set()).add(op.op.dtype)
            assert isinstance(op.op, GroupedGemm) == (".experts" in op.module)
    narrow = {DTYPES[precision]} | ({DType.FP8_E5M2} if precision == "fp8" else set())
    for module, dtypes in kinds.items():
        plain = module in ("mlp.router", "head", "attention.core")
        assert dtypes == ({DType.BF16} if plain else narrow), module


@pytest.mark.parametrize(
    ("precision", "device", "names"),
    [
        ("fp8", "a100", "h100-sxm"),
        ("mxfp8", "h200-sxm", "b200, gb200, b300, gb300, mi355x"),
        ("nvfp4", "h100-sxm", "b200, gb200, b300, gb300"),
        ("nvfp4", "mi355x", "b200, gb200, b300, gb300"),
    ],
)
def test_a_device_without_such_units_is_refused(
    precision: str, device: str, names: str
) -> None:
    with pytest.raises(ConfigError, match=f"a device with a peak of .* products: .*{names}"):
        inputs(precision, device)
    assert inputs(precision, "b200").narrow_dtypes


@pytest.mark.parametrize(
    ("seq_len", "mbs", "bf16_s", "fp8_s"), [(512, 40, 4.394, 3.3641), (8192, 3, 8.8945, 7.7014)]
)
def test_fp8_gains_what_a_published_step_gained(
    seq_len: int, mbs: int, bf16_s: float, fp8_s: float
) -> None:
    """MPT-3b on 8 H100 with FSDP and TransformerEngine's FP8.

    Source: mosaicml/llm-foundry, scripts/train/benchmarking/README.md; seconds are tokens of a
    batch over tokens per second.
    """
    steps_s = {}
    for precision in ("bf16", "fp8"):
        job = options_class("fsdp")(
            framework="fsdp",
            models=("gpt-7b",),
            num_layers=32,
            hidden_size=2560,
            num_heads=20,
            num_kv_heads=20,
            ffn_hidden_size=10240,
            vocab_size=50368,
            seq_len=seq_len,
            max_positions=seq_len,
            mbs=mbs,
            nproc=8,
            device="h100-sxm",
            precision=precision,
        )
        steps_s[precision] = predict(inputs_of(basis_of(job), workload_of(job))).step_s
    published = bf16_s / fp8_s
    assert steps_s["bf16"] / steps_s["fp8"] == pytest.approx(published, rel=0.12)
