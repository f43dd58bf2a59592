"""Context parallelism: the tokens of each sequence divided over ranks.

As Llama 3 does it (arXiv:2407.21783, section 3.3.2). Each of n ranks holds two of 2 * n chunks,
one from the head and one from the tail, so that all have as many pairs of query and key.
Every attention gathers the keys and values of all ranks, in one message; backward their
gradients are summed and scattered, in the dtype that they have.

B batch, T tokens of this rank, S of all ranks, H query heads, K key and value heads, D head
width, E head width of values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stepmark.bench.training.attention import Attention, LatentAttention, causal_attention
from stepmark.bench.training.mesh import SequenceShard
from stepmark.bench.training.transformer import Embedding, Transformer

# torch 2.13 has a new name for it, torch 2.11 only the old one.
_all_gather: Callable[[Tensor, int, Any], Tensor] = getattr(
    collectives, "all_gather_single_autograd", None
) or getattr(collectives, "all_gather_tensor_autograd")  # noqa: B009


def apply(model: Transformer, mesh: DeviceMesh) -> None:
    """Make a Transformer work on this rank's tokens, in place: positions and attention."""
    share = SequenceShard(rank=mesh.get_local_rank(), num_ranks=mesh.size())
    gathered = Gathered(mesh.get_group(), share)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.attend = gathered
        if isinstance(module, Transformer | Embedding):
            module.own_rows = partial(share.of, dim=0)


class Gathered:
    """Causal attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, group: dist.ProcessGroup, share: SequenceShard) -> None:
        self._group, self._num_ranks, self._chunks = group, share.num_ranks, share.chunks

    def __call__(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, kernel: str) -> Tensor:
        k_BSKD, v_BSKE = self._whole(k_BTKD, v_BTKE)
        length = q_BTHD.shape[1] // 2
        parts: list[Tensor] = []
        for chunk, q in zip(self._chunks, q_BTHD.chunk(2, dim=1), strict=True):
            end = (chunk + 1) * length
            parts.append(causal_attention(q, k_BSKD[:, :end], v_BSKE[:, :end], kernel))
        return torch.cat(parts, dim=1)

    def _whole(self, k_BTKD: Tensor, v_BTKE: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of all ranks, in the order of the sequence."""
        sent = torch.cat((k_BTKD, v_BTKE), dim=-1)
        by_rank = _all_gather(sent, 0, self._group).unflatten(0, (self._num_ranks, -1))
        heads, tails = by_rank.unflatten(2, (2, -1)).unbind(2)
        whole = torch.cat((*heads.unbind(0), *reversed(tails.unbind(0))), dim=1)
        parts: tuple[Tensor, ...] = whole.split((k_BTKD.shape[-1], v_BTKE.shape[-1]), dim=-1)
        return parts
