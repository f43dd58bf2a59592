"""The recommender's step against what facebookresearch/dlrm sent, and its own laws."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import EmbeddingBag, Gemm, Phase
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.workloads.rules.dlrm import Dlrm, workload

DATA = Path(__file__).parents[2] / "data" / "dlrm"


def settings(tables: int, batch: int = 64) -> Dlrm:
    return Dlrm(
        arch_embedding_size="-".join(["1000"] * tables),
        arch_sparse_feature_size=16,
        arch_mlp_bot="24-512-1024-16",
        arch_mlp_top="1024-1024-512-1",
        mini_batch_size=batch,
        num_indices_per_lookup=3,
    )


def comms(made: Workload) -> list[CommOp]:
    return [item for item in made.expand() if isinstance(item, CommOp)]


@pytest.mark.parametrize(("tables", "ranks"), [(4, 2), (5, 2), (8, 4)])
def test_messages_are_those_of_the_real_one(tables: int, ranks: int) -> None:
    made = workload(settings(tables), ranks)
    made.check()
    group = made.groups["world"]
    found = [
        [
            one.collective,
            one.dtype,
            group.size,
            one.phase,
            one.call_bytes(),
            one.message_bytes(group),
        ]
        for one in comms(made)
    ]
    assert found == json.loads((DATA / f"tables{tables}.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_gradient_of_the_mlps_is_reduced_once(ranks: int) -> None:
    made = workload(settings(4), ranks)
    reduced = sum(one.count for one in comms(made) if one.collective == "all_reduce")
    widths = (settings(4).bottom, settings(4).top)
    weights = sum(a * b + b for one in widths for a, b in pairwise(one))
    assert reduced == (weights if ranks > 1 else 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_products_over_all_ranks_are_those_of_the_whole_batch(ranks: int) -> None:
    flops: dict[Phase, int] = {}
    for item in workload(settings(4), ranks).expand():
        if isinstance(item, ComputeOp) and isinstance(item.op, Gemm):
            flops[item.phase] = flops.get(item.phase, 0) + ranks * item.op.flops
    widths = (settings(4).bottom, settings(4).top)
    pairs = [pair for one in widths for pair in pairwise(one)]
    forward = 2 * 64 * sum(a * b for a, b in pairs)
    first = 2 * 64 * 24 * 512  # its input needs no gradient
    assert flops == {
        Phase.FWD: forward,
        Phase.WGRAD: forward,
        Phase.DGRAD: forward - first,
    }


def test_lookups_are_of_own_tables_and_all_samples() -> None:
    made = workload(settings(8), 4)
    bags = [
        item.op
        for item in made.expand()
        if isinstance(item, ComputeOp) and isinstance(item.op, EmbeddingBag)
    ]
    assert [bag.phase for bag in bags] == [Phase.FWD, Phase.FWD, Phase.BWD, Phase.BWD]
    assert all((bag.batch, bag.pooling, bag.rows) == (64, 3, 1000) for bag in bags)


def test_uneven_tables_are_said() -> None:
    assert workload(settings(4), 2).notes == ()
    assert "5 tables on 2 ranks" in workload(settings(5), 2).notes[0]


@pytest.mark.parametrize(
    ("changed", "ranks", "said"),
    [
        ({"arch_mlp_bot": "4-x-2"}, 1, "arch_mlp_bot 4-x-2"),
        ({"arch_mlp_bot": "4-3"}, 1, r"it must end in arch_sparse_feature_size \(2\)"),
        ({"arch_embedding_size": "4--2"}, 1, "arch_embedding_size"),
        ({"mini_batch_size": 0}, 1, "mini_batch_size 0"),
        ({"mini_batch_size": 3}, 2, "a multiple of 2 ranks"),
        ({"mini_batch_size": 4}, 4, r"at most one rank per table \(3\)"),
    ],
)
def test_bad_input_is_one_line(changed: Mapping[str, object], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        workload(Dlrm(**changed), ranks)  # type: ignore[arg-type]
