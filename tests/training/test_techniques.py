"""A technique changes how a step is computed, not what is learned; and it is in force."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.ranks_pool import Pool
from tests.selected import parameters, slowly
from torch.utils.flop_counter import FlopCounterMode

from stepmark.cases.flops import per_token
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import GradSync, Precision, Recompute
from stepmark.measuring.ranks import Ranks
from stepmark.training import layers, trainer

from .curves import (
    DEEPSEEK,
    FEW_STEPS,
    GPT2,
    LLAMA,
    MIXTRAL,
    QWEN3,
    STEPS,
    alone,
    losses,
    spread,
)
from .techniques_on_ranks import EXACT, LAYOUTS, MODEL, OF_FSDP, ROUNDED, curves_kinds_and_bytes

# Of the loss. fp32 sums in another order, not amplified yet in so few steps.
TOLERANCE = 1e-5
# 8 bits, or 4 and 3 in products: measured up to 0.4 %, while losses fall by 19 %.
TOLERANCE_OF_ROUNDED = 0.01
ONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))
Told = dict[str, Any]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Told:
    """Selected cases, from one pool of two ranks."""
    names = sorted(parameters(request, "name"))
    with Pool(2, imports=("torchao.float8",)) as pool:
        answer: Told = pool.run(curves_kinds_and_bytes, names, timeout_s=900)[0]
    return answer


# Others combine them, and one rank does each by itself.
COMBINED = tuple(
    f"{layout}: {name}"
    for layout in LAYOUTS
    for name in ("sac full", "sac ops", "chunks", "reduced at the last")
)
OF_LAYOUTS = [f"{layout}: {name}" for layout in LAYOUTS for name in EXACT]
OF_ROUNDED = [f"{layout}: {name}" for layout in LAYOUTS for name in ROUNDED]


@pytest.mark.parametrize("name", slowly(OF_LAYOUTS, COMBINED))
def test_the_loss_curve_is_that_without_it(name: str, told: Told) -> None:
    curves = told["curves"]
    got, want = curves[name], curves[name.replace(": ", ": like ", 1)]
    assert len(got) >= FEW_STEPS
    assert got == pytest.approx(want[: len(got)], rel=TOLERANCE)


COMPILED = "fsdp: compile, sac ops"


@pytest.mark.parametrize("name", [COMPILED])
def test_blocks_compiled_and_recomputed_learn_the_same(name: str, told: Told) -> None:
    """What is recomputed is chosen in the graphs, whose operators then run one by one."""
    curves = told["curves"]
    want = curves["fsdp: like compile, sac ops"]
    assert curves[name] == pytest.approx(want, rel=TOLERANCE)


@pytest.mark.slow
def test_blocks_compiled_by_inductor_learn_the_same() -> None:
    with Pool(2, imports=("torch._inductor.compile_fx", "torchao.float8")) as pool:
        told = pool.run(curves_kinds_and_bytes, [COMPILED], "inductor", timeout_s=900)[0]
    test_blocks_compiled_and_recomputed_learn_the_same(COMPILED, told)


@pytest.mark.parametrize("name", ["ddp: master, reduced at the last"])
def test_masters_take_gradients_once_they_are_reduced(name: str, told: Told) -> None:
    """Held ones add up in bf16; each rank's own would be off by far more."""
    curves = told["curves"]
    want = curves["ddp: like master, reduced at the last"]
    assert curves[name] == pytest.approx(want, rel=1.5e-3)


@pytest.mark.parametrize(
    "name",
    slowly(OF_ROUNDED, ("ddp: bf16", "fsdp: bf16"))
    + [f"fsdp: {name}" for name in OF_FSDP if name.startswith("fp8")],
)
def test_rounded_products_learn_nearly_the_same(name: str, told: Told) -> None:
    layout, _, technique = name.partition(": ")
    got, want = told["curves"][name], told["curves"][f"{layout}: like {technique}"]
    assert got == pytest.approx(want, rel=TOLERANCE_OF_ROUNDED)
    assert got[0] != want[0]  # or nothing was rounded
    assert want[0] - want[-1] > 10 * TOLERANCE_OF_ROUNDED * want[0]  # or nothing is learned


@pytest.mark.parametrize(
    ("name", "head", "held"),
    [
        ("fp8", "Linear", "Tensor"),
        ("fp8 all-gather", "Linear", "WeightWithDynamicFloat8CastTensor"),
        ("fp8 all-gather and head", "Float8Linear", "WeightWithDynamicFloat8CastTensor"),
    ],
)
def test_the_head_is_fp8_only_when_asked(name: str, head: str, held: str, told: Told) -> None:
    """And what FSDP gathers: its shard's kind says how it goes over the wire."""
    kinds = told["kinds"][f"fsdp: {name}"]
    assert kinds["output.head"] == head
    assert kinds["held"] == held
    for layer in range(MODEL.num_layers):
        for part in ("attention.qkv", "attention.out", "ffn.gate", "ffn.up", "ffn.down"):
            assert kinds[f"blocks.{layer}.{part}"] == "Float8Linear"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reduced_at_the_last_is_reduced_once(layout: str, told: Told) -> None:
    reduced = told["reduced"]
    assert reduced[f"{layout}: last"] > 0
    assert reduced[f"{layout}: every"] == 2 * reduced[f"{layout}: last"]


# On one rank


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Such small products take longer with more, and much longer on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def curve(name: str, *, like: bool = False) -> list[float]:
    values = (EXACT | ROUNDED)[name][like] | {"grad_sync": GradSync.EVERY}
    case = replace(alone(spread(MODEL, "none")), **values)
    found: list[float] = losses(case, ONE, FEW_STEPS if name in EXACT else STEPS)
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_one_rank_learns_the_same_with_it(name: str) -> None:
    limit = TOLERANCE_OF_ROUNDED if name in ROUNDED else TOLERANCE
    assert curve(name) == pytest.approx(curve(name, like=True), rel=limit)


def counted(case: TrainCase) -> int:
    """Floating-point operations of one forward and backward pass, by torch's own counter.

    It has no formula for attention on a CPU and for grouped products. Attention counts the half
    of its scores that is not masked, backward twice, and experts' rows their width only once.
    """
    aten, model = torch.ops.aten, case.model

    def attention(query: Sequence[int], *_args: object, **_kwargs: object) -> int:
        batch, heads, length, _ = query
        return batch * heads * (length**2 // 2) * 2 * (model.d_qk + model.d_v)

    def attention_backward(
        _grad: object, query: Sequence[int], *_args: object, **_kwargs: object
    ) -> int:
        return 2 * attention(query)

    def grouped(
        left: Sequence[int], right: Sequence[int], *_args: object, **_kwargs: object
    ) -> int:
        """Rows by experts' weights; or, for the weights' gradient, width by rows by width."""
        return 2 * left[0] * left[1] * right[-1]

    made = trainer.make(case, ONE.device)
    tokens = torch.zeros((case.mbs, case.model.seq_len), dtype=torch.int64)
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten._grouped_mm: grouped,
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        made.micro_step(tokens, tokens, is_last=True, mark=lambda _name: None)
    return int(counter.get_total_flops())


# None, all blocks, one in two and in four, and per operator.
RECOMPUTED = [
    (Recompute.NONE, (1, 1)),
    (Recompute.FULL, (1, 1)),
    (Recompute.BLOCKS, (1, 2)),
    (Recompute.BLOCKS, (1, 4)),
    (Recompute.OPS, (1, 1)),
]
# Two and three linear layers in an MLP, norms of q and k; experts, also shared ones after a
# dense layer and with latent attention.
COUNTED = {model.name: model for model in (LLAMA, GPT2, QWEN3, MIXTRAL, DEEPSEEK)}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(("recompute", "blocks"), RECOMPUTED)
def test_executed_flops_are_those_that_torch_counts(
    name: str, recompute: Recompute, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputation stops before a last product that nothing needs (cases/recompute.py)."""
    # On a CPU experts are products one by one, on a GPU grouped ones: selective counts those.
    monkeypatch.setattr(layers, "looped", layers.grouped)
    case = replace(
        spread(COUNTED[name], "none"),
        precision=Precision.BF16,
        attention="flash",
        recompute=recompute,
        recompute_blocks=blocks,
    )
    assert counted(case) == per_token(case).hfu * case.tokens_per_step
