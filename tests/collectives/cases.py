"""Cases of collectives on a CPU, as tests need them."""

from typing import Any

from stepmark.cases.comm_case import CommCase
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import FACTS, Api, Collective, RedOp, placements, trimmed_count


def case_of(
    collective: Collective = Collective.ALL_REDUCE,
    size: int = 4096,
    dtype: DType = DType.FP32,
    **more: Any,
) -> CommCase:
    """`size` bytes among four ranks, or the two of a pair, unless told otherwise."""
    facts = FACTS[collective]
    is_barrier = collective is Collective.BARRIER
    given: dict[str, Any] = {
        "num_ranks": 2 if facts.pair else 4,
        "world_size": 4,
        "redop": RedOp.SUM if facts.reduces else RedOp.NONE,
        "root": 1 if facts.rooted else -1,
        "pair": (0, 1) if facts.pair else None,
        "spread": 0.5 if collective is Collective.ALL_TO_ALL_V else None,
        "in_place": placements(collective, Api.TORCH)[0],
        "backend": "gloo",
        "device": "cpu",
        **more,
    }
    count = trimmed_count(collective, size, dtype.itemsize, given["num_ranks"])
    return CommCase(
        collective=collective, count=0 if is_barrier else count, dtype=dtype, **given
    )


def in_every_form(**more: Any) -> list[CommCase]:
    """Every collective in and out of place, as torch offers it."""
    return [
        case_of(one, in_place=in_place, **more)
        for one in Collective
        for in_place in placements(one, Api.TORCH)
    ]
