"""Adapters beside frozen weights: published counts of parameters, and laws of their work."""

from dataclasses import replace

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.layout import FUSED, Inputs, ShardLayout
from stepmark.step.lora import Lora, is_adapter
from stepmark.step.module import Module
from stepmark.step.tree import build

INPUTS = Inputs(mbs=1, seq_len=1024)
ATTENTION = frozenset({"q", "k", "v", "out"})
APART: frozenset[str] = frozenset()


def tree(
    model: str, lora: Lora | None, *, fused: frozenset[str] = APART, tp: int = 1, pp: int = 1
) -> Module:
    layout = ShardLayout(axes=ParallelConfig(tp=tp, pp=pp), fused=fused, lora=lora)
    return build(find_model(model), layout, INPUTS)


# (model, rank, targets, fused, trained, all), as peft's print_trainable_parameters() has them:
# logs of LLaMA-Factory; github.com/ymcui/Chinese-LLaMA-Alpaca/issues/189; MLPerf's
# llama2_70b_lora, whose checkpoint has q, k and v in one.
@pytest.mark.parametrize(
    ("model", "rank", "targets", "fused", "trained", "all_params"),
    [
        ("llama-3.1-8b", 8, Lora(rank=1).targets, APART, 20_971_520, 8_051_232_768),
        ("llama-2-7b", 8, frozenset("qv"), APART, 4_194_304, 6_742_609_920),
        ("llama-2-70b", 16, ATTENTION, FUSED["train"], 44_564_480, 69_021_212_672),
    ],
)
def test_counts_are_those_that_peft_prints(
    model: str,
    rank: int,
    targets: frozenset[str],
    fused: frozenset[str],
    trained: int,
    all_params: int,
) -> None:
    units = tree(model, Lora(rank=rank, targets=targets), fused=fused).inside
    params = [(unit.times * p.numel, p.is_trained) for unit in units for p in unit.all_params]
    assert sum(numel for numel, is_trained in params if is_trained) == trained
    assert sum(numel for numel, _ in params) == all_params


def flops(module: Module, phase: Phase, *, adapters: bool) -> int:
    return sum(
        times * (op.op.executed_flops or 0)
        for _, times, leaf in module.leaves()
        if is_adapter(leaf.role) is adapters
        for op in leaf.work
        if op.phase is phase
    )


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v2-lite", "gpt2-xl"])
def test_frozen_weights_lose_their_gradients_and_nothing_else(model: str) -> None:
    full, low = tree(model, None), tree(model, Lora(rank=8))
    for phase in (Phase.FWD, Phase.DGRAD):
        assert flops(low, phase, adapters=False) == flops(full, phase, adapters=False)
    assert (
        flops(low, Phase.WGRAD, adapters=False) == 0 < flops(full, Phase.WGRAD, adapters=False)
    )
    assert not any(
        param.is_trained
        for _, _, leaf in low.leaves()
        for param in leaf.params
        if not is_adapter(leaf.role)
    )
    sizes = sum(
        times * param.numel
        for _, times, leaf in low.leaves()
        for param in leaf.params
        if is_adapter(leaf.role)
    )
    for phase in (Phase.FWD, Phase.DGRAD, Phase.WGRAD):
        assert flops(low, phase, adapters=True) == 2 * INPUTS.seq_len * sizes


def test_tensor_parallel_ranks_divide_adapters() -> None:
    lora = Lora(rank=16)
    whole = tree("llama-3.1-8b", lora)
    part = tree("llama-3.1-8b", lora, tp=4)
    for phase in (Phase.FWD, Phase.DGRAD, Phase.WGRAD):
        ranks = 4 * flops(part, phase, adapters=True)
        assert ranks == flops(whole, phase, adapters=True)


def test_experts_and_routers_have_no_adapters() -> None:
    low = tree("deepseek-v2-lite", Lora(rank=8))
    adapted = {
        leaf.role.rpartition(".")[0] for _, _, leaf in low.leaves() if is_adapter(leaf.role)
    }
    assert "mlp.shared_gate" in adapted
    assert "attention.kv_up" in adapted
    assert not any("expert" in role or "router" in role for role in adapted)


def test_a_head_is_adapted_if_it_is_named() -> None:
    lora = Lora(rank=8, targets=frozenset({"head"}))
    names = [p.name for unit in tree("llama-3.1-8b", lora).inside for p in unit.all_params]
    assert [name for name in names if "lora" in name] == [
        "output.head.lora_a.weight",
        "output.head.lora_b.weight",
    ]


@pytest.mark.parametrize(
    ("lora", "fused", "text"),
    [
        ({"rank": 0}, APART, "lora_rank 0 is invalid"),
        ({"rank": 8, "targets": frozenset({"router"})}, APART, "some of q, k, v, out"),
        ({"rank": 8, "targets": frozenset()}, APART, "some of q, k, v, out"),
        ({"rank": 8, "targets": frozenset("qv")}, FUSED["train"], "all or none of q, k, v"),
    ],
)
def test_what_has_no_adapter_is_refused(
    lora: dict[str, object], fused: frozenset[str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        tree("llama-3.1-8b", Lora(**lora), fused=fused)  # type: ignore[arg-type]


def test_a_rank_that_tp_does_not_divide_is_refused() -> None:
    model = find_model("llama-3.1-8b")
    layout = ShardLayout(axes=ParallelConfig(tp=4), lora=Lora(rank=6))
    with pytest.raises(ConfigError, match=r"lora_rank 6 .* a multiple of tp \(4\)"):
        build(model, replace(layout), INPUTS)
