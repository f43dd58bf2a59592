"""Architectures of one's own, and the published ones against transformers."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stepmark.cases.training import Recompute
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Attention, CrossEntropy, Gemm, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.model.product_precision import Recipe, by_recipe
from stepmark.step.layout import is_cast
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.workloads.architecture import Architecture, Batch, OwnJob, unit, weights_first
from stepmark.workloads.published import PUBLISHED, gpt_j
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.deepspeed import rule as zero
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.settings import StageEnds

FSDP = RULES["fsdp"].make
DDP = RULES["ddp"].make


def shapes(made: Architecture) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for one in made.units:
        found += [param.shape for param in one.registered_params] * one.times
    return found


@pytest.mark.parametrize(
    ("name", "num_params"), [("gpt-j-6b", 6_050_882_784), ("bigbird-roberta-base", 128_111_286)]
)
def test_published_models_have_as_many_parameters_as_transformers_counts(
    name: str, num_params: int
) -> None:
    assert PUBLISHED[name](Batch(mbs=1, seq_len=128)).num_params == num_params


def test_parameters_are_those_of_transformers_in_its_order() -> None:
    import transformers

    batch = Batch(mbs=1, seq_len=128)
    config = transformers.GPTJConfig(n_layer=2)
    with torch.device("meta"):
        gpt_j_model = transformers.GPTJForCausalLM(config)
        bigbird = transformers.BigBirdForMaskedLM(transformers.BigBirdConfig())
    made = gpt_j(batch, name="two layers", layers=2)
    assert shapes(made) == [tuple(one.shape) for one in gpt_j_model.parameters()]
    made = PUBLISHED["bigbird-roberta-base"](batch)
    assert shapes(made) == [tuple(one.shape) for one in bigbird.parameters()]


@pytest.mark.parametrize(("name", "tied"), [("gpt-j-6b", 0), ("bigbird-roberta-base", 1)])
def test_forward_products_are_two_per_token_and_weight(name: str, tied: int) -> None:
    batch = Batch(mbs=2, seq_len=1024)
    made = PUBLISHED[name](batch)
    flops = dict.fromkeys(Phase, 0)
    for one in made.units:
        for op in chain.from_iterable(leaf.work for leaf in one.walk()):
            if isinstance(op.op, Gemm):
                flops[op.phase] += one.times * op.op.flops
    tables = ("wte", "word_embeddings", "position_embeddings", "token_type_embeddings")
    weights = 0
    for one in made.units:
        for param in one.params:
            looked_up = any(table in param.name for table in tables)
            if len(param.shape) == 2 and not looked_up and "pooler" not in param.name:
                weights += one.times * param.numel
    weights += tied * 50358 * 768
    pooler = 2 * batch.mbs * 768 * 768 if tied else 0
    assert flops[Phase.FWD] == 2 * batch.tokens * weights + pooler
    assert flops[Phase.DGRAD] == flops[Phase.WGRAD] == flops[Phase.FWD]


def test_block_sparse_attention_is_linear_in_the_sequence() -> None:
    def pairs(seq_len: int) -> int:
        made = PUBLISHED["bigbird-roberta-base"](Batch(mbs=1, seq_len=seq_len))
        ops = chain.from_iterable(leaf.fwd for leaf in made.units[1].walk())
        return sum(one.op.pairs for one in ops if isinstance(one.op, Attention))

    assert pairs(704) == 704**2  # attended whole
    # ends see all, their neighbours 7 blocks, the rest 8
    assert pairs(4096) == 128 * 4096 + 128 * 7 * 64 + (4096 - 256) * 8 * 64
    assert pairs(8192) - pairs(4096) == 128 * 4096 + 4096 * 8 * 64


def mine(batch: Batch, *, layers: int = 4, tied: bool = False) -> Architecture:
    """Odd sizes: hardly a number of ranks divides them."""
    table = unit("embed", batch.embedding("table", 101, 17))
    block = unit(
        "layers", batch.norm("norm", 17), batch.linear("mlp", 17, 17, bias=True), times=layers
    )
    head = unit(
        "head",
        batch.linear("head", 101, 17, tied="table.weight" if tied else ""),
        batch.loss("loss", 101),
    )
    return Architecture(name="mine", units=(table, block, head))


DATA = Path(__file__).parents[1] / "data" / "gpt-j"
BATCH = Batch(mbs=1, seq_len=8)
PARAMS = 2 * 101 * 17 + 4 * (2 * 17 + 17 * 17 + 17)


def test_own_architecture() -> None:
    made = mine(BATCH)
    assert made.num_params == PARAMS
    assert made.num_layers == 4
    last = made.units[-1].pieces[-1]
    assert [op.phase for op in (*last.fwd, *last.bwd)] == [Phase.FWD, Phase.BWD]
    assert isinstance(last.fwd[0].op, CrossEntropy)


def job(made: Architecture, ranks: int, *, replicas: int = 1, micro: int = 1) -> OwnJob:
    parallel = ParallelConfig(dp_shard=ranks, dp_replicate=replicas)
    gbs = ranks * replicas * micro
    return OwnJob(architecture=made, seq_len=8, parallel=parallel, gbs=gbs)


def sent(made: Workload) -> Counter[tuple[str, str]]:
    """Elements of whole buffers by collective and group, of weights and gradients."""
    found: Counter[tuple[str, str]] = Counter()
    for op, times in made.tally().items():
        if isinstance(op, CommOp) and op.phase is not Phase.OPTIM:
            size = op.message_bytes(made.groups[op.group]) // op.dtype.itemsize
            found[op.collective, op.group] += times * size
    return found


def padded(ranks: int) -> int:
    """Rows of each tensor up to a multiple of the ranks."""
    rows = [101 * 17, 101 * 17] + 4 * [17, 17, 17 * 17, 17]
    widths = [17, 17] + 4 * [1, 1, 17, 1]
    return sum(
        -(-size // width // ranks) * ranks * width
        for size, width in zip(rows, widths, strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("micro", [1, 5])
def test_fsdp_gathers_and_scatters_parameters_and_padding(ranks: int, micro: int) -> None:
    settings = FSDP(ends=StageEnds.ROOT)
    made = rule.workload(job(mine(BATCH), ranks, micro=micro), settings)
    made.check()
    root = -(-101 // ranks) * ranks * 17 * 2
    assert sent(made) == {
        # The root stays gathered between the passes.
        ("all_gather", "fsdp"): micro * (2 * padded(ranks) - root),
        ("reduce_scatter", "fsdp"): micro * padded(ranks),
    }


@pytest.mark.parametrize(
    ("ends", "groups"),
    [("root", [3, 2, 1, 0, None]), ("apart", [None, 3, 2, 1, 0, None])],
)
def test_each_layer_of_fsdp_is_a_group_and_so_are_the_ends(
    ends: str, groups: list[int | None]
) -> None:
    made = rule.workload(job(mine(BATCH), 2), FSDP(ends=StageEnds(ends)))
    scattered = [
        op.layer
        for op in made.expand()
        if isinstance(op, CommOp) and op.collective == "reduce_scatter"
    ]
    assert scattered == groups


def test_replicas_of_fsdp_reduce_their_shards() -> None:
    made = rule.workload(job(mine(BATCH), 2, replicas=3), FSDP())
    assert sent(made)["all_reduce", "replicate"] == padded(2) // 2


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("bucket_mb", [0, 1])
def test_ddp_reduces_every_parameter_once(micro: int, bucket_mb: int) -> None:
    wide = unit("layers", BATCH.linear("mlp", 1024, 1024, bias=True), times=6)
    made = Architecture(name="wide", units=(wide,))
    asked = job(made, 1, replicas=4, micro=micro)
    found = rule.workload(asked, DDP(bucket_cap_mb=bucket_mb))
    found.check()
    assert sent(found) == {("all_reduce", "ddp"): micro * made.num_params}


def tiny_gpt_j(width: int) -> Architecture:
    return gpt_j(
        Batch(mbs=1, seq_len=16),
        name="tiny",
        hidden=width,
        heads=4,
        rotated=8,
        ffn=2 * width,
        vocab=515,
        layers=3,
    )


def lines(made: Workload) -> list[str]:
    """Messages as tests/data/gpt-j has them."""
    return [
        f"{op.phase} {op.collective} {op.dtype} {op.call_bytes()}"
        f" {op.message_bytes(made.groups[op.group])}"
        for op in made.expand()
        if isinstance(op, CommOp)
    ]


def test_messages_of_gpt_j_are_pytorchs() -> None:
    real = json.loads((DATA / "messages.json").read_text())
    settings = FSDP(clip=False, ends=StageEnds.ROOT)
    made = rule.workload(job(tiny_gpt_j(64), 2), settings)
    assert lines(made) == real["fsdp"]
    made = rule.workload(job(tiny_gpt_j(1024), 1, replicas=2), DDP(autocast=False, clip=False))
    # An architecture has no buffers.
    assert lines(made) == [line for line in real["ddp"] if "broadcast" not in line]


@pytest.mark.parametrize("framework", ["fsdp", "ddp", "deepspeed"])
def test_a_tied_table_is_one_tensor(framework: str) -> None:
    made = mine(BATCH, tied=True)
    assert made.num_params == PARAMS - 101 * 17
    asked = job(made, *((1,) if framework == "ddp" else (2,)), replicas=2)
    settings = {
        "fsdp": lambda: rule.workload(asked, FSDP(ends=StageEnds.APART)),
        "ddp": lambda: rule.workload(asked, DDP()),
        "deepspeed": lambda: zero.workload(asked, DeepSpeed(stage=2)),
    }
    found = settings[framework]()
    reduced = sum(
        size for (collective, _), size in sent(found).items() if collective == "all_reduce"
    )
    scattered = sent(found)["reduce_scatter", "fsdp"]
    assert (scattered or reduced) == (
        padded(2) - 102 * 17 if framework == "fsdp" else made.num_params
    )


def test_a_backward_pass_goes_the_other_way_round() -> None:
    """Weights' gradients first, as autograd's nodes of PyTorch run."""
    table, block, head = mine(BATCH, layers=1).units
    last = unit("last", BATCH.norm("last", 17))
    made = Architecture(name="mine", units=(table, block, last, head))
    found = rule.workload(job(made, 1), DDP(autocast=False))
    ops = [op for op in found.expand() if isinstance(op, ComputeOp)]
    assert [(op.module, str(op.phase)) for op in ops if op.phase is not Phase.OPTIM] == [
        ("table", "fwd"),
        ("norm", "fwd"),
        ("mlp", "fwd"),
        ("last", "fwd"),
        ("head", "fwd"),
        ("loss", "fwd"),
        ("loss", "bwd"),
        ("head", "wgrad"),
        ("head", "dgrad"),
        ("last", "bwd"),
        ("mlp", "wgrad"),
        ("mlp", "dgrad"),
        ("norm", "bwd"),
        ("table", "wgrad"),
    ]


def is_of_framework(op: ComputeOp) -> bool:
    """A copy into or out of a buffer, or a wait: no architecture has these."""
    return isinstance(op.op, Kernel) and op.op.name not in ("add", "embedding_backward")


@pytest.mark.parametrize("framework", ["fsdp", "ddp", "deepspeed"])
def test_computation_is_the_architectures(framework: str) -> None:
    """Of one micro-batch, whoever spreads it."""
    made = PUBLISHED["gpt-j-6b"](Batch(mbs=2, seq_len=64))
    asked = job(made, 4)
    found = {
        "fsdp": lambda: rule.workload(asked, FSDP()),
        "ddp": lambda: rule.workload(asked, DDP()),
        "deepspeed": lambda: zero.workload(asked, DeepSpeed()),
    }[framework]()
    wanted = Counter[tuple[object, Phase, str]]()
    for one in made.units:
        for part in one.walk():
            for op in part.work:
                wanted[op.op, op.phase, op.module] += one.times
    seen = Counter[tuple[object, Phase, str]]()
    for op in found.expand():
        if (
            isinstance(op, ComputeOp)
            and op.phase is not Phase.OPTIM
            and not is_of_framework(op)
        ):
            seen[op.op, op.phase, op.module] += 1
    assert seen == wanted


def test_recomputation_stops_before_the_last_product() -> None:
    asked = job(PUBLISHED["gpt-j-6b"](BATCH), 4)
    found = rule.workload(asked, FSDP(recompute=Recompute.FULL))
    again = [op.module for op in found.expand() if isinstance(op, ComputeOp) and op.recompute]
    assert len(again) == 28 * 9
    assert again[:9] == [
        "ln_1",
        *(f"attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "rope", "core", "out_proj")),
        "mlp.fc_in",
        "mlp.gelu",
    ]


def post_norm(batch: Batch) -> Architecture:
    """A block whose norm follows its products, as in BERT."""
    block = unit(
        "layers",
        batch.linear("up", 64, 16),
        batch.activation("gelu", 64),
        batch.linear("down", 16, 64),
        batch.add("residual", 16),
        batch.norm("norm", 16),
        times=2,
    )
    table = unit("embed", batch.embedding("table", 32, 16))
    head = unit("head", batch.linear("head", 32, 16), batch.loss("loss", 32))
    return Architecture(name="post-norm", units=(table, block, head))


def test_a_norm_after_the_last_product_needs_its_result_again() -> None:
    """As torch does it: the norm's input is saved, so all up to the norm runs again."""
    block = torch.nn.ModuleDict(
        {"up": torch.nn.Linear(16, 64), "down": torch.nn.Linear(64, 16)}
    )
    norm = torch.nn.LayerNorm(16)

    def before_norm(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(block["up"](x))
        return x + block["down"](hidden)

    def post(x: torch.Tensor) -> torch.Tensor:
        return norm(before_norm(x))

    x = torch.randn(8, 16, requires_grad=True)
    num_again = {}
    for name, body in (("plain", before_norm), ("post", post)):
        counts = []
        for run in (body, partial(checkpoint, body, use_reentrant=False)):
            with FlopCounterMode(display=False) as counter:
                run(x).sum().backward()
            counts.append(counter.get_total_flops())
        num_again[name] = (counts[1] - counts[0]) // (2 * 8 * 16 * 64)
    assert num_again == {"plain": 1, "post": 2}
    found = rule.workload(job(post_norm(BATCH), 4), FSDP(recompute=Recompute.FULL))
    again = [op.module for op in found.expand() if isinstance(op, ComputeOp) and op.recompute]
    assert again == 2 * ["up", "gelu", "down", "residual", "norm"]
    selective = rule.workload(job(post_norm(BATCH), 4), FSDP(recompute=Recompute.OPS))
    again = [
        op.module for op in selective.expand() if isinstance(op, ComputeOp) and op.recompute
    ]
    assert again == 2 * ["gelu", "down", "residual", "norm"]


def test_an_encoder_and_a_decoder_are_layers_one_after_the_other() -> None:
    units = [
        unit("embed", BATCH.embedding("table", 64, 16)),
        unit("encoder", BATCH.linear("mlp", 16, 16), times=3),
        unit("bridge", BATCH.linear("bridge", 32, 16)),
        unit("decoder", BATCH.linear("mlp", 32, 32), times=2),
    ]
    made = Architecture(name="both", units=tuple(units))
    found = rule.workload(job(made, 2), FSDP())
    layers = {
        op.layer for op in found.expand() if isinstance(op, ComputeOp) and op.module == "mlp"
    }
    assert layers == {0, 1, 2, 4, 5}
    found = zero.workload(job(made, 2), DeepSpeed())
    layers = {
        op.layer for op in found.expand() if isinstance(op, ComputeOp) and op.module == "mlp"
    }
    assert layers == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Architecture(name="none", units=()),
        lambda: Architecture(name="no weights", units=(unit("loss", BATCH.loss("loss", 8)),)),
        lambda: Architecture(name="twice", units=(unit("a", BATCH.norm("n", 4)),) * 2),
        lambda: unit("a", BATCH.norm("n", 4), BATCH.norm("n", 4)),
        lambda: unit("a", BATCH.norm("n", 4), times=0),
        lambda: unit("a", BATCH.norm("n", 4), BATCH.norm("m", 4), registered=("m",)),
        lambda: unit("a", BATCH.norm("n", 4), registered=("n", "m")),
        lambda: BATCH.linear("a", 0, 4),
        lambda: Architecture(
            name="tied", units=(unit("a", BATCH.linear("h", 8, 8, tied="lost.weight")),)
        ),
        lambda: OwnJob(
            architecture=mine(BATCH), seq_len=8, parallel=ParallelConfig(tp=2, dp_shard=2)
        ),
        lambda: OwnJob(architecture=mine(BATCH), seq_len=8, mbs=2, gbs=3),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        wrong()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("recipe", Recipe)
def test_linear_layers_are_narrow_unless_they_say_otherwise(recipe: Recipe) -> None:
    batch = Batch(mbs=1, seq_len=64, products=by_recipe(recipe))
    for narrow in (True, False):
        layer = batch.linear("mlp", 64, 64, narrow=narrow)
        dtypes = {op.op.dtype for op in layer.work if isinstance(op.op, Gemm)}
        assert dtypes == {batch.products.dtype if batch.products and narrow else DType.BF16}
    first = weights_first(batch.linear("mlp", 64, 64).bwd)
    products = [op.phase for op in first if not is_cast(op)]
    assert products == [Phase.WGRAD, Phase.DGRAD]
    # MXFP8's weight gradient reads the input in scales of its own: a second cast
    assert [is_cast(op) for op in first] == [True] * (len(first) - 2) + [False, False]
    assert len(first) == (4 if recipe is Recipe.MXFP8 else 3)
