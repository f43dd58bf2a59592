"""Laws of a layer's operators: they add up to the parameters and divide over ranks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.parsing import parse

from stepmark.ground.dtypes import OPERATOR_DTYPES, DType
from stepmark.ground.errors import ConfigError
from stepmark.measuring.machine import machine
from stepmark.model import layers
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model, load_models
from stepmark.model.ops import (
    Attention,
    Copy,
    CrossEntropy,
    Gemm,
    GroupedGemm,
    Layout,
    Norm,
    Optimizer,
    Phase,
)
from stepmark.model.parallel import ParallelConfig
from stepmark.model.product_precision import of_operators
from stepmark.operators import op_plan
from stepmark.operators.op_options import options_class
from stepmark.step.layout import Inputs, layout_of, model_as
from stepmark.step.workload import ComputeOp, Kernel
from stepmark.workloads import workload_flags
from stepmark.workloads.formats.benchmark_models import read_model_configs
from stepmark.workloads.operators import BY_FAMILY, ModelShape, Placed
from stepmark.workloads.workload import generate

PRIMUS = read_model_configs(Path(__file__).parents[2] / "examples" / "model_configs.json")
ALL = list(load_models())
# Models of attention and FFN in every layer: laws of others are those of the tree.
ALIKE = [
    name
    for name, model in load_models().items()
    if all(layer.mixer == "attention" and layer.ffn for layer in model.layers)
    and not (model.mla and model.mla.indexer)
]
DENSE = [name for name in ALIKE if find_model(name).moe is None]
MOE = [name for name in ALIKE if find_model(name).moe is not None]
ALONE = ParallelConfig()
BACKWARD = (Phase.DGRAD, Phase.WGRAD)


def shape(
    model: ModelConfig | str,
    parallel: ParallelConfig = ALONE,
    as_: str = "megatron",
    **more: Any,
) -> ModelShape:
    found = find_model(model) if isinstance(model, str) else model
    dtype = more.pop("dtype", DType.BF16)
    products = of_operators(dtype)
    more["dtype"] = DType.BF16 if products else dtype
    inputs = Inputs(**({"mbs": 1, "seq_len": 256, "products": products} | more))
    return ModelShape(model=found, layout=layout_of(as_, parallel), inputs=inputs)


def tokens(where: ModelShape) -> int:
    return where.inputs.mbs * where.inputs.seq_len


def flops(placed: Iterator[Placed], *phases: Phase) -> int:
    return sum(label.count * op.flops for label, op in placed if label.phase in phases)


def matmuls(where: ModelShape) -> Iterator[Placed]:
    """All but the head."""
    for label, op in (*BY_FAMILY["gemm"](where), *BY_FAMILY["grouped-gemm"](where)):
        if label.role != "head":
            yield label, op


def forward_dims(placed: Iterator[Placed]) -> dict[str, tuple[int, int, int]]:
    return {
        label.role: (op.m, op.n, op.k)
        for label, op in placed
        if label.phase is Phase.FWD and isinstance(op, Gemm)
    }


# Conservation


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("mbs", [1, 3])
def test_dense_forward_is_two_flops_per_weight_and_token(name: str, mbs: int) -> None:
    where = shape(name, mbs=mbs)
    model = where.model
    assert tokens(where) == 256 * mbs
    assert flops(matmuls(where), Phase.FWD) == 2 * tokens(where) * model.layer_matmul_params()
    with_head = model.layer_matmul_params() + model.head_params
    assert flops(BY_FAMILY["gemm"](where), Phase.FWD) == 2 * tokens(where) * with_head


@pytest.mark.parametrize("name", MOE)
def test_moe_forward_is_two_flops_per_active_weight_and_token(name: str) -> None:
    where = shape(name)
    model = where.model
    weights = model.layer_matmul_params(layers.EXPERTS, active=True)
    named = [one for one in model.linears() if one.name.startswith("attention.")]
    attention = sum(one.num_weights for one in named)
    if model.num_dense_layers:  # both kinds of layer are listed; attention once
        weights += model.layer_matmul_params() - attention
    assert flops(matmuls(where), Phase.FWD) == 2 * tokens(where) * weights


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_backward_is_twice_forward(name: str) -> None:
    where = shape(name)
    forward = flops(matmuls(where), Phase.FWD)
    assert flops(matmuls(where), *BACKWARD) == 2 * forward
    for phase in BACKWARD:
        assert flops(matmuls(where), phase) == forward


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_flops_are_linear_in_the_tokens(name: str) -> None:
    one, four = shape(name), shape(name, mbs=2, seq_len=512)
    assert flops(BY_FAMILY["gemm"](four), Phase.FWD) == 4 * flops(
        BY_FAMILY["gemm"](one), Phase.FWD
    )


@pytest.mark.parametrize("name", ALL)
def test_optimizer_parameters_sum_to_the_model(name: str) -> None:
    """One layer of each kind; kinds that differ by a window alone are one."""
    model = find_model(name)
    listed = Counter[str]()
    sizes = set[int]()
    for label, op in BY_FAMILY["optimizer"](shape(name)):
        assert isinstance(op, Optimizer)
        listed[label.role] += op.num_params
        if label.role != "optimizer_ends":
            sizes.add(op.num_params)
    layers = {model.layer_params(layer): layer for layer in model.layer_counts}
    assert sizes == set(layers)
    rest = model.num_params - sum(map(model.layer_params, model.layers))
    assert listed["optimizer_ends"] + model.norm_params == rest


@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3"])
def test_sharded_optimizers_hold_their_share(name: str) -> None:
    def params(parallel: ParallelConfig) -> int:
        return sum(
            op.num_params
            for _, op in BY_FAMILY["optimizer"](shape(name, parallel))
            if isinstance(op, Optimizer)
        )

    whole = params(ALONE)
    assert params(ParallelConfig(dp_shard=8)) == pytest.approx(whole / 8, abs=3)
    assert params(ParallelConfig(dp_shard=64)) == pytest.approx(whole / 64, abs=3)


# Sharding

ROW_AND_COLUMN = {"qkv", "out", "gate_up", "up", "down", "head", "q_up", "q", "kv_up"}
REPLICATED = {"q_down", "kv_down", "router"}


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama-3.1-70b", "mixtral-8x7b", "deepseek-v3", "llama-2-7b"])
def test_tensor_parallel_shards_sum_to_the_whole(name: str, tp: int) -> None:
    ParallelConfig(tp=tp).check(find_model(name))
    whole = {(lb.role, lb.phase): op.flops for lb, op in BY_FAMILY["gemm"](shape(name))}
    sharded = shape(name, ParallelConfig(tp=tp))
    for label, op in BY_FAMILY["gemm"](sharded):
        assert tp * op.flops == whole[label.role, label.phase], label.role
        assert label.role.removeprefix("shared_") in ROW_AND_COLUMN | REPLICATED
    for label, op in BY_FAMILY["attention"](sharded):
        expected = {lb.phase: one.flops for lb, one in BY_FAMILY["attention"](shape(name))}
        assert tp * op.flops == expected[label.phase]


def test_sequence_parallel_norms_divide_the_tokens() -> None:
    norms = [
        op for label, op in BY_FAMILY["norm"](shape("llama-3.1-70b", ParallelConfig(tp=8)))
    ]
    assert {op.tokens for op in norms if isinstance(op, Norm)} == {256 // 8}


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_experts_divide_over_ep_and_their_rows_do_not(ep: int) -> None:
    where = shape("mixtral-8x7b", ParallelConfig(ep=ep))
    for _, op in BY_FAMILY["grouped-gemm"](where):
        assert isinstance(op, GroupedGemm)
        assert op.num_groups * ep == 8
        assert op.tokens == 256 * 2  # balanced: as many rows come as go


@pytest.mark.parametrize(("etp", "rows", "width"), [(0, 1, 8), (8, 1, 8), (2, 4, 2), (1, 8, 1)])
def test_experts_divide_over_their_tensor_parallelism(etp: int, rows: int, width: int) -> None:
    """Eight ranks of tp do one rank's work together, whatever etp divides."""
    model, axes = find_model("mixtral-8x22b"), ParallelConfig(tp=8, ep=8, dp_shard=8)
    inputs = Inputs(mbs=1, seq_len=256)
    for name in ("train", "megatron"):
        layout = layout_of(name, axes, etp=etp or None)
        placed = list(
            BY_FAMILY["grouped-gemm"](ModelShape(model=model, layout=layout, inputs=inputs))
        )
        assert len(placed) == (9 if name == "train" else 6)
        for label, op in placed:
            assert isinstance(op, GroupedGemm)
            assert (op.num_groups, op.tokens) == (1, 512 // rows)
            up = (2 if name == "megatron" else 1) * 16384 // width
            assert (op.n, op.k) == (
                (6144, 16384 // width) if "down" in label.role else (up, 6144)
            )


def test_train_multiplies_gate_and_up_apart() -> None:
    ours = forward_dims(BY_FAMILY["gemm"](shape("llama-3.1-8b", as_="train")))
    theirs = forward_dims(BY_FAMILY["gemm"](shape("llama-3.1-8b")))
    assert ours["gate"] == ours["up"] == (256, 14336, 4096)
    assert theirs.pop("gate_up") == (256, 28672, 4096)
    assert {role: ours[role] for role in theirs} == theirs
    losses = {
        name: [
            op.vocab
            for _, op in BY_FAMILY["cross-entropy"](
                shape("llama-3.1-8b", ParallelConfig(tp=8), name)
            )
        ]  # type: ignore[union-attr]
        for name in ("train", "fsdp", "megatron")
    }
    assert losses == dict.fromkeys(losses, [16032] * 4)


def test_skew_reaches_the_experts() -> None:
    for _, op in BY_FAMILY["grouped-gemm"](shape("mixtral-8x7b", skew=1.0)):
        assert isinstance(op, GroupedGemm)
        assert op.skew == 1.0
        sizes = op.group_sizes()
        assert sizes[0] > 2 * sizes[-1]


@pytest.mark.parametrize(
    ("model", "axes", "field"),
    [
        ("llama-3.1-70b", {"tp": 3}, "tp"),
        ("llama-3.1-70b", {"tp": 16}, "tp"),  # 8 kv heads
        ("llama-3.1-70b", {"ep": 2}, "ep"),
        ("mixtral-8x7b", {"ep": 3}, "ep"),
        ("mixtral-8x7b", {"ep": 4, "dp_shard": 6}, "dp-shard"),
    ],
)
def test_what_does_not_divide_is_refused(model: str, axes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        ParallelConfig(**axes).check(find_model(model))


@pytest.mark.parametrize("axis", ["tp", "ep", "dp_shard"])
@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, float("nan"), 1.5, "2", None, True])
def test_degrees_that_are_none(axis: str, value: object) -> None:
    with pytest.raises(ConfigError, match=axis.replace("_", "-")):
        ParallelConfig(**{axis: value})  # type: ignore[arg-type]


# Shapes


@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3"])
def test_passes_permute_the_forward_dimensions(name: str) -> None:
    by_role: dict[str, dict[Phase | None, Gemm]] = {}
    for label, op in BY_FAMILY["gemm"](shape(name)):
        assert isinstance(op, Gemm)
        by_role.setdefault(label.role, {})[label.phase] = op
    for ops in by_role.values():
        fwd, dgrad, wgrad = ops[Phase.FWD], ops[Phase.DGRAD], ops[Phase.WGRAD]
        assert (dgrad.m, dgrad.n, dgrad.k) == (fwd.m, fwd.k, fwd.n)
        assert (wgrad.m, wgrad.n, wgrad.k) == (fwd.n, fwd.k, fwd.m)
        assert (fwd.layout, dgrad.layout, wgrad.layout) == (Layout.NT, Layout.NN, Layout.TN)


# (qkv, out, gate_up, down, head) as (M, N, K), M at MBS 1.
# Source: AMD-AGI/Primus, benchmark/kernel/gemm/model_configs.json and benchmark_gemm.py.
PRIMUS_DENSE = {
    "Llama2_7B": "4096,12288,4096 4096,4096,4096 4096,22016,4096 4096,4096,11008 "
    "4096,32000,4096",
    "Llama2_70B": "4096,10240,8192 4096,8192,8192 4096,57344,8192 4096,8192,28672 "
    "4096,32000,8192",
    "Llama3.1_8B": "8192,6144,4096 8192,4096,4096 8192,28672,4096 8192,4096,14336 "
    "8192,128256,4096",
    "Llama3.1_70B": "8192,10240,8192 8192,8192,8192 8192,57344,8192 8192,8192,28672 "
    "8192,128256,8192",
    "Llama3.1_405B": "8192,18432,16384 8192,16384,16384 8192,106496,16384 8192,16384,53248 "
    "8192,128256,16384",
    "Mistral_8x7B": "4096,6144,4096 4096,4096,4096 4096,28672,4096 4096,4096,14336 "
    "4096,32000,4096",
    "Mistral_8x22B": "4096,8192,6144 4096,6144,6144 4096,32768,6144 4096,6144,16384 "
    "4096,32000,6144",
}
# Without the shared experts, to which Primus gives the dense width, and the routed ones, of
# which it measures one as a plain GEMM.
PRIMUS_DEEPSEEK = {
    "Deepseek_V2_Lite": {
        "q": (4096, 3072, 2048),
        "kv_down": (4096, 576, 2048),
        "kv_up": (4096, 4096, 512),
        "out": (4096, 2048, 2048),
        "router": (4096, 64, 2048),
        "head": (4096, 102400, 2048),
    },
    "Deepseek_V2": {
        "q_down": (4096, 1536, 5120),
        "q_up": (4096, 24576, 1536),
        "kv_down": (4096, 576, 5120),
        "kv_up": (4096, 32768, 512),
        "out": (4096, 5120, 16384),
        "router": (4096, 160, 5120),
        "head": (4096, 102400, 5120),
    },
    "Deepseek_V3": {
        "q_down": (4096, 1536, 7168),
        "q_up": (4096, 24576, 1536),
        "kv_down": (4096, 576, 7168),
        "kv_up": (4096, 32768, 512),
        "out": (4096, 7168, 16384),
        "router": (4096, 256, 7168),
        "head": (4096, 129280, 7168),
    },
}
SHARED_WIDTH = {"Deepseek_V2_Lite": 2816, "Deepseek_V2": 3072, "Deepseek_V3": 2048}
EXPERTS = {  # (groups, n of gate_up, k of gate_up, rows per expert as Primus rounds them)
    "Deepseek_V2_Lite": (64, 2816, 2048, 384),
    "Deepseek_V2": (160, 3072, 5120, 153),
    "Deepseek_V3": (256, 4096, 7168, 128),
}


def test_every_model_of_primus_has_a_table() -> None:
    assert {model.name for model in PRIMUS} == {*PRIMUS_DENSE, *PRIMUS_DEEPSEEK}


@pytest.mark.parametrize(
    "model", [m for m in PRIMUS if m.name in PRIMUS_DENSE], ids=lambda m: m.name
)
def test_primus_dense_models(model: ModelConfig) -> None:
    found = forward_dims(BY_FAMILY["gemm"](shape(model, seq_len=model.seq_len)))
    assert list(found) == ["qkv", "out", "gate_up", "down", "head"]
    expected = [tuple(map(int, dims.split(","))) for dims in PRIMUS_DENSE[model.name].split()]
    assert list(found.values()) == expected
    doubled = forward_dims(BY_FAMILY["gemm"](shape(model, seq_len=model.seq_len, mbs=2)))
    assert list(doubled.values()) == [(2 * m, n, k) for m, n, k in expected]


@pytest.mark.parametrize(
    "model", [m for m in PRIMUS if m.name in PRIMUS_DEEPSEEK], ids=lambda m: m.name
)
def test_primus_deepseek_models(model: ModelConfig) -> None:
    where = shape(model, seq_len=model.seq_len)
    found = forward_dims(BY_FAMILY["gemm"](where))
    expected = PRIMUS_DEEPSEEK[model.name]
    assert {role: found[role] for role in expected} == expected
    width, hidden = SHARED_WIDTH[model.name], model.hidden_size
    assert found["shared_gate_up"] == (4096, 2 * width, hidden)
    assert found["shared_down"] == (4096, hidden, width)
    groups, n, k, rows = EXPERTS[model.name]
    experts = {
        label.role: op
        for label, op in BY_FAMILY["grouped-gemm"](where)
        if label.phase is Phase.FWD and isinstance(op, GroupedGemm)
    }
    up, down = experts["experts_gate_up"], experts["experts_down"]
    assert (up.num_groups, up.n, up.k, up.tokens // groups) == (groups, n, k, rows)
    assert (down.num_groups, down.n, down.k) == (groups, k, n // 2)


def test_the_built_in_models_are_primus_too() -> None:
    for model in PRIMUS:
        real = find_model(model.name)
        found = forward_dims(BY_FAMILY["gemm"](shape(real, seq_len=model.seq_len)))
        ours = forward_dims(BY_FAMILY["gemm"](shape(model, seq_len=model.seq_len)))
        common = found.keys() & ours.keys() - {"shared_gate_up", "shared_down"}
        assert {"out", "head"} <= common
        assert {role: found[role] for role in common} == {role: ours[role] for role in common}


def test_roles_of_deepseek_v3() -> None:
    where = shape("deepseek-v3")
    roles = {f: [lb.role for lb, _ in make(where)][::2] for f, make in BY_FAMILY.items()}
    assert list(forward_dims(BY_FAMILY["gemm"](where))) == [
        *("q_down", "q_up", "kv_down", "kv_up", "out"),
        *("gate_up", "down", "router", "shared_gate_up", "shared_down", "head"),
    ]
    assert roles["norm"] == ["norm", "q_norm", "kv_norm"]
    (attention, _) = (op for _, op in BY_FAMILY["attention"](where))
    assert isinstance(attention, Attention)
    assert (attention.head_dim_qk, attention.head_dim_v) == (192, 128)
    assert attention.heads == attention.kv_heads == 128


def test_a_gelu_model_has_one_up_projection_and_no_rope() -> None:
    where = shape("gpt2-125m")
    assert "up" in forward_dims(BY_FAMILY["gemm"](where))
    assert list(BY_FAMILY["rope"](where)) == []
    (norm, _) = (op for _, op in BY_FAMILY["norm"](where))
    assert isinstance(norm, Norm)
    assert norm.kind == "layernorm"


@pytest.mark.parametrize("name", [*DENSE, *MOE])
@pytest.mark.parametrize("dtype", OPERATOR_DTYPES)
def test_every_model_and_dtype_gives_valid_operators(name: str, dtype: DType) -> None:
    where = shape(name, dtype=dtype)
    for family, make in BY_FAMILY.items():
        if family == "grouped-gemm" and dtype is DType.FP64 and where.model.moe:
            with pytest.raises(ConfigError, match="fp64"):
                list(make(where))
            continue
        for label, op in make(where):
            assert label.model == where.model.name
            assert label.role
            assert label.count >= 1
            assert op.memory_bytes > 0
            if not isinstance(op, Gemm):
                assert not op.dtype.is_narrow, family
                assert op.dtype is not DType.TF32, family


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_tiny_and_scaled_models_give_valid_operators(name: str) -> None:
    from fractions import Fraction

    model = find_model(name)
    for small in (model.tiny(), model.scaled(Fraction(1, 64)), model.scaled(Fraction(1, 7))):
        where = shape(small, seq_len=small.seq_len)
        total = flops(matmuls(where), Phase.FWD)
        assert 0 < total < flops(matmuls(shape(model, seq_len=small.seq_len)), Phase.FWD)
        assert sum(1 for make in BY_FAMILY.values() for _ in make(where)) > 10


def test_eight_tokens_or_fewer_have_no_chunked_loss() -> None:
    roles = {
        label.role for label, _ in BY_FAMILY["cross-entropy"](shape("llama-3.1-8b", seq_len=7))
    }
    assert roles == {"loss"}


def test_fp8_where_it_does_not_fit_is_bf16() -> None:
    where = shape("llama-3.1-8b", seq_len=100, dtype=DType.FP8_E4M3)
    for label, op in BY_FAMILY["gemm"](where):
        assert isinstance(op, Gemm)
        fits = op.n % 16 == 0 and op.k % 16 == 0
        assert op.dtype is (DType.FP8_E4M3 if fits else DType.BF16)
        assert fits == (label.phase is not Phase.WGRAD)


# As the step of a framework has them

LISTED = [
    (name, tp)
    for name in ALL
    if find_model(name).norm_placement != "post"  # which Megatron-LM does not have
    for tp in (1, 2, 8)
    if not any(
        width % tp for width in (find_model(name).num_heads, find_model(name).num_kv_heads)
    )
]


@pytest.mark.parametrize(("name", "tp"), LISTED)
def test_op_lists_the_operators_of_megatrons_step(name: str, tp: int) -> None:
    """All that `workload generate --framework megatron` has, by the same options.

    `op` lists the loss as well, which Megatron-LM computes by several kernels, a copy of any
    size, and AdamW layer by layer.
    """
    has_experts = find_model(name).moe is not None
    for sequence in [True] if has_experts or tp == 1 else [True, False]:
        more = ["--sequence-parallel" if sequence else "--no-sequence-parallel"]
        flags = ["--model", name, "--tp", str(tp), "--mbs", "2", "--seq-len", "512", *more]
        words = ["all", *flags, "--as", "megatron", "--dtype", "bf16", "--device", "h100-sxm"]
        options = parse(options_class("all"), words)
        cases = op_plan.layer_cases(options, machine("h100-sxm", dry_run=True))
        listed = {
            case.op
            for case in cases
            if not isinstance(case.op, Copy | CrossEntropy | Optimizer)
        }
        words = ["--framework", "megatron", "--world-size", str(tp), *flags]
        step = generate(parse(workload_flags.options_class("megatron"), words))
        operators = [op.op for op in step.tally(0) if isinstance(op, ComputeOp)]
        computed = {op for op in operators if not isinstance(op, Copy | Optimizer | Kernel)}
        assert listed == computed


def test_op_pads_the_vocabulary_as_megatron_does() -> None:
    """gpt-175b has 50,257 tokens in AICB's file, which eight ranks do not divide."""
    odd = replace(find_model("gpt-175b"), vocab_size=50257, published_params=None)
    assert model_as("megatron", odd, 8).vocab_size == 51200
    assert model_as("megatron", odd, 1).vocab_size == 50304
    assert model_as("fsdp", odd, 8) is odd


def test_what_megatron_refuses_and_others_do_not_have() -> None:
    model = find_model("mixtral-8x7b")
    without = layout_of("megatron", ParallelConfig(tp=8), sequence_parallel=False)
    with pytest.raises(ConfigError, match="sequence-parallel no is invalid: it must be yes"):
        without.check(model)
    without.check(find_model("llama-3.1-70b"))
    with pytest.raises(ConfigError, match="only with --as megatron"):
        layout_of("train", ALONE, sequence_parallel=False)
