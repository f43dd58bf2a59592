"""What test_two_hops runs on gloo ranks: tokens that are routed, over two hops and back."""

import torch
import torch.distributed as dist
from torch import Tensor

from stepmark.measuring.ranks import Ranks
from stepmark.model.routing import Routing


def routes(routing: Routing, num_tokens: int, seed: int) -> Tensor:
    """Return the experts of tokens, as megatron-core's group_limited_topk chooses them."""
    scores_NE = torch.rand(
        num_tokens, routing.num_experts, generator=torch.Generator().manual_seed(seed)
    )
    if routing.top_groups < routing.num_groups:
        by_group_NGE = scores_NE.unflatten(1, (routing.num_groups, -1))
        counted = routing.top_k // routing.top_groups
        sums_NG = by_group_NGE.topk(counted, dim=-1).values.sum(dim=-1)
        best_NG = sums_NG.topk(routing.top_groups, dim=-1).indices
        mask_NG = torch.zeros_like(sums_NG).scatter_(1, best_NG, 1.0).bool()
        scores_NE = by_group_NGE.masked_fill(~mask_NG.unsqueeze(-1), -1.0).flatten(1)
    return scores_NE.topk(routing.top_k, dim=-1).indices


def send(rows: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Send a tensor of whole numbers to each rank of a group; return what each sent."""
    width = rows[0].shape[1]
    counts = torch.tensor([len(each) for each in rows])
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    out = torch.empty(int(received.sum()), width, dtype=torch.int64)
    splits = received.tolist()
    dist.all_to_all_single(out, torch.cat(rows), splits, counts.tolist(), group=group)
    return [*out.split(splits)]


def two_hops(
    ranks: Ranks, routing: Routing, gpus_per_host: int, num_tokens: int
) -> tuple[list[int], list[int], int, bool, bool]:
    """Route tokens of this rank over two hops, and bring back the sum of their experts.

    Return rows sent to each host and to each GPU of the own one, rows received, whether they
    are those that have experts here, and whether each token gets the sum of its experts.
    """
    size = ranks.num_ranks
    num_hosts = size // gpus_per_host
    members = torch.arange(size).view(num_hosts, gpus_per_host)
    across, inside = members.T.tolist(), members.tolist()
    groups = {tuple(each): dist.new_group(each) for each in (*across, *inside)}
    host, gpu = divmod(ranks.rank, gpus_per_host)
    network, nvlink = groups[tuple(across[gpu])], groups[tuple(inside[host])]
    experts_NK = routes(routing, num_tokens, seed=ranks.rank)
    owners_NK = experts_NK * size // routing.num_experts
    # A row is its sender, its number there, and its experts.
    numbers_N = torch.arange(num_tokens)
    senders_N = torch.full_like(numbers_N, ranks.rank)
    rows = torch.cat([senders_N[:, None], numbers_N[:, None], experts_NK], dim=1)
    to_hosts = [
        rows[(owners_NK // gpus_per_host == each).any(dim=1)] for each in range(num_hosts)
    ]
    passed = send(to_hosts, network)
    joined = torch.cat(passed)
    owners = joined[:, 2:] * size // routing.num_experts
    to_gpus = [
        joined[(owners == host * gpus_per_host + each).any(dim=1)]
        for each in range(gpus_per_host)
    ]
    received = send(to_gpus, nvlink)
    arrived = torch.cat(received)
    # Each expert adds one more than its number.
    own = arrived[:, 2:] * size // routing.num_experts == ranks.rank
    results = torch.cat([arrived[:, :2], ((arrived[:, 2:] + 1) * own).sum(1, True)], dim=1)
    back = torch.cat(send([*results.split([len(each) for each in received])], nvlink))
    sums = {(int(s), int(n)): 0 for s, n in joined[:, :2]}
    for sender, number, value in back.tolist():
        sums[sender, number] += value
    reduced = torch.tensor([[s, n, value] for (s, n), value in sums.items()])
    by_host = [reduced[torch.isin(reduced[:, 0], each[:, 0].unique())] for each in passed]
    total_N = torch.zeros(num_tokens, dtype=torch.int64)
    for each in send(by_host, network):
        total_N.index_add_(0, each[:, 1], each[:, 2])
    expected = torch.cat(
        [
            torch.stack([torch.full_like(numbers, sender), numbers], dim=1)
            for sender in range(size)
            for numbers in [
                torch.nonzero(
                    (
                        routes(routing, num_tokens, sender) * size // routing.num_experts
                        == ranks.rank
                    ).any(dim=1)
                ).flatten()
            ]
        ]
    )
    is_right = sorted(map(tuple, arrived[:, :2].tolist())) == sorted(
        map(tuple, expected.tolist())
    )
    is_summed = total_N.equal((experts_NK + 1).sum(dim=1))
    return (
        [len(each) for each in to_hosts],
        [len(each) for each in to_gpus],
        len(arrived),
        is_right,
        is_summed,
    )
