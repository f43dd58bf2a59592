"""Every operator against a reference, on CPU; and every check against a corrupted result."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.ops import (
    FAMILIES,
    FAMILY_OF,
    Activation,
    Attention,
    Bmm,
    Cast,
    Copy,
    CrossEntropy,
    EmbeddingBag,
    Gemm,
    GroupedGemm,
    HostCopy,
    Layout,
    Mlp,
    Norm,
    Op,
    Optimizer,
    Phase,
    Rope,
    Scaling,
)
from stepmark.model.ops.backends import BACKENDS, Capabilities
from stepmark.model.ops.elementwise import GATED, UNGATED
from stepmark.operators.bench import IMPLS, elementwise, recommender
from stepmark.operators.bench.call import normal

CPU = torch.device("cpu")
NO_COMPILER = Capabilities(
    device_type="cpu",
    capability=(0, 0),
    is_rocm=False,
    has_compiler=False,
    modules=frozenset(),
)
HOPPER = Capabilities(
    device_type="cuda",
    capability=(9, 0),
    is_rocm=False,
    has_compiler=True,
    modules=frozenset(),
)
VOLTA = Capabilities(
    device_type="cuda",
    capability=(7, 0),
    is_rocm=False,
    has_compiler=True,
    modules=frozenset(),
)

FWD, BWD, STEP = Phase.FWD, Phase.BWD, Phase.STEP


def attend(**changes: Any) -> Attention:
    shape: dict[str, Any] = {
        "batch": 2,
        "seq_q": 150,
        "seq_kv": 150,
        "heads": 4,
        "kv_heads": 4,
        "head_dim_qk": 16,
        "head_dim_v": 16,
    }
    return Attention(**(shape | changes))


def small_ops(dtype: DType) -> list[Op]:
    ops: list[Op] = [
        Bmm(batch=3, m=20, n=24, k=32, layout=layout, dtype=dtype) for layout in Layout
    ]
    ops += [Gemm(m=70, n=96, k=128, layout=layout, dtype=dtype) for layout in Layout]
    if dtype is not DType.FP64:
        ops += [
            GroupedGemm(
                num_groups=6, tokens=70, n=48, k=32, skew=skew, phase=phase, dtype=dtype
            )
            for phase in (FWD, Phase.DGRAD, Phase.WGRAD)
            for skew in (0.0, 3.0)
        ]
    for phase in (FWD, BWD):
        ops += [
            attend(dtype=dtype, phase=phase),
            attend(dtype=dtype, phase=phase, causal=False, seq_kv=70),
            attend(dtype=dtype, phase=phase, kv_heads=1),
            attend(dtype=dtype, phase=phase, window=20),
            attend(dtype=dtype, phase=phase, varlen=(100, 50), batch=1),
            attend(dtype=dtype, phase=phase, head_dim_v=24),
            attend(dtype=dtype, phase=phase, sinks=True, kv_heads=2),
            attend(dtype=dtype, phase=phase, softcap=0.5, window=20),
            attend(dtype=dtype, phase=phase, softcap=2, sinks=True, kv_heads=1, causal=False),
            Rope(batch=2, seq=16, heads=4, kv_heads=2, head_dim=8, phase=phase, dtype=dtype),
        ]
        for kind in ("rmsnorm", "layernorm"):
            ops.append(Norm(tokens=40, hidden=64, kind=kind, phase=phase, dtype=dtype))
        for kind in (*GATED, *UNGATED):
            ops.append(Activation(tokens=40, width=64, kind=kind, phase=phase, dtype=dtype))
        for chunks in (1, 3):
            ops.append(
                CrossEntropy(tokens=40, vocab=300, chunks=chunks, phase=phase, dtype=dtype)
            )
        for alpha in (0.0, 1.1):
            ops.append(
                EmbeddingBag(
                    rows=900,
                    dim=16,
                    pooling=10,
                    batch=20,
                    alpha=alpha,
                    phase=phase,
                    dtype=dtype,
                )
            )
    for phase in (FWD, BWD, STEP):
        for optimizer in ("none", "sgd", "adagrad", "adam"):
            ops.append(
                Mlp(
                    layers=2,
                    input=40,
                    hidden=70,
                    output=30,
                    batch=50,
                    optimizer=optimizer,
                    phase=phase,
                    dtype=dtype,
                )
            )
    for kind in ("adamw", "adam", "sgd"):
        ops.append(Optimizer(num_params=1000, kind=kind, dtype=dtype))
    return ops


def name_of(op: Op) -> str:
    return f"{FAMILY_OF[type(op)]}-{getattr(op, 'dtype', '')}-{getattr(op, 'phase', '')}"


def calls(op: Op) -> list[Any]:
    """One call of every backend that runs here without a compiler."""
    backends = IMPLS[FAMILY_OF[type(op)]].values()
    return [impl.make(op, CPU) for impl in backends if not impl.unsupported(op, NO_COMPILER)]


def test_every_family_has_a_backend_and_no_other_is_listed() -> None:
    assert set(IMPLS) == set(FAMILIES)
    assert all(IMPLS.values())


@pytest.mark.parametrize(
    "op",
    [Copy(num_bytes=4096)]
    + [
        op
        for dtype in (DType.FP32, DType.BF16, DType.FP16, DType.FP64)
        for op in small_ops(dtype)
    ],
    ids=name_of,
)
def test_results_match_the_reference(op: Op) -> None:
    for call in calls(op):
        call.run()
        check = call.verify()
        assert check.num_wrong == 0, (call.backend_run, check)
        assert check.num_compared > 0
        assert check.max_rel_err <= check.tolerance
        assert check.reference
        assert call.verify().num_wrong == 0, "a second check of the same call"


def test_each_family_is_tested_on_cpu() -> None:
    tested = {FAMILY_OF[type(op)] for op in [*small_ops(DType.FP32), Copy(num_bytes=4096)]}
    assert tested | {"host-copy"} == set(FAMILIES)  # which needs a device with own memory


@pytest.mark.parametrize(
    ("family", "backend", "op"),
    [
        ("gemm", "torch", Gemm(m=16, n=16, k=16)),
        ("bmm", "torch", Bmm(batch=2, m=16, n=16, k=16)),
        ("grouped-gemm", "loop", GroupedGemm(num_groups=2, tokens=16, n=16, k=16)),
    ],
)
def test_a_kernel_that_writes_nothing_is_caught(
    family: str, backend: str, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = IMPLS[family][backend].make(op, CPU)
    call.run()  # the right values lie in the result before the kernel breaks
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: out)
    assert call.verify().num_wrong > 0


CORRUPTIBLE = [
    ("functional.rms_norm", Norm(tokens=8, hidden=16)),
    ("functional.layer_norm", Norm(tokens=8, hidden=16, kind="layernorm")),
    ("functional.silu", Activation(tokens=8, width=16)),
    ("functional.gelu", Activation(tokens=8, width=16, kind="gelu")),
    ("functional.cross_entropy", CrossEntropy(tokens=8, vocab=30)),
    ("functional.embedding_bag", EmbeddingBag(rows=90, dim=8, pooling=4, batch=8)),
    ("functional.scaled_dot_product_attention", attend()),
]


@pytest.mark.parametrize(("path", "op"), CORRUPTIBLE, ids=lambda value: str(value)[:30])
def test_a_wrong_result_is_caught(path: str, op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Double the result of the library in the op's own precision, not in the reference's."""
    name = path.removeprefix("functional.")
    right = getattr(torch.nn.functional, name)

    def doubled(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        return result if result.dtype is torch.float64 else result * 2

    monkeypatch.setattr(torch.nn.functional, name, doubled)
    for call in calls(op):
        assert call.verify().num_wrong > 0, call.backend_run


@pytest.mark.parametrize(
    "op",
    [
        op
        for op in small_ops(DType.FP32)
        if getattr(op, "phase", FWD) in (BWD, STEP) and not isinstance(op, EmbeddingBag)
    ],
    ids=name_of,
)
def test_a_wrong_gradient_is_caught(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(op)
    right = torch.autograd.grad

    def shifted(outputs: Any, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        grads = right(outputs, *args, **options)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if first.dtype is torch.float64:
            return grads
        return (*grads[:-1], grads[-1] * 1.01)

    monkeypatch.setattr(torch.autograd, "grad", shifted)
    if isinstance(op, Mlp) and op.phase is STEP:
        backward = torch.Tensor.backward
        monkeypatch.setattr(
            torch.Tensor, "backward", lambda self, grad: backward(self, grad * 1.01)
        )
    for call in made:
        assert call.verify().num_wrong > 0, call.backend_run


def test_an_optimizer_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("adamw", "adam", "sgd"):
        call = IMPLS["optimizer"]["torch"].make(Optimizer(num_params=100, kind=kind), CPU)
        with monkeypatch.context() as patch:
            for family in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
                patch.setattr(family, "step", lambda self: None)
            assert call.verify().num_wrong > 0


def test_fp32_is_nearer_to_the_reference_than_bf16() -> None:
    errors = {}
    for dtype in (DType.FP64, DType.FP32, DType.FP16, DType.BF16):
        call = IMPLS["gemm"]["torch"].make(Gemm(m=64, n=64, k=512, dtype=dtype), CPU)
        errors[dtype] = call.verify().max_rel_err
    assert list(errors.values()) == sorted(errors.values())
    assert errors[DType.BF16] > 100 * errors[DType.FP32]


def test_operands_differ_between_sets_and_are_no_constants() -> None:
    first, second = (normal(1000, dtype=DType.FP32, device=CPU) for _ in range(2))
    assert not torch.equal(first, second)
    assert 0.9 < float(first.std()) < 1.1
    fp8 = normal(1000, dtype=DType.FP8_E4M3, device=CPU)
    assert fp8.dtype is TORCH_DTYPE[DType.FP8_E4M3]


def test_values_of_large_operands_on_a_cpu_repeat_and_rows_do_not() -> None:
    large = normal(3000, 1024, dtype=DType.BF16, device=CPU)
    assert large.shape == (3000, 1024)
    assert 0.9 < float(large.std()) < 1.1
    assert large.flatten()[: 2**20 - 3].equal(large.flatten()[2**20 - 3 : 2 * (2**20 - 3)])
    assert len(large.unique(dim=0)) == len(large)


def test_plans_know_the_backends_by_name() -> None:
    assert {family: tuple(impls) for family, impls in IMPLS.items()} == BACKENDS


def test_what_cannot_run_has_a_reason_and_nothing_was_tried() -> None:
    gemm, attention_impls = IMPLS["gemm"]["torch"], IMPLS["attention"]
    reasons = [
        gemm.unsupported(Gemm(m=16, n=16, k=16, dtype=DType.FP8_E4M3), NO_COMPILER),
        gemm.unsupported(Gemm(m=16, n=16, k=16, dtype=DType.FP8_E4M3), VOLTA),
        gemm.unsupported(Gemm(m=16, n=16, k=16, dtype=DType.TF32), NO_COMPILER),
        gemm.unsupported(Gemm(m=16, n=16, k=16, dtype=DType.TF32), VOLTA),
        gemm.unsupported(Gemm(m=16, n=16, k=16, out_dtype=DType.FP32), NO_COMPILER),
        gemm.unsupported(Gemm(m=16, n=16, k=16, out_dtype=DType.FP16), HOPPER),
        IMPLS["copy"]["torch"].unsupported(Copy(num_bytes=5), HOPPER),
        IMPLS["norm"]["compile"].unsupported(Norm(tokens=1, hidden=1), NO_COMPILER),
        attention_impls["flash"].unsupported(attend(head_dim_v=24), HOPPER),
        attention_impls["math"].unsupported(attend(dtype=DType.FP8_E4M3), HOPPER),
        attention_impls["cudnn"].unsupported(attend(window=8), HOPPER),
        attention_impls["cudnn"].unsupported(attend(dtype=DType.FP32), HOPPER),
        attention_impls["efficient"].unsupported(attend(kv_heads=2), HOPPER),
        attention_impls["flash-attn"].unsupported(attend(), HOPPER),
        attention_impls["flex"].unsupported(attend(), NO_COMPILER),
        attention_impls["flash"].unsupported(attend(), VOLTA),
        attention_impls["flash"].unsupported(attend(softcap=50), HOPPER),
        attention_impls["cudnn"].unsupported(attend(sinks=True), HOPPER),
        attention_impls["efficient"].unsupported(attend(sinks=True), HOPPER),
        attention_impls["flash-attn"].unsupported(attend(sinks=True), HOPPER),
        attention_impls["varlen"].unsupported(attend(softcap=50), HOPPER),
        attention_impls["varlen"].unsupported(attend(head_dim_qk=20, head_dim_v=20), HOPPER),
        attention_impls["flash"].unsupported(
            attend(sinks=True, head_dim_qk=20, head_dim_v=20), HOPPER
        ),
    ]
    assert all(isinstance(reason, str) and len(reason) > 10 for reason in reasons), reasons
    assert gemm.unsupported(Gemm(m=16, n=16, k=16, dtype=DType.FP8_E4M3), HOPPER) is None
    assert gemm.unsupported(Gemm(m=16, n=16, k=16, out_dtype=DType.FP32), HOPPER) is None
    mla = attend(head_dim_qk=192, head_dim_v=128)
    assert attention_impls["cudnn"].unsupported(mla, HOPPER) is None


def test_rope_keeps_lengths_and_sees_only_distances() -> None:
    cos, sin = elementwise.tables(64, 16, CPU)
    x = torch.randn(1, 1, 1, 16).expand(1, 64, 1, 16)
    y = elementwise.rotate(x, cos, sin)[0, :, 0]
    torch.testing.assert_close(y.norm(dim=-1), x[0, :, 0].norm(dim=-1))
    torch.testing.assert_close(y[3] @ y[10], y[40] @ y[47])


def test_embedding_bags_share_a_table_and_never_repeat_indices() -> None:
    op = EmbeddingBag(rows=900, dim=16, pooling=10, batch=20)
    first, second = (recommender._Bags(op, CPU) for _ in range(2))
    assert first.table is second.table
    rings = torch.stack([*first.ring, *second.ring])
    assert len(torch.unique(rings, dim=0)) == 2 * recommender.RING
    assert not torch.equal(first.fwd(), first.fwd())
    del first, second
    assert not recommender._tables


def test_zipf_indices_follow_their_law() -> None:
    op = EmbeddingBag(rows=100, dim=1, pooling=1, batch=1, alpha=1.0)
    table = recommender._Table(op, CPU)
    rows = table.draw(100_000)
    counts = torch.bincount(rows, minlength=100).double().sort(descending=True).values
    shares = 1 / torch.arange(1, 101, dtype=torch.float64)
    torch.testing.assert_close(
        counts[:5] / 100_000, (shares / shares.sum())[:5], rtol=0.05, atol=0
    )
    assert table.row_of_rank_R.tolist() != list(range(100))


def gpu_ops() -> list[Op]:
    """What only a GPU does: fp8, tf32, wide results, MLA, and each type once more."""
    fp8 = [
        Gemm(m=300, n=256, k=512, dtype=dtype, scaling=scaling, cast=cast, layout=layout)
        for dtype in (DType.FP8_E4M3, DType.FP8_E5M2)
        for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)
        for cast in Cast
        for layout in (Layout.NT, Layout.NN, Layout.TN)
    ]
    half = [op for dtype in (DType.BF16, DType.FP32) for op in small_ops(dtype)]
    heads: dict[str, Any] = {"heads": 8, "seq_q": 512, "seq_kv": 512}
    wide = [
        attend(**heads, kv_heads=kv_heads, head_dim_qk=qk, head_dim_v=v, phase=phase, **rest)
        for kv_heads, qk, v in ((8, 128, 128), (2, 128, 128), (8, 192, 128))
        for phase in (FWD, BWD)
        for rest in (
            {},
            {"window": 100},
            {"varlen": (400, 112), "batch": 1},
            {"sinks": True},
            {"sinks": True, "window": 100},
            {"softcap": 1, "window": 100},
        )
    ]
    return [
        *half,
        *fp8,
        *wide,
        Gemm(m=256, n=256, k=512, dtype=DType.TF32),
        Bmm(batch=2, m=256, n=256, k=512, dtype=DType.TF32),
        Gemm(m=256, n=256, k=512, dtype=DType.BF16, out_dtype=DType.FP32),
        Copy(num_bytes=2**20),
        *(HostCopy(num_bytes=2**20, direction=direction) for direction in ("h2d", "d2h")),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.filterwarnings("ignore")  # of torch and its compiler, which are not ours
@pytest.mark.parametrize("op", gpu_ops(), ids=name_of)
def test_results_match_the_reference_on_a_gpu(op: Op) -> None:
    """All backends without a compiler; a compiled one is tested for one operator below."""
    gpu = torch.device("cuda")
    here = Capabilities(
        device_type="cuda",
        capability=torch.cuda.get_device_capability(),
        is_rocm=torch.version.hip is not None,
        has_compiler=False,
        modules=frozenset(),
    )
    wrong = {}
    for name, impl in IMPLS[FAMILY_OF[type(op)]].items():
        if impl.unsupported(op, here):
            continue
        call = impl.make(op, gpu)
        call.run()
        check = call.verify()
        if check.num_wrong:
            wrong[name] = check
    assert not wrong


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "backend", "op"),
    [
        ("norm", "compile", Norm(tokens=256, hidden=512, phase=BWD)),
        ("activation", "compile", Activation(tokens=256, width=512, phase=BWD)),
        ("cross-entropy", "compile", CrossEntropy(tokens=256, vocab=1000, phase=BWD)),
        ("attention", "flex", attend(head_dim_qk=64, head_dim_v=64, kv_heads=2, phase=BWD)),
        ("attention", "flex", attend(head_dim_qk=64, head_dim_v=64, varlen=(100, 50), batch=1)),
        *(
            (
                "attention",
                "flex",
                attend(head_dim_qk=64, head_dim_v=64, kv_heads=2, phase=phase, **changes),
            )
            for phase in (FWD, BWD)
            for changes in ({"sinks": True, "window": 20}, {"softcap": 1})
        ),
    ],
)
def test_compiled_results_match_on_a_gpu(family: str, backend: str, op: Op) -> None:
    call = IMPLS[family][backend].make(op, torch.device("cuda"))
    call.run()
    assert call.verify().num_wrong == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_tf32_is_coarser_than_fp32_and_fp32_is_not_tf32() -> None:
    errors = {}
    for dtype in (DType.TF32, DType.FP32):
        op = Gemm(m=256, n=256, k=4096, dtype=dtype)
        errors[dtype] = IMPLS["gemm"]["torch"].make(op, torch.device("cuda")).verify()
    assert errors[DType.FP32].max_rel_err < 1e-5 < errors[DType.TF32].max_rel_err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses torch.jit
def test_a_compiled_backward_pass_matches_and_compiles_once_for_all_sets() -> None:
    op = Norm(tokens=40, hidden=64, phase=BWD)
    for _ in range(2):
        call = IMPLS["norm"]["compile"].make(op, CPU)
        call.run()
        assert call.verify().num_wrong == 0
    assert elementwise.compiled.cache_info().hits >= 1


def test_gpt_oss_activation_is_that_of_its_paper() -> None:
    """Values beyond the limit as well (arXiv:2508.10925; modeling_gpt_oss.py)."""
    x = torch.linspace(-20, 20, 64, dtype=torch.float64).reshape(4, 16)
    gate, up = x[:, :8], x.flip(0)[:, :8]
    made = elementwise.clamped_swiglu(torch.cat((gate, up), dim=1))
    for row, column in itertools.product(range(4), range(8)):
        g = min(float(gate[row, column]), 7.0)
        u = max(-7.0, min(float(up[row, column]), 7.0))
        expected = (u + 1) * g / (1 + math.exp(-1.702 * g))
        assert float(made[row, column]) == pytest.approx(expected, rel=1e-12)
