"""Cases of collectives, one for each field that a case can have."""

from stepmark.cases.comm_case import CommCase
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Api, Collective, Mode, RedOp

PLAIN = CommCase(
    collective=Collective.ALL_REDUCE,
    count=2**18,
    dtype=DType.FP32,
    num_ranks=8,
    world_size=8,
    redop=RedOp.SUM,
    in_place=True,
)
EIGHT = {"num_ranks": 8, "world_size": 8}
A_TO_A_V = {"collective": Collective.ALL_TO_ALL_V, "dtype": DType.BF16, **EIGHT}
PAIR = {"num_ranks": 2, "world_size": 8, "pair": (3, 1), "dtype": DType.FP32}
REDUCE = {"redop": RedOp.SUM, "dtype": DType.FP32, "in_place": True, **EIGHT}
MATRIX = ((16, 0, 32), (8, 24, 0), (0, 0, 8))

SAMPLES: dict[str, CommCase] = {
    "all_reduce": PLAIN,
    "nccl": CommCase(collective=Collective.ALL_REDUCE, count=77, api=Api.NCCL, **REDUCE),
    "out_of_place": CommCase(
        collective=Collective.ALL_REDUCE,
        count=77,
        api=Api.NCCL,
        dtype=DType.FP32,
        redop=RedOp.MULSUM,
        **EIGHT,
    ),
    "mean": CommCase(
        collective=Collective.REDUCE_SCATTER,
        count=1024,
        dtype=DType.FP8_E4M3,
        redop=RedOp.AVG,
        **EIGHT,
    ),
    "reduce": CommCase(collective=Collective.REDUCE, count=64, root=5, **REDUCE),
    "broadcast": CommCase(
        collective=Collective.BROADCAST,
        count=64,
        root=0,
        in_place=True,
        dtype=DType.UINT8,
        **EIGHT,
    ),
    "gather": CommCase(
        collective=Collective.GATHER, count=64, root=7, dtype=DType.INT64, **EIGHT
    ),
    "incast": CommCase(
        collective=Collective.INCAST, count=64, root=2, dtype=DType.FP16, **EIGHT
    ),
    "all_to_all": CommCase(
        collective=Collective.ALL_TO_ALL, count=64, dtype=DType.BF16, **EIGHT
    ),
    "spread": CommCase(count=1024, spread=0.3, **A_TO_A_V),
    "full_spread": CommCase(count=1024, spread=1.0, **A_TO_A_V),
    "even": CommCase(count=1024, spread=0.0, **A_TO_A_V),
    "matrix": CommCase(
        collective=Collective.ALL_TO_ALL_V,
        count=0,
        dtype=DType.BF16,
        num_ranks=3,
        world_size=8,
        matrix=MATRIX,
        matrix_file="parts.txt",
    ),
    "p2p": CommCase(collective=Collective.P2P, count=2**24, **PAIR),
    "p2p_both": CommCase(collective=Collective.P2P_BOTH, count=2**24, **PAIR),
    "ping_pong": CommCase(collective=Collective.PING_PONG, count=2, **PAIR),
    "barrier": CommCase(collective=Collective.BARRIER, count=0, dtype=DType.UINT8, **EIGHT),
    "graph": CommCase(collective=Collective.ALL_REDUCE, count=9, mode=Mode.GRAPH, **REDUCE),
    "free": CommCase(
        collective=Collective.ALL_GATHER,
        count=1024,
        mode=Mode.BLOCKING,
        aligned=False,
        dtype=DType.FP64,
        **EIGHT,
    ),
    "first_ranks": CommCase(
        collective=Collective.ALL_GATHER, count=64, dtype=DType.FP32, num_ranks=4, world_size=8
    ),
    "split": CommCase(
        collective=Collective.SENDRECV,
        count=64,
        dtype=DType.FP32,
        num_ranks=4,
        world_size=8,
        split="mod 2",
    ),
    "grouped": CommCase(
        collective=Collective.ALL_REDUCE, count=1, calls_per_group=16, **REDUCE
    ),
    "skew": CommCase(collective=Collective.ALL_REDUCE, count=1, skew_s=50e-6, **REDUCE),
    "odd_skew": CommCase(
        collective=Collective.ALL_REDUCE, count=1, skew_s=12345.678e-6, **REDUCE
    ),
    "ctas": CommCase(collective=Collective.ALL_REDUCE, count=1, max_ctas=4, **REDUCE),
    "beside": CommCase(
        collective=Collective.ALL_REDUCE, count=1, beside="gemm:8192x4096x512", **REDUCE
    ),
    "cpu": CommCase(
        collective=Collective.ALL_REDUCE, count=1, backend="gloo", device="cpu", **REDUCE
    ),
    "gloo_on_cuda": CommCase(
        collective=Collective.ALL_REDUCE, count=1, backend="gloo", **REDUCE
    ),
}
