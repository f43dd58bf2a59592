"""Narrow products by data sheets: never slower than bf16, refused where units lack them."""

from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.device import load_devices
from stepmark.model.ops import Attention, Gemm, GroupedGemm, Phase
from stepmark.predictions.costs import SheetCosts
from stepmark.predictions.framework_job import basis_of, options_class, workload_of
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.step.layout import is_cast
from stepmark.step.workload import ComputeOp, Workload
from stepmark.timeline.ledger import Work, work_of_op
from stepmark.timeline.step_cost import Source

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


def attending(device: str, **options: Any) -> Inputs:
    """Return the inputs of a step with FP8 attention."""
    defaults: dict[str, Any] = {"models": ("llama-3.1-8b",), "fp8_dot_product_attention": True}
    job = options_class("megatron")(
        framework="megatron",
        nproc=8,
        precision="fp8",
        num_layers=2,
        device=device,
        **defaults | options,
    )
    return inputs_of(basis_of(job), workload_of(job))


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        ("a100", {}, "a device with a peak of"),
        ("mi355x", {}, "compute capability 9 or 10"),
        ("h100-sxm", {"fp8_recipe": "tensorwise"}, "compute capability 10 .* tensorwise"),
        ("h100-sxm", {"num_heads": 64, "num_kv_heads": 64}, "heads or sequences that are not"),
        ("h100-sxm", {"seq_len": 4160}, "heads or sequences that are not 128"),
    ],
)
def test_fp8_attention_is_refused_where_cudnn_lacks_it(
    device: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        attending(device, **options)
    assert attending("b200", **options)
    assert attending("h200-sxm")


# TFLOP/s of cuDNN's forward pass in FP8 on H100, 16,384 tokens of a hidden size of 2048, with a
# causal mask and without: FlashAttention-3, arXiv:2407.08608, figures of FP8.
CUDNN = {
    (128, False): {2048: 886, 4096: 864, 8192: 971, 16384: 1005},
    (256, False): {2048: 1001, 4096: 1087, 8192: 1122, 16384: 1139},
    (256, True): {2048: 768, 4096: 1015, 8192: 1056, 16384: 1099},
}


@pytest.mark.parametrize(("width", "causal"), CUDNN)
def test_fp8_attention_takes_the_time_of_kernels_of_inference(width: int, causal: bool) -> None:
    """Those are slower than a paper's benchmark of cuDNN, and faster than bf16's."""
    for seq, tflops in CUDNN[width, causal].items():
        ops = [
            Attention(
                batch=16384 // seq,
                seq_q=seq,
                seq_kv=seq,
                heads=2048 // width,
                kv_heads=2048 // width,
                head_dim_qk=width,
                head_dim_v=width,
                causal=causal,
                dtype=dtype,
            )
            for dtype in (DType.BF16, DType.FP8_E4M3)
        ]
        cost = SheetCosts(load_devices()["h100-sxm"])
        times_s: list[float] = []
        for op in ops:
            known = cost(ComputeOp(op=op, phase=Phase.FWD, module="attention.core"))
            assert known is not None
            assert (known.source is Source.RULE) == op.dtype.is_narrow
            times_s += known.time_s.values()
        assert 0.65 < ops[1].flops / times_s[1] / (tflops * 1e12) < 0.85
        assert times_s[1] < times_s[0]


def test_fp8_attention_gains_a_few_percent_of_a_step() -> None:
    """cuDNN's in FP8 made LoRA of Llama 2 70B on 8 H200 1.15 / 1.11 as fast as in bf16.

    Source: NVIDIA, Accelerating Transformers with cuDNN 9, table 1. Of training all weights
    attention is a smaller part.
    """
    steps_s = []
    for is_narrow in (False, True):
        job: dict[str, Any] = {
            "models": ("llama-2-70b",),
            "tp": 4,
            "seq_len": 8192,
            "sequence_parallel": True,
        }
        known = attending("h200-sxm", **job, fp8_dot_product_attention=is_narrow)
        steps_s.append(predict(known).step_s)
    assert 1.005 < steps_s[0] / steps_s[1] < 1.15 / 1.11
