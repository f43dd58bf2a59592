"""What torch.distributed can run, as far as can be told beforehand. Without torch: plans are
made in processes that do not load it."""

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.comm_case import CommCase

_COALESCED = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
_POINT_TO_POINT = (
    Collective.SENDRECV,
    Collective.P2P,
    Collective.P2P_BOTH,
    Collective.PING_PONG,
    Collective.INCAST,
    Collective.MULTICAST,
)


def unsupported(case: CommCase) -> str | None:
    """Why torch.distributed cannot run this case, as far as can be told beforehand."""
    if case.dtype in ("uint32", "uint64"):
        return f"{case.dtype} is no type of torch.distributed; use --api nccl"
    if case.calls_per_group > 1 and case.collective not in _COALESCED:
        return f"torch.distributed groups {', '.join(_COALESCED)} only; use --api nccl"
    return _not_of_gloo(case) if case.backend == "gloo" else None


def _not_of_gloo(case: CommCase) -> str | None:
    if case.dtype.is_fp8 and case.collective not in _POINT_TO_POINT:
        return "gloo has no fp8 collectives"
    if case.redop is RedOp.MULSUM or (case.redop is RedOp.AVG and case.dtype.is_integer):
        return f"gloo has no {case.redop} of {case.dtype}"
    if case.calls_per_group > 1:
        return "gloo does not issue several calls as one"
    return None
