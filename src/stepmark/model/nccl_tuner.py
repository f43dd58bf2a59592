"""Latency of a collective's hops by the constants of NCCL's tuner for its protocol LL.

Source: NVIDIA/nccl 2.30.7, src/graph/tuning.cc; microseconds. A domain of NVLink counts as one
host. Reductions in the network's switches (SHARP) are left out.
"""

from math import log2

from stepmark.model.collectives import Collective

RING_US = 6.6  # in addition to the hops
TREE_US = 6.8
_NVLINK_HOP_US = 0.6
_NETWORK_POST_US = 1.0  # of a rank inside a host that sends over the network
_RING_NETWORK_HOP_US = 2.7
_TREE_NETWORK_HOP_US = 5.0
_PAT_NETWORK_HOP_US = 14.0 / 3.5
_GATHERS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def ring_hops_us(num_ranks: int, num_hosts: int) -> float:
    """Return the latency of once around a ring."""
    hop_us = _NVLINK_HOP_US if num_hosts == 1 else _NETWORK_POST_US
    return (num_ranks - num_hosts) * hop_us + (num_hosts - 1) * _RING_NETWORK_HOP_US


def tree_hops_us(num_ranks: int, num_hosts: int) -> float:
    """Return the latency of an all-reduce up and down a binary tree of the hosts."""
    inside_us = (num_ranks / num_hosts - 1) * _NVLINK_HOP_US
    return 2 * (inside_us + log2(num_hosts) * _TREE_NETWORK_HOP_US)


def fewest_hops_us(collective: str, num_ranks: int, num_hosts: int) -> float:
    """Return the latency of the fastest algorithm that NCCL has for these ranks.

    All-reduce: ring or tree. Gathers: a ring, or with one GPU per host PAT (since NCCL 2.23),
    without the 2.8 us per rank that the tuner adds for its implementation. Others: one hop, as
    a broadcast is a pipeline along a ring, and sends to several peers run at the same time.
    """
    if collective == Collective.ALL_REDUCE:
        ring_us = 2 * ring_hops_us(num_ranks, num_hosts)
        return min(ring_us, tree_hops_us(num_ranks, num_hosts))
    if collective not in _GATHERS:
        return ring_hops_us(2, min(num_hosts, 2))
    ring_us = ring_hops_us(num_ranks, num_hosts)
    if num_hosts < num_ranks:
        return ring_us
    return min(ring_us, log2(num_hosts) * _PAT_NETWORK_HOP_US)
