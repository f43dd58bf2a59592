"""Latency of a collective's hops by the constants of NCCL's tuner for its protocol LL.

Source: NVIDIA/nccl 2.30.7, src/graph/tuning.cc; microseconds. A domain of NVLink counts as one
host. Reductions in the network's switches (SHARP) are left out.
"""

from math import ceil, log2

from stepmark.model.collectives import ALL_TO_ALLS, GATHERS, Collective

RING_US = 6.6  # in addition to the hops
TREE_US = 6.8
_NVLINK_HOP_US = 0.6
_NETWORK_POST_US = 1.0  # of a rank inside a host that sends over the network
_RING_NETWORK_HOP_US = 2.7
_TREE_NETWORK_HOP_US = 5.0
_PAT_US = 8.0
_PAT_NETWORK_HOP_US = 14.0 / 3.5
_PAT_RANK_US = 2.8
_PEERS = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH


def ring_hops_us(num_ranks: int, num_hosts: int) -> float:
    """Return the latency of once around a ring. One GPU per host has the hops of a tree."""
    hop_us = _NVLINK_HOP_US if num_hosts == 1 else _NETWORK_POST_US
    is_apart = num_hosts == num_ranks
    network_hop_us = _TREE_NETWORK_HOP_US if is_apart else _RING_NETWORK_HOP_US
    return (num_ranks - num_hosts) * hop_us + (num_hosts - 1) * network_hop_us


def tree_hops_us(num_ranks: int, num_hosts: int) -> float:
    """Return the latency of an all-reduce up and down a binary tree of the hosts."""
    inside_us = (num_ranks / num_hosts - 1) * _NVLINK_HOP_US
    return 2 * (inside_us + log2(num_hosts) * _TREE_NETWORK_HOP_US)


def latency_us(
    collective: str,
    num_ranks: int,
    num_hosts: int,
    ring_us: float = 0.0,
    tree_us: float = 0.0,
) -> float:
    """Return the latency of the fastest algorithm that NCCL has for these ranks.

    ring_us, tree_us: more latency of the hops once around a ring, and up a tree.

    All-reduce: ring or tree. Gathers: a ring, or with one GPU per host PAT (since NCCL 2.23).
    Others: one hop, as a broadcast is a pipeline along a ring; of all-to-alls one for every
    eight ranks, because NCCL sends to so many peers at the same time.
    """
    if collective == Collective.ALL_REDUCE:
        ring_us = RING_US + 2 * (ring_hops_us(num_ranks, num_hosts) + ring_us)
        return min(ring_us, TREE_US + tree_hops_us(num_ranks, num_hosts) + 2 * tree_us)
    if collective not in GATHERS:
        hop_us = _TREE_NETWORK_HOP_US if num_hosts > 1 else _NVLINK_HOP_US
        rounds = ceil(num_ranks / _PEERS) if collective in ALL_TO_ALLS else 1
        return RING_US + rounds * (hop_us + tree_us)
    ring_us += RING_US + ring_hops_us(num_ranks, num_hosts)
    if num_hosts < num_ranks:
        return ring_us
    pat_us = _PAT_US + log2(num_hosts) * _PAT_NETWORK_HOP_US + num_ranks * _PAT_RANK_US
    return min(ring_us, pat_us + tree_us)
