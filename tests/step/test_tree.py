"""Laws of the module tree: work is conserved over ranks, weights are the model's, exactly."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model, load_models
from stepmark.model.ops import Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.layout import FUSED, Inputs, ShardLayout
from stepmark.step.tree import build
from stepmark.step.workload import Kernel

MODELS = load_models()
INPUTS = Inputs(mbs=1, seq_len=1024)
Work = dict[tuple[str, Phase], int]


def layouts(model: ModelConfig) -> Iterator[ShardLayout]:
    """Every degree that divides the model, with and without sequence parallelism."""
    found = itertools.product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 8), (0, 1, 2), (True, False)
    )
    for tp, cp, pp, ep, etp, sequence in found:
        # ep and etp divide the ranks of tp, cp and dp_shard.
        axes = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, dp_shard=max(ep, 2))
        layout = ShardLayout(axes=axes, etp=etp, sequence_parallel=sequence)
        if ((ep > 1 or etp) and model.moe is None) or etp == tp or pp > model.num_layers:
            continue
        try:
            layout.check(model)
        except ConfigError:
            continue
        yield layout


def executed(model: ModelConfig, layout: ShardLayout) -> Iterator[tuple[str, Phase, int, int]]:
    """(role, phase, FLOPs of one rank, num_replicas) over the layers of all stages."""
    for stage in range(layout.axes.pp):
        for _, times, leaf in build(model, replace(layout, stage=stage), INPUTS).leaves():
            for one in leaf.work:
                if one.op.flops:
                    yield leaf.role, one.phase, times * one.op.flops, leaf.num_replicas


def over_ranks(model: ModelConfig, layout: ShardLayout) -> Work:
    """What all ranks do of one micro-batch per data rank, what replicas repeat counted once."""
    axes, found = layout.axes, dict[tuple[str, Phase], int]()
    ranks = axes.world_size // axes.pp  # of a stage
    for role, phase, flops, num_replicas in executed(model, layout):
        assert flops * ranks % num_replicas == 0
        found[role, phase] = found.get((role, phase), 0) + flops * ranks // num_replicas
    return found


def whole(model: ModelConfig, fused: frozenset[str], data_ranks: int) -> Work:
    alone = over_ranks(model, ShardLayout(fused=fused))
    return {key: flops * data_ranks for key, flops in alone.items()}


def is_conserved(model: ModelConfig, layout: ShardLayout) -> bool:
    return over_ranks(model, layout) == whole(model, layout.fused, layout.axes.data_ranks)


@pytest.mark.parametrize("name", MODELS)
def test_work_is_conserved_over_ranks(name: str) -> None:
    """Sample of the layouts; the slow test has all."""
    listed = list(layouts(MODELS[name]))
    assert len(listed) >= 6
    for layout in listed[::40]:
        assert is_conserved(MODELS[name], layout), layout


@pytest.mark.slow
def test_work_is_conserved_in_every_layout() -> None:
    count = 0
    for model in MODELS.values():
        for layout in layouts(model):
            fused = FUSED["megatron" if count % 2 else "train"]
            assert is_conserved(model, replace(layout, fused=fused)), (model.name, layout)
            count += 1
    assert count >= 2_500


@pytest.mark.parametrize("change", ["rows", "width", "replicas"])
def test_the_law_would_tell_wrong_work(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `op --model` had it before there was a tree: experts of full width on each rank."""
    # No framework has replicated rows of experts any more.
    monkeypatch.setattr(ShardLayout, "check", lambda _layout, _model: None)
    model = MODELS["mixtral-8x22b"]
    layout = ShardLayout(axes=ParallelConfig(tp=8, ep=8, dp_shard=8), sequence_parallel=False)
    found = list(executed(model, layout))
    right = sum(flops * 64 // num_replicas for _, _, flops, num_replicas in found)
    wrong = {
        "rows": sum(flops * (8 if role == "mlp.router" else 64) for role, _, flops, _ in found),
        "width": sum(
            flops * 64 * (8 if "experts" in role else 1) for role, _, flops, _ in found
        ),
        "replicas": sum(flops * 64 for _, _, flops, _ in found),
    }[change]
    expected = sum(whole(model, layout.fused, 8).values())
    assert right == expected
    assert (wrong == expected) is (change == "rows")


@pytest.mark.parametrize("fused", FUSED.values())
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name: str, fused: frozenset[str]) -> None:
    for model in (MODELS[name], MODELS[name].tiny()):
        root = build(model, ShardLayout(fused=fused), INPUTS)
        params = [(path, n, one) for path, n, leaf in root.leaves() for one in leaf.params]
        tied = model.head_params if model.tied_embeddings else 0
        assert sum(n * one.numel for _, n, one in params) - tied == model.num_params
        for unit in root.inside:
            assert len({one.name for one in unit.all_params}) == len(unit.all_params)
        paths = [path for path, _, leaf in root.leaves() if leaf.is_module]
        assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("name", MODELS)
def test_forward_products_are_two_flops_per_active_weight(name: str) -> None:
    model = replace(MODELS[name], seq_len=INPUTS.seq_len)
    work = whole(model, FUSED["train"], 1)
    others = (*SCANS, "attention.core", "attention.index_scores")
    products = {key: flops for key, flops in work.items() if key[0] not in others}
    forward = sum(flops for (_, phase), flops in products.items() if phase is Phase.FWD)
    assert forward == 2 * INPUTS.seq_len * model.num_active_matmul_params
    # The indexer's inputs are detached.
    detached = sum(
        flops
        for (role, phase), flops in products.items()
        if role.startswith("attention.index_") and phase is Phase.FWD
    )
    assert sum(products.values()) == 3 * forward - detached
    assert bool(detached) == (model.mla is not None and model.mla.indexer is not None)


SCANS = ("attention.scan", "attention.ssm_scan")


@pytest.mark.parametrize(
    ("name", "fused", "sums"),
    [("llama-3.1-8b", {"qkv"}, 0), ("llama-3.1-8b", set(), 2), ("deepseek-v3", {"qkv"}, 1)],
)
def test_gradients_of_an_input_that_several_products_have_are_added_up(
    name: str, fused: set[str], sums: int
) -> None:
    root = build(find_model(name), ShardLayout(fused=frozenset(fused)), INPUTS)
    layer = next(unit for unit in root.inside if unit.name.startswith("blocks"))
    (attention,) = (module for module in layer.inside if module.name == "attention")
    added = [
        item
        for leaf in attention.walk()
        for item in leaf.work
        if isinstance(item.op, Kernel) and item.op.name == "add"
    ]
    assert [item.phase for item in added] == [Phase.BWD] * sums
