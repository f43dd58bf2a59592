"""Messages of DeepEP's normal kernels, which Megatron-LM's flex dispatcher calls.

A token goes once to each host that has one of its experts, over the network to the GPU with the
sender's place in its host, and from there once to each GPU of that host that has one, over
NVLink. What comes back is summed on the way: by that GPU, and by the sender. Within one host
there is the second hop alone.

Sources: deepseek-ai/DeepEP v1.2.1, csrc/kernels/internode.cu (get_num_bytes_per_token,
notify_dispatch, dispatch, combine), csrc/kernels/intranode.cu, csrc/kernels/launch.cuh and
configs.cuh, deep_ep/buffer.py (get_dispatch_config); megatron-core 0.16.1,
transformer/moe/fused_a2a.py (FusedDispatch, FusedCombine). Read only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepmark.ground.dtypes import DType
from stepmark.model.layers import MoeConfig
from stepmark.model.routing import Routing
from stepmark.step.workload import Group
from stepmark.workloads.rules.megatron.settings import (
    DispatchDtype,
    Dispatcher,
    FlexBackend,
    Megatron,
)

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan

ACROSS_HOSTS = "ep_internode"
IN_HOST = "ep_intranode"
GPUS_PER_HOST = 8  # NUM_MAX_NVL_PEERS
SCALED = 128  # elements with one fp32 scale of FP8 rows
_NUM_GPUS = (2, 4, 8)  # of a host: SWITCH_RANKS
_NUM_HOSTS = (2, 3, 4, 6, 8, 12, 16, 18, 20)  # SWITCH_RDMA_RANKS
_MOST_CHOSEN = 32  # experts of a token: num_topk <= 32
_MOST_LOCAL_EXPERTS = 1024  # NUM_MAX_LOCAL_EXPERTS
_ALIGNMENT = 16  # of a row across hosts: sizeof(int4)
_SOURCE_META = 8  # bytes: the sender's host, and a bit for each GPU of the receiver's
_ROW_BUFFER = 16384 - 8  # kNumTMABytesPerWarp of internode.cu, less a barrier
_HALF_ROW_BUFFER = 8192 - 8  # of intranode.cu
_INT = 4
_INT64 = 8
_FP32 = 4

Refusal = tuple[object, str, object, str]  # of job.refuse_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """The hops of tokens between the ranks of experts, their tp included.

    host_share, rank_share: of all tokens that go to a host, and to a rank. num_local_experts:
    of a rank. chosen: experts of a token; each counts once for every rank of its tp.
    """

    num_hosts: int
    gpus_per_host: int
    num_local_experts: int
    chosen: int
    host_share: float
    rank_share: float

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.gpus_per_host

    def rows(self, tokens: int) -> dict[str, float]:
        """Return the rows for each rank of a hop's group by its name, in a dispatch's order.

        tokens: of a sender. The second hop sends on what came from all hosts.
        """
        across = {ACROSS_HOSTS: tokens * self.host_share} if self.num_hosts > 1 else {}
        return {**across, IN_HOST: self.num_hosts * tokens * self.rank_share}

    def received(self, tokens: int) -> int:
        """Return the rows that a rank has after a dispatch of so many tokens of each rank."""
        return math.ceil(self.num_ranks * tokens * self.rank_share)

    def counts(self) -> dict[str, int]:
        """Return the 32-bit numbers of rows that ranks tell each other before, by hop."""
        if self.num_hosts == 1:
            return {IN_HOST: 1 + self.num_local_experts}
        of_host = self.gpus_per_host * self.num_local_experts
        return {
            ACROSS_HOSTS: self.gpus_per_host + of_host + 1,
            IN_HOST: self.num_hosts + self.num_local_experts,
        }

    def row_bytes(
        self, num_bytes: int, *, scales: int = 0, indices: int = 0, weights: int = 0
    ) -> int:
        """Return the bytes of a row with what belongs to it.

        num_bytes: of its elements. scales: of FP8. indices, weights: of the token's experts.
        """
        row = num_bytes + _FP32 * (scales + weights)
        if self.num_hosts == 1:
            return row + _INT + _INT64 * indices
        row += _SOURCE_META + _INT * indices
        return -(-row // _ALIGNMENT) * _ALIGNMENT


def hops_of(
    moe: MoeConfig, settings: Megatron, *, ep: int, etp: int, imbalance: float
) -> Hops | None:
    """Return the hops of the flex dispatcher; None: another one exchanges tokens.

    imbalance: rows of the fullest rank over the mean, which its host has, too, as far as there
    are tokens for it.
    """
    if settings.moe_token_dispatcher_type is not Dispatcher.FLEX:
        return None
    num_ranks = ep * etp
    gpus = min(settings.moe_deepep_gpus_per_host, num_ranks)
    routing = Routing(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
    )
    num_hosts = num_ranks // gpus
    return Hops(
        num_hosts=num_hosts,
        gpus_per_host=gpus,
        num_local_experts=moe.num_experts // ep,
        chosen=etp * moe.top_k,
        # Hosts that hold ranks of the same experts have the same tokens.
        host_share=min(1.0, imbalance * routing.share(min(num_hosts, ep))),
        rank_share=min(1.0, imbalance * routing.share(ep)),
    )


def groups_of(hops: Hops) -> dict[str, Group]:
    """Return the groups of the hops: ranks of a host, and those of one place on all hosts."""
    gpus = hops.gpus_per_host
    groups = {IN_HOST: Group(digits=((gpus, 1),))}
    if hops.num_hosts > 1:
        groups[ACROSS_HOSTS] = Group(digits=((hops.num_hosts, gpus),))
    return groups


def refusals(plan: "Plan") -> Iterator[Refusal]:
    """Yield what Megatron-LM and DeepEP refuse, and what is not modelled."""
    settings = plan.settings
    moe = plan.model.moe
    name = "moe_token_dispatcher_type"
    flex = settings.moe_token_dispatcher_type
    if flex is not Dispatcher.FLEX:
        return
    if moe is None:
        yield True, name, flex, "alltoall for a model without experts"
        return
    backend = settings.moe_flex_dispatcher_backend
    is_other = backend is not FlexBackend.DEEPEP
    allowed = "deepep: the messages of HybridEP are not modelled"
    yield is_other, "moe_flex_dispatcher_backend", backend, allowed
    factor = settings.moe_expert_capacity_factor
    allowed = f"left out with {name} flex (which hosts dropped tokens reach is not modelled)"
    yield factor is not None, "moe_expert_capacity_factor", factor, allowed
    yield (
        plan.job.dtype is not DType.BF16,
        "dtype",
        plan.job.dtype,
        "bf16 with DeepEP's combine",
    )
    yield from _rank_refusals(plan, moe)
    yield from _row_refusals(plan, moe)


def _rank_refusals(plan: "Plan", moe: MoeConfig) -> Iterator[Refusal]:
    """Yield numbers of ranks and experts that DeepEP has no kernels for."""
    name = "ep"
    ep = plan.job.parallel.ep
    gpus = plan.settings.moe_deepep_gpus_per_host
    num_ranks = plan.etp * ep
    words = "such that ep x expert tp is"
    yield num_ranks == 1, name, ep, f"{words} above 1 with the flex dispatcher"
    num_hosts, rest = divmod(num_ranks, gpus)
    fits = num_ranks in _NUM_GPUS if num_hosts < 2 else not rest and num_hosts in _NUM_HOSTS
    sizes = [count for count in _NUM_GPUS if count < gpus]
    sizes += [gpus * count for count in (1, *_NUM_HOSTS)]
    yield not fits, name, ep, f"{words} one of {', '.join(map(str, sizes))} with DeepEP"
    straddles = gpus % plan.etp and plan.etp % gpus
    allowed = f"a divisor or multiple of the GPUs of a host ({gpus}) with the flex dispatcher"
    yield straddles, "expert_tensor_parallel_size", plan.etp, allowed
    local = moe.num_experts // ep
    most = _MOST_LOCAL_EXPERTS
    yield local > most, name, ep, f"such that a rank has at most {most} experts with DeepEP"


def _row_refusals(plan: "Plan", moe: MoeConfig) -> Iterator[Refusal]:
    """Yield routings and widths that DeepEP has no kernels for."""
    chosen = plan.etp * moe.top_k
    allowed = f"at most {_MOST_CHOSEN // plan.etp} with DeepEP (expert tp {plan.etp})"
    yield chosen > _MOST_CHOSEN, "top-k", moe.top_k, allowed
    has_few = moe.top_k < moe.top_groups < moe.num_groups
    yield has_few, "top-groups", moe.top_groups, f"at most top-k ({moe.top_k})"
    of_groups = moe.top_groups * moe.num_experts // moe.num_groups
    allowed = f"at most the experts of the groups of a token ({of_groups})"
    yield moe.top_k > of_groups, "top-k", moe.top_k, allowed
    hops = plan.hops
    assert hops is not None
    width = plan.routed_width
    num_bytes = width * DType.BF16.itemsize
    if hops.num_hosts == 1:
        multiple = 2 * _ALIGNMENT // DType.BF16.itemsize
        is_wide = num_bytes // 2 > _HALF_ROW_BUFFER
    else:
        multiple = 32 * _ALIGNMENT // DType.BF16.itemsize
        row = hops.row_bytes(num_bytes, indices=hops.chosen, weights=hops.chosen)
        is_wide = row > _ROW_BUFFER
    is_odd = width % multiple
    yield is_odd, "hidden-size", width, f"a multiple of {multiple} with DeepEP's kernels"
    yield (
        is_wide,
        "hidden-size",
        width,
        "one whose rows fit the shared memory of DeepEP's warps",
    )
    is_fp8 = plan.settings.dispatch_dtype is DispatchDtype.FP8
    allowed = f"bf16 where {SCALED} does not divide the width of rows ({width})"
    yield is_fp8 and width % SCALED, "dispatch_dtype", DispatchDtype.FP8, allowed
