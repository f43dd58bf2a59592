"""Laws of operators: how their FLOPs and bytes scale, and what they refuse."""

import dataclasses
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import (
    FAMILIES,
    FAMILY_OF,
    Activation,
    Attention,
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
from stepmark.model.ops.matmul import scaled_bytes

from .ops_samples import OPTIONS, PLAIN

GEMM = Gemm(m=64, n=48, k=32)
ATTENTION = Attention(
    batch=2, seq_q=64, seq_kv=64, heads=4, kv_heads=2, head_dim_qk=16, head_dim_v=16
)
COUNTS = [
    (family, field)
    for family, kind in FAMILIES.items()
    for field in dataclasses.fields(kind)
    if "low" in field.metadata
]
NOT_NUMBERS = ("", "4", "four", None, [], {}, b"1", True, False, 1 + 0j)


def test_every_family_has_one_name_and_a_sample() -> None:
    assert PLAIN.keys() == FAMILIES.keys()
    assert {FAMILY_OF[type(op)] for op in PLAIN.values()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_says_what_it_is(family: str) -> None:
    for field in dataclasses.fields(FAMILIES[family]):
        assert field.metadata.get("help"), field.name
    assert FAMILIES[family].__doc__


# FLOPs

LINEAR = {
    "gemm": ("m", "n", "k"),
    "bmm": ("batch", "m", "n", "k"),
    "grouped-gemm": ("tokens", "n", "k"),
    "attention": ("batch", "heads"),
    "mlp": ("batch",),
}


@pytest.mark.parametrize("factor", [2, 3, 7])
@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f, names in LINEAR.items() for n in names]
)
def test_flops_are_linear_in_each_dimension(family: str, name: str, factor: int) -> None:
    op = PLAIN[family]
    larger = replace(op, **{name: getattr(op, name) * factor})
    assert larger.flops == factor * op.flops > 0


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(LINEAR)))
def test_what_memory_bounds_has_no_matmul_flops(family: str) -> None:
    assert PLAIN[family].flops == 0
    assert PLAIN[family].bytes_moved > 0


def test_gemm_passes_have_the_same_flops_and_bytes() -> None:
    m, n, k = 64, 48, 32
    forward = Gemm(m=m, n=n, k=k)
    for other in (
        Gemm(m=m, n=k, k=n, layout=Layout.NN),
        Gemm(m=n, n=k, k=m, layout=Layout.TN),
    ):
        assert other.flops == forward.flops == 2 * m * n * k
        assert other.bytes_moved == forward.bytes_moved == 2 * (m * n + n * k + m * k)


@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_bytes_of_a_gemm_grow_less_than_its_flops(name: str) -> None:
    larger = replace(GEMM, **{name: 2 * getattr(GEMM, name)})
    assert GEMM.bytes_moved < larger.bytes_moved < 2 * GEMM.bytes_moved


NARROW = (DType.FP8_E4M3, DType.FP8_E5M2, DType.MXFP8, DType.NVFP4)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_cast_alone_multiplies_nothing_and_casts_add_up(dtype: DType) -> None:
    made = {
        cast: Gemm(m=32, n=32, k=64, dtype=dtype, cast=cast)
        for cast in (Cast.NONE, Cast.ONLY, Cast.INCLUDED)
    }
    assert made[Cast.ONLY].flops == 0
    assert made[Cast.INCLUDED].flops == made[Cast.NONE].flops
    parts = made[Cast.NONE].bytes_moved + made[Cast.ONLY].bytes_moved
    assert made[Cast.INCLUDED].bytes_moved == parts
    assert made[Cast.INCLUDED].memory_bytes > made[Cast.NONE].memory_bytes


@pytest.mark.parametrize("phase", [Phase.FWD, Phase.DGRAD, Phase.WGRAD])
def test_grouped_gemm_flops_do_not_depend_on_pass_skew_or_groups(phase: Phase) -> None:
    for groups in (1, 4, 100):
        for skew in (0.0, 1.5):
            op = GroupedGemm(num_groups=groups, tokens=100, n=24, k=16, skew=skew, phase=phase)
            assert op.flops == Gemm(m=100, n=24, k=16).flops


@given(
    groups=st.integers(1, 600) | st.integers(1, 2**16),
    tokens=st.integers(1, 2**40),
    skew=st.floats(0, 4, allow_nan=False),
)
def test_group_sizes_sum_to_the_tokens(groups: int, tokens: int, skew: float) -> None:
    op = GroupedGemm(num_groups=groups, tokens=tokens, n=1, k=1, skew=skew)
    sizes = op.group_sizes()
    assert len(sizes) == groups
    assert sum(sizes) == tokens
    assert min(sizes) >= 0
    # Falling, but for the rounding of the two ends of each.
    assert all(a >= b - 1 for a, b in pairwise(sizes))


@given(groups=st.integers(1, 600), tokens=st.integers(1, 10**9))
def test_without_skew_experts_get_the_same(groups: int, tokens: int) -> None:
    sizes = GroupedGemm(num_groups=groups, tokens=tokens, n=1, k=1).group_sizes()
    assert max(sizes) - min(sizes) <= 1


def test_attention_backward_is_twice_forward_and_executed_five_halves() -> None:
    forward = ATTENTION.flops
    assert ATTENTION.executed_flops == forward
    assert replace(ATTENTION, phase=Phase.BWD).flops == 2 * forward
    assert 2 * replace(ATTENTION, phase=Phase.BWD).executed_flops == 5 * forward
    uneven = replace(ATTENTION, head_dim_qk=24)
    backward = replace(uneven, phase=Phase.BWD)
    assert backward.flops == 2 * uneven.flops
    assert backward.executed_flops * (24 + 16) == uneven.flops * (3 * 24 + 2 * 16)


def test_causal_is_half() -> None:
    assert 2 * ATTENTION.flops == replace(ATTENTION, causal=False).flops
    assert replace(ATTENTION, causal=False).flops == 2 * 2 * 64 * 64 * 4 * (16 + 16)


def test_attention_flops_are_quadratic_in_the_length() -> None:
    longer = replace(ATTENTION, seq_q=128, seq_kv=128)
    assert longer.flops == 4 * ATTENTION.flops
    assert longer.bytes_moved == 2 * ATTENTION.bytes_moved


@pytest.mark.parametrize("window", [64, 65, 10_000])
def test_a_window_over_the_whole_sequence_is_none(window: int) -> None:
    assert replace(ATTENTION, window=window).flops == ATTENTION.flops


@given(length=st.integers(1, 200))
def test_windows_grow_up_to_the_causal_half(length: int) -> None:
    one = replace(ATTENTION, batch=1, seq_q=length, seq_kv=length)
    pairs = [replace(one, window=w).pairs for w in range(1, length + 2)]
    assert all(a <= b for a, b in pairwise(pairs))
    assert pairs[-1] == pairs[-2] if length > 1 else True
    assert pairs[-1] == length**2 // 2
    # Counted one by one, less half of the diagonal, as the causal half is.
    for window, counted in enumerate(pairs, 1):
        exact = sum(min(row + 1, window) for row in range(length))
        assert abs(counted - (exact - min(window, length) / 2)) <= 0.5


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.booleans())
def test_packed_sequences_add_up(lengths: list[int], causal: bool) -> None:
    total = sum(lengths)
    packed = replace(
        ATTENTION, batch=1, seq_q=total, seq_kv=total, varlen=tuple(lengths), causal=causal
    )
    alone = [replace(ATTENTION, batch=1, seq_q=n, seq_kv=n, causal=causal) for n in lengths]
    assert packed.flops == sum(op.flops for op in alone)
    assert packed.bytes_moved == sum(op.bytes_moved for op in alone)
    assert packed.flops <= replace(packed, varlen=()).flops


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    window=st.integers(0, 45),
    causal=st.booleans(),
)
def test_pairs_are_those_that_a_mask_leaves(
    lengths: list[int], window: int, causal: bool
) -> None:
    """Counted one by one, without half of the diagonal that the causal half leaves out."""
    window *= causal
    total = sum(lengths)
    op = replace(
        ATTENTION,
        batch=1,
        seq_q=total,
        seq_kv=total,
        varlen=tuple(lengths),
        causal=causal,
        window=window,
    )
    sequence = [number for number, length in enumerate(lengths) for _ in range(length)]
    counted = 0
    for query in range(total):
        for key in range(total):
            is_seen = sequence[query] == sequence[key]
            is_seen &= not causal or key <= query
            is_seen &= not window or query - window < key
            counted += is_seen
    if causal:
        for length in lengths:
            width = min(window or length, length)
            # Half a pair of an odd number is rounded so that a window counts more.
            counted -= (width + (width == length)) // 2
    assert op.pairs == counted
    assert op.flops == 4 * op.pairs * 4 * 16


def test_sinks_and_softcap_are_no_products_and_no_traffic() -> None:
    for phase in (Phase.FWD, Phase.BWD):
        plain = replace(ATTENTION, phase=phase)
        op = replace(plain, sinks=True, softcap=30)
        for name in ("flops", "executed_flops", "bytes_moved", "memory_bytes"):
            assert getattr(op, name) == getattr(plain, name)
        assert op.shape_text == f"{plain.shape_text} sinks softcap 30"
    assert replace(ATTENTION, softcap=0.5).shape_text.endswith("causal softcap 0.5")


def test_gqa_changes_bytes_and_not_flops() -> None:
    found = [replace(ATTENTION, kv_heads=heads) for heads in (1, 2, 4)]
    assert len({op.flops for op in found}) == 1
    bytes_moved = [op.bytes_moved for op in found]
    assert bytes_moved == sorted(set(bytes_moved))


@given(
    layers=st.integers(1, 30),
    widths=st.tuples(*[st.integers(1, 5000)] * 3),
    batch=st.integers(1, 5000),
)
def test_mlp_backward_lacks_the_first_dgrad(
    layers: int, widths: tuple[int, int, int], batch: int
) -> None:
    first, hidden, last = widths
    forward = Mlp(layers=layers, input=first, hidden=hidden, output=last, batch=batch)
    backward = replace(forward, phase=Phase.BWD)
    assert 2 * forward.flops - backward.flops == 2 * batch * first * hidden
    step = replace(forward, phase=Phase.STEP)
    assert step.flops == forward.flops + backward.flops
    assert forward.num_weights == first * hidden + (layers - 1) * hidden**2 + hidden * last


# Bytes

HELD: dict[str, Any] = {
    "gemm": lambda op: (op.m * op.k + op.k * op.n) * op.dtype.itemsize,
    "grouped-gemm": lambda op: (op.tokens * op.k + op.num_groups * op.n * op.k) * 2,
    "bmm": lambda op: op.batch * (op.m * op.k + op.k * op.n) * op.dtype.itemsize,
    "attention": lambda op: (
        (
            op.batch * op.seq_q * op.heads * (op.head_dim_qk + op.head_dim_v)
            + op.batch * op.seq_kv * op.kv_heads * (op.head_dim_qk + op.head_dim_v)
        )
        * op.dtype.itemsize
    ),
    "mlp": lambda op: (op.num_weights + op.batch * sum(op.widths)) * op.dtype.itemsize,
    "embedding-bag": lambda op: (
        op.rows * op.dim * op.dtype.itemsize + op.batch * op.pooling * 8
    ),
    "norm": lambda op: 2 * op.tokens * op.hidden * op.dtype.itemsize,
    "activation": lambda op: 2 * op.tokens * op.width * op.dtype.itemsize,
    "rope": lambda op: 2 * op.batch * op.seq * (op.heads + op.kv_heads) * op.head_dim,
    "cross-entropy": lambda op: op.tokens * op.vocab * op.dtype.itemsize,
    "optimizer": lambda op: 2 * op.num_params * op.dtype.itemsize,
    "copy": lambda op: 2 * op.num_bytes,
    "host-copy": lambda op: op.num_bytes,
}


@pytest.mark.parametrize("op", OPTIONS, ids=repr)
def test_memory_holds_the_operands(op: Op) -> None:
    assert op.memory_bytes >= HELD[FAMILY_OF[type(op)]](op) > 0


@pytest.mark.parametrize(
    "op", [op for op in OPTIONS if not isinstance(op, Copy | HostCopy)], ids=repr
)
def test_wider_elements_move_more(op: Op) -> None:
    if op.dtype in (DType.BF16, DType.FP16):
        wider = replace(op, dtype=DType.FP32, **_no_result_type(op))
        assert op.bytes_moved < wider.bytes_moved <= 2 * op.bytes_moved
        assert wider.flops == op.flops


def _no_result_type(op: Op) -> dict[str, Any]:
    return {"out_dtype": None} if isinstance(op, Gemm) and op.out_dtype else {}


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Norm(tokens=10, hidden=4), 2 * (2 * 40 + 4)),
        (Norm(tokens=10, hidden=4, kind="layernorm"), 2 * (2 * 40 + 8)),
        (Activation(tokens=10, width=4), 3 * 40 * 2),
        (Activation(tokens=10, width=4, phase=Phase.BWD), 5 * 40 * 2),
        (Activation(tokens=10, width=4, kind="gelu"), 2 * 40 * 2),
        (Activation(tokens=10, width=4, kind="xielu"), 2 * 40 * 2),
        (Activation(tokens=10, width=4, kind="clamped_swiglu"), 3 * 40 * 2),
        (CrossEntropy(tokens=10, vocab=4), 40 * 2),
        (Optimizer(num_params=100), 28 * 100),
        (Optimizer(num_params=100, kind="sgd"), 12 * 100),
        (Copy(num_bytes=100), 200),
        (HostCopy(num_bytes=100, direction="d2h"), 100),
        (
            EmbeddingBag(rows=9, dim=8, pooling=3, batch=5),
            5 * 3 * 8 * 4 + 5 * (3 + 1) * 8 + 5 * 8 * 4,
        ),
        (
            Rope(batch=1, seq=4, heads=2, kv_heads=1, head_dim=2),
            2 * 4 * 3 * 2 * 2 + 2 * 4 * 2 * 4,
        ),
    ],
    ids=repr,
)
def test_compulsory_traffic_by_hand(op: Op, expected: int) -> None:
    assert op.bytes_moved == expected


def test_slices_of_the_loss_hold_less() -> None:
    full = CrossEntropy(tokens=64, vocab=100)
    assert replace(full, chunks=8).memory_bytes < full.memory_bytes
    assert replace(full, chunks=8).bytes_moved == full.bytes_moved


# What is refused


def refused(op: Op, name: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        replace(op, **{name: value})
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 400
    return text


@pytest.mark.parametrize(("family", "field"), COUNTS, ids=lambda x: getattr(x, "name", x))
def test_counts_out_of_range(family: str, field: Any) -> None:
    op = PLAIN[family]
    low, high = field.metadata["low"], field.metadata["high"]
    values = [low - 1, -1, -(2**70), high + 1, 10**30, 10**400, math.nan, math.inf, -math.inf]
    for value in values:
        wrong = (value,) if field.name == "varlen" else value
        assert field.name.replace("_", "-") in refused(op, field.name, wrong)


@pytest.mark.parametrize(("family", "field"), COUNTS, ids=lambda x: getattr(x, "name", x))
def test_counts_that_are_no_numbers(family: str, field: Any) -> None:
    for value in NOT_NUMBERS:
        if field.name == "varlen" and value == []:
            continue
        assert field.name.replace("_", "-") in refused(PLAIN[family], field.name, value)


@pytest.mark.parametrize(
    ("family", "field"),
    [(f, field) for f, field in COUNTS if field.type is int],
    ids=lambda x: getattr(x, "name", x),
)
def test_whole_numbers_are_whole(family: str, field: Any) -> None:
    op = PLAIN[family]
    for value in (1.5, float(getattr(op, field.name))):
        assert "whole" in refused(op, field.name, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_that_are_none(family: str) -> None:
    op = PLAIN[family]
    for field in dataclasses.fields(op):
        if "allowed" in field.metadata:
            for value in ("nonsense", "", 3, 1.5, (), b"fwd", "FWD"):
                refused(op, field.name, value)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemm", "grouped-gemm"}))
def test_narrow_types_only_where_they_are_multiplied(family: str) -> None:
    op = PLAIN[family]
    if family in ("copy", "host-copy"):
        return
    for dtype in NARROW:
        if family != "attention" or dtype.is_block_format:
            assert "dtype" in refused(op, "dtype", dtype)


@pytest.mark.parametrize(
    "family",
    [
        "norm",
        "activation",
        "rope",
        "cross-entropy",
        "optimizer",
        "grouped-gemm",
        "embedding-bag",
    ],
)
def test_tf32_only_on_matrix_units(family: str) -> None:
    assert "dtype" in refused(PLAIN[family], "dtype", DType.TF32)


def test_plain_values_become_their_types() -> None:
    """skew=1 and skew=1.0 are one operator; "bwd" matches Phase.BWD by identity."""
    text = GroupedGemm(num_groups=2, tokens=4, n=1, k=1, skew=1, phase="dgrad", dtype="bf16")
    assert repr(text) == repr(
        GroupedGemm(num_groups=2, tokens=4, n=1, k=1, skew=1.0, phase=Phase.DGRAD)
    )
    assert text.phase is Phase.DGRAD
    assert Gemm(m=1, n=1, k=1, layout="nn", out_dtype="fp32").layout is Layout.NN
    packed = replace(ATTENTION, batch=1, seq_q=6, seq_kv=6, varlen=[4, 2])
    assert packed.varlen == (4, 2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"heads": 5}, "heads"),
        ({"heads": 1, "kv_heads": 2}, "heads"),
        ({"seq_kv": 32}, "seq-kv"),
        ({"window": 4, "causal": False}, "window"),
        ({"varlen": (64,)}, "varlen"),
        ({"varlen": (60,), "batch": 1}, "varlen"),
        ({"varlen": (64,), "batch": 1, "seq_kv": 65, "causal": False}, "seq-kv"),
        ({"varlen": (64, 0), "batch": 1}, "varlen"),
        ({"varlen": (64, True), "batch": 1, "seq_q": 65, "seq_kv": 65}, "varlen"),
        ({"phase": Phase.DGRAD}, "phase"),
        ({"causal": 1}, "causal"),
        ({"sinks": 1}, "sinks"),
        ({"softcap": True}, "softcap"),
        ({"softcap": -30.0}, "softcap"),
    ],
)
def test_attention_that_cannot_be(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(ATTENTION, **changes)


@pytest.mark.parametrize("dims", [(16, 16, 8), (16, 8, 16), (16, 17, 16), (1, 16, 1)])
@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.FP8_E5M2])
def test_fp8_products_are_sixteen_wide(dims: tuple[int, int, int], dtype: DType) -> None:
    m, n, k = dims
    with pytest.raises(ConfigError, match="a multiple of 16"):
        Gemm(m=m, n=n, k=k, dtype=dtype)
    assert Gemm(m=m, n=16, k=32, dtype=dtype).scaling is Scaling.TENSORWISE


@pytest.mark.parametrize(
    ("dtype", "multiple"), [(DType.FP8_E4M3, 16), (DType.MXFP8, 32), (DType.NVFP4, 16)]
)
@pytest.mark.parametrize("name", ["n", "k"])
def test_rows_of_narrow_products_are_whole(dtype: DType, multiple: int, name: str) -> None:
    for op in (
        Gemm(m=3, n=64, k=96, dtype=dtype),
        GroupedGemm(num_groups=2, tokens=3, n=64, k=96, dtype=dtype),
    ):
        assert replace(op, **{name: multiple})
        assert f"a multiple of {multiple}" in refused(op, name, multiple + multiple // 2)


@pytest.mark.parametrize("changes", [{"scaling": Scaling.ROWWISE}, {"cast": Cast.ONLY}])
def test_scales_and_casts_are_for_fp8(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="only with fp8 dtypes"):
        replace(GEMM, **changes)


@pytest.mark.parametrize("dtype", [DType.MXFP8, DType.NVFP4])
def test_block_formats_have_their_own_scales(dtype: DType) -> None:
    op = Gemm(m=32, n=32, k=32, dtype=dtype, cast=Cast.INCLUDED)
    assert "only with fp8 dtypes" in refused(op, "scaling", Scaling.TENSORWISE)


# OCP Microscaling Formats 1.0, section 5.2: 8 bits an element and 8 per block of 32; NVFP4
# (TransformerEngine, NVFP4BlockScaling): 4 bits, 8 per 16 and an fp32 number per tensor.
BITS = {DType.FP8_E4M3: (8, 0), DType.MXFP8: (8.25, 0), DType.NVFP4: (4.5, 4)}


@pytest.mark.parametrize("dtype", BITS)
def test_operands_of_narrow_products_have_the_bits_of_their_format(dtype: DType) -> None:
    m, n, k = 64, 128, 256
    bits, per_tensor = BITS[dtype]
    a, b, y = (int(size * bits / 8) + per_tensor for size in (m * k, n * k, m * n))
    assert Gemm(m=m, n=n, k=k, dtype=dtype).bytes_moved == a + b + 2 * m * n
    grouped = GroupedGemm(num_groups=1, tokens=m, n=n, k=k, dtype=dtype)
    results = {
        Phase.FWD: (a + b, m * n),
        Phase.DGRAD: (y + b, m * k),
        Phase.WGRAD: (y + a, n * k),
    }
    for phase, (operands, result) in results.items():
        assert replace(grouped, phase=phase).bytes_moved == operands + 2 * result
    assert grouped.memory_bytes == grouped.bytes_moved


def test_blockwise_scales_are_per_row_of_128_and_per_square() -> None:
    plain = Gemm(m=256, n=384, k=512, dtype=DType.FP8_E4M3)
    blocks = replace(plain, scaling=Scaling.BLOCKWISE)
    assert blocks.bytes_moved - plain.bytes_moved == 4 * (256 * 4 + 3 * 4)


def test_odd_rope_and_more_slices_than_tokens() -> None:
    refused(PLAIN["rope"], "head_dim", 7)
    refused(PLAIN["cross-entropy"], "chunks", 17)


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(refused(GEMM, "layout", "x" * 10_000)) < 200


@pytest.mark.parametrize(
    ("dtype", "scaling", "num_bytes"),
    [
        (DType.BF16, Scaling.NONE, 2 * 64 * 7168),
        (DType.FP8_E4M3, Scaling.TENSORWISE, 64 * 7168),
        (DType.FP8_E4M3, Scaling.ROWWISE, 64 * (7168 + 4)),
        (DType.FP8_E4M3, Scaling.BLOCKWISE, 64 * (7168 + 4 * 56)),
        (DType.MXFP8, Scaling.NONE, 64 * (7168 + 224)),
        (DType.NVFP4, Scaling.NONE, 64 * (3584 + 448)),
    ],
)
def test_bytes_of_rows_with_their_factors(
    dtype: DType, scaling: Scaling, num_bytes: int
) -> None:
    """Rows of DeepSeek-V3's width: 7168 bytes and 56 fp32 factors in DeepEP's FP8 dispatch."""
    assert scaled_bytes(dtype, scaling, 64, 7168) == num_bytes


def test_fp8_attention_reads_bytes_and_writes_bf16() -> None:
    """Forward q, k, v in and o out; backward o and do in, too, and three gradients out."""
    q = kv = 2 * 64 * 4 * 16
    kv //= 2  # two of four heads
    wide, low = ATTENTION, replace(ATTENTION, dtype=DType.FP8_E4M3)
    assert wide.flops == low.flops
    assert low.bytes_moved == q + 2 * kv + 2 * q
    backward = replace(low, phase=Phase.BWD, dtype=DType.FP8_E5M2)
    assert backward.bytes_moved == (q + 2 * kv) + 2 * q + 2 * (q + 2 * kv)
