"""Products of tp in pieces that are sent: nothing is lost; some collectives stay whole."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stepmark.cases.message import RECV, SEND
from stepmark.cases.training import Recompute
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, Phase
from stepmark.step.rank_program import check_ends
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.workloads.rules.pytorch import rule

from .jobs import ALONE, DENSE, FSDP, bus_bytes, generated, make, matmul_flops

BIASED = replace(DENSE, qkv_bias=True)


def whole_and_in_pieces(
    model: ModelConfig = DENSE, *, tp: int = 4, **settings: Any
) -> tuple[Workload, Workload]:
    job = make(model, tp=tp)
    whole, pieces = (
        rule.workload(job, ALONE(async_tp=is_async, **settings)) for is_async in (False, True)
    )
    pieces.check()
    check_ends(pieces)
    return whole, pieces


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL, Recompute.OPS])
def test_pieces_are_the_same_work_and_bytes(tp: int, recompute: Recompute) -> None:
    """A gather or a scatter over n ranks sends n - 1 parts of n, as so many copies do."""
    whole, pieces = whole_and_in_pieces(tp=tp, recompute=recompute)
    assert matmul_flops(pieces) == matmul_flops(whole)

    def sent(made: Workload) -> float:
        return bus_bytes(made, lambda op: op.collective != RECV)

    assert sent(pieces) == pytest.approx(sent(whole), rel=1e-12)
    assert any(op.collective == SEND for op in comms(pieces))


def comms(made: Workload) -> list[CommOp]:
    return [op for op in made.expand() if isinstance(op, CommOp)]


def collectives(made: Workload) -> Counter[tuple[str, str, str]]:
    """Of tp in one layer: (collective, pass, module)."""
    return Counter(
        (op.collective, str(op.phase), op.module)
        for op in comms(made)
        if op.layer == 0 and op.collective not in (SEND, RECV)
    )


SCATTER = ("reduce_scatter", "bwd", "mlp.norm")
QKV = ("reduce_scatter", "bwd", "attention.norm")
GATHER = ("all_gather", "fwd", "attention.norm")


@pytest.mark.parametrize(
    ("model", "settings", "left"),
    [
        # gate and up are two products, whose gradients are added up before they are scattered.
        (DENSE, {}, [SCATTER]),
        (DENSE, {"fuse_qkv": False}, [SCATTER, QKV]),
        (replace(DENSE, activation="gelu"), {}, []),
        # A product with a bias is addmm, which micro_pipeline_tp does not match.
        (BIASED, {}, [SCATTER, GATHER]),
    ],
    ids=["fused", "apart", "gelu", "bias"],
)
def test_collectives_stay_whole_where_torch_finds_no_product(
    model: ModelConfig, settings: dict[str, Any], left: list[tuple[str, str, str]]
) -> None:
    _, pieces = whole_and_in_pieces(model, **settings)
    assert collectives(pieces) == Counter(left)


def test_the_end_of_the_model_is_not_compiled_with_a_block() -> None:
    whole, pieces = whole_and_in_pieces()
    ends = [
        [op for op in comms(made) if op.layer is None and op.phase is not Phase.OPTIM]
        for made in (whole, pieces)
    ]
    assert ends[0] == ends[1] != []


def test_pieces_wait_for_the_copies_of_their_rows() -> None:
    """The own rows come first; the last piece waits for the newest copy."""
    _, pieces = whole_and_in_pieces(tp=4)
    block = pieces.blocks["block.fwd"]
    products = [op for op in block if isinstance(op, ComputeOp) and isinstance(op.op, Gemm)]
    gathered = [op.after for op in products if op.module == "attention.qkv"]
    assert gathered == [(), ("tp_copy~1",), ("tp_copy~1",), ("tp_copy",)]
    (total,) = [op for op in block if op.module == "attention.out" and op.after == ("tp_copy",)]
    assert isinstance(total, ComputeOp)
    rows = DENSE.seq_len * 2 * DENSE.hidden_size // 4  # of two sequences, in bf16
    assert total.op.bytes_moved == 5 * 2 * rows


def test_fsdp_has_the_same_messages_of_weights() -> None:
    job = make(tp=2, dp_shard=2)
    whole, pieces = (generated(job, async_tp=is_async) for is_async in (False, True))
    for made in (whole, pieces):
        assert made.groups.keys() == {"fsdp", "tp"}
    weights = [[op for op in comms(made) if op.group == "fsdp"] for made in (whole, pieces)]
    assert weights[0] == weights[1]
    assert FSDP().async_tp is False
