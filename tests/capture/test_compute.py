"""What a captured step computes: laws of products, and torch's own counter of FLOPs."""

import math
from collections import Counter

import pytest
import torch
from tests.capture.example import Config, Llama
from tests.capture.made import made_of
from tests.capture.user_code import SMALL, Step
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from stepmark.capture.run import capture
from stepmark.model.ops import Attention, Gemm, Norm, Optimizer, Phase
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload

BATCH = 2
# As many key heads as query heads, which is all that torch's counter can count.
PLAIN = Config(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_heads=4, num_kv_heads=4,
               vocab_size=50, seq_len=8)  # fmt: skip
PRODUCTS = (Phase.DGRAD, Phase.WGRAD)
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def plain() -> Step:
    model = Llama(PLAIN)

    def step() -> None:
        tokens = torch.randint(PLAIN.vocab_size, (BATCH, PLAIN.seq_len))
        model(tokens).logsumexp(-1).mean().backward()

    return step


def sharded() -> Workload:
    """FSDP2 x TP with sequence parallelism: two by two ranks, two micro-batches, AdamW."""
    return made_of("fsdp_tp")


def computed(made: Workload) -> list[ComputeOp]:
    return [one for one in made.expand() if isinstance(one, ComputeOp)]


def gemm_flops(operations: list[ComputeOp], *phases: Phase) -> int:
    return sum(
        one.op.flops
        for one in operations
        if isinstance(one.op, Gemm) and one.phase in phases and not one.recompute
    )


def matmul_params(config: Config) -> int:
    """The counter's own model: weights of linear layers; the embedding is looked up."""
    with torch.device("meta"):
        linears = [one for one in Llama(config).modules() if isinstance(one, nn.Linear)]
    assert len(linears) == 7 * config.num_layers + 1
    return sum(one.weight.numel() for one in linears)


def test_forward_flops_are_twice_tokens_times_parameters() -> None:
    tokens = SMALL.seq_len * SMALL.num_microbatches
    expected = 2 * tokens * matmul_params(SMALL) // SMALL.tp
    found = computed(sharded())
    assert gemm_flops(found, Phase.FWD) == expected
    # The table's output takes a gradient, so the first layer has a dgrad, too.
    assert gemm_flops(found, Phase.DGRAD) == gemm_flops(found, Phase.WGRAD) == expected


def test_flops_equal_those_of_torchs_counter() -> None:
    """The same code on real tensors, counted by torch.utils.flop_counter."""
    step = plain()
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            _CPU: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
            ),
        },
    )
    with counter:
        step()
    counted: Counter[str] = Counter()
    for operator, flops in counter.get_flop_counts()["Global"].items():
        counted["products" if "mm" in str(operator) else "attention"] += flops
    found = computed(capture(plain, 1))
    assert gemm_flops(found, Phase.FWD, *PRODUCTS) == counted["products"]
    assert sum(map(square_flops, attentions(found))) == counted["attention"]
    assert counted.total() == counter.get_total_flops()


def test_gradients_of_weights_sum_over_tokens() -> None:
    products = {
        (one.phase, one.op.m, one.op.k)
        for one in computed(sharded())
        if isinstance(one.op, Gemm)
    }
    tokens = SMALL.seq_len
    for phase, m, k in products:
        assert (k if phase is Phase.WGRAD else m) == tokens


def attentions(operations: list[ComputeOp]) -> list[Attention]:
    return [one.op for one in operations if isinstance(one.op, Attention)]


def square_flops(op: Attention) -> int:
    """As torch counts: the whole square; backward five products, ours four."""
    product = 2 * op.batch * op.heads * op.seq_q * op.seq_kv * op.head_dim_qk
    return product * (2 if op.phase is Phase.FWD else 5)


@pytest.mark.parametrize("phase", [Phase.FWD, Phase.BWD])
def test_attention_is_attention_of_local_heads(phase: Phase) -> None:
    found = [one for one in attentions(computed(sharded())) if one.phase is phase]
    assert len(found) == SMALL.num_layers * SMALL.num_microbatches
    (op,) = set(found)
    assert (op.batch, op.seq_q, op.seq_kv) == (1, SMALL.seq_len, SMALL.seq_len)
    assert (op.heads, op.kv_heads) == (
        SMALL.num_heads // SMALL.tp,
        SMALL.num_kv_heads // SMALL.tp,
    )
    assert op.head_dim_qk == op.head_dim_v == SMALL.hidden_size // SMALL.num_heads
    assert op.causal


def test_nothing_with_flops_is_left_a_kernel() -> None:
    kernels = [one.op for one in computed(sharded()) if isinstance(one.op, Kernel)]
    assert kernels
    assert {one.flops for one in kernels} == {0}
    assert not any("mm" in one.name or "dot_product" in one.name for one in kernels)
    assert all(one.bytes_moved is not None for one in kernels)


def test_a_layer_norm_is_a_norm() -> None:
    def build() -> Step:
        model = nn.LayerNorm(32)
        return lambda: model(torch.ones(2, 3, 32)).square().mean().backward()

    norms = [one for one in computed(capture(build, 1)) if isinstance(one.op, Norm)]
    assert [(one.op.tokens, one.op.hidden, one.phase) for one in norms] == [  # type: ignore[union-attr]
        (6, 32, Phase.FWD),
        (6, 32, Phase.BWD),
    ]


def test_the_optimizer_updates_this_ranks_parameters() -> None:
    """Rank 0 has the first rows, rounded up, of what tensor parallelism left it."""
    with torch.device("meta"):
        named = dict(Llama(SMALL).named_parameters())
    expected = 0
    for name, param in named.items():
        rows, rest = param.shape[0], math.prod(param.shape[1:])
        is_row_wise = name.endswith(("wo.weight", "down.weight"))
        if is_row_wise:
            rest //= SMALL.tp
        elif param.dim() > 1:
            rows //= SMALL.tp
        expected += math.ceil(rows / 2) * rest
    updates = [one for one in computed(sharded()) if one.phase is Phase.OPTIM]
    (op,) = {one.op for one in updates if isinstance(one.op, Optimizer)}
    assert (op.num_params, op.kind) == (expected, "adamw")
    # Its state is made in the first step only.
    assert not any("zeros" in one.op.name for one in updates if isinstance(one.op, Kernel))


def test_phases_follow_each_other_and_the_clip_is_optim() -> None:
    """Forward, backward, forward, backward, then the norm's sum over all ranks, then AdamW."""
    operations = list(sharded().expand())
    kinds = [
        "optim" if one.phase is Phase.OPTIM else "fwd" if one.phase is Phase.FWD else "bwd"
        for one in operations
    ]
    turns = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    assert turns == ["fwd", "bwd", "fwd", "bwd", "optim"]
    last = operations[kinds.index("optim") :]
    sums = [one for one in last if isinstance(one, CommOp)]
    assert [(one.collective, one.group) for one in sums] == [
        ("all_reduce", "dp"),
        ("all_reduce", "tp"),
    ]
    update = next(
        at
        for at, one in enumerate(last)
        if isinstance(one, ComputeOp) and isinstance(one.op, Optimizer)
    )
    assert last.index(sums[-1]) < update


def test_work_belongs_to_modules_layers_and_microbatches() -> None:
    """Also in the backward pass, which no module calls."""
    found = computed(sharded())
    for phase in (Phase.FWD, *PRODUCTS):
        products = Counter(
            (one.module, one.layer, one.microbatch)
            for one in found
            if isinstance(one.op, Gemm) and one.phase is phase
        )
        modules = [f"attention.{one}" for one in ("wq", "wk", "wv", "wo")]
        modules += [f"ffn.{one}" for one in ("gate", "up", "down")]
        expected = {
            (name, layer, microbatch): 1
            for name in modules
            for layer in range(SMALL.num_layers)
            for microbatch in range(SMALL.num_microbatches)
        } | {("output", None, number): 1 for number in range(SMALL.num_microbatches)}
        assert products == expected
