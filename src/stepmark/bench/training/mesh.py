"""Which ranks work together along which axis: one device mesh for a case."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepmark.core.parallel import ParallelConfig
from stepmark.core.train_case import TrainCase

# Outermost first: ranks that talk most are neighbours.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Where a rank stands."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    data_rank: int  # which micro-batch it works on


def coordinates_of(rank: int, parallel: ParallelConfig) -> RankCoordinates:
    """Coordinates of a rank, the last axis running fastest."""
    coordinates: dict[str, int] = {}
    for axis in reversed(AXES):
        size = getattr(parallel, axis)
        coordinates[axis] = rank % size
        rank //= size
    data_rank = coordinates["dp_replicate"] * parallel.dp_shard + coordinates["dp_shard"]
    return RankCoordinates(**coordinates, data_rank=data_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShard:
    """Which tokens of a sequence are a rank's, where context parallelism divides it.

    One part from the head and one from the tail, so that all see as many keys.
    """

    rank: int
    num_ranks: int

    @property
    def chunks(self) -> tuple[int, int]:
        """Of twice as many as there are ranks."""
        return self.rank, 2 * self.num_ranks - 1 - self.rank

    def of(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of x, whose dimension dim is a whole sequence."""
        if self.num_ranks == 1:
            return x
        parts = x.chunk(2 * self.num_ranks, dim)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim)


class Meshes:
    """Sub-meshes by axis; None for an axis of one rank."""

    def __init__(self, case: TrainCase) -> None:
        axes = self._parallel = case.parallel
        self._device = case.device
        self._experts: DeviceMesh | None = None
        self._context: DeviceMesh | None = None
        self._whole: DeviceMesh | None = None
        # Ranks of one sequence divide weights, too: gradients of its parts are summed anyway.
        self._shards = "dp_shard" if axes.cp == 1 else "dp_shard_cp"
        if not dist.is_initialized():
            return
        shards = {self._shards: axes.dp_shard * axes.cp}
        self._whole = self._made(
            pp=axes.pp, dp_replicate=axes.dp_replicate, **shards, tp=axes.tp
        )
        if axes.tp > 1 and self._whole[self._shards].size() > 1:
            # Norms over both axes then take one collective instead of two.
            names = ["dp_replicate"] if axes.dp_replicate > 1 else []
            names += [self._shards, "tp"]
            self._whole[tuple(names)]._flatten("_".join(names))
        if axes.cp > 1:
            outside = axes.pp * axes.data_ranks
            self._context = self._made(outside_cp=outside, cp=axes.cp, inside_cp=axes.tp)["cp"]

    def axis(self, name: str) -> DeviceMesh | None:
        if self._whole is None or getattr(self._parallel, name) == 1:
            return None
        return self._context if name == "cp" else self._whole[name]

    def data(self) -> DeviceMesh:
        """For FSDP: the ranks that weights are divided over; before them HSDP's replicas."""
        assert self._whole is not None, "FSDP needs a process group"
        if self._parallel.dp_replicate > 1:
            return self._whole["dp_replicate", self._shards]
        return self._whole[self._shards]

    def replicas(self) -> "dist.ProcessGroup":
        """For DDP: all that hold the same weights."""
        assert self._whole is not None, "DDP needs a process group"
        if self._parallel.cp > 1:
            both = self._whole["dp_replicate", self._shards]
            return both._flatten("dp_replicate_cp").get_group()
        return self._whole["dp_replicate"].get_group()

    def experts(self) -> DeviceMesh:
        """The ranks that FSDP shards over, split into ep and those of the same experts."""
        if self._experts is None:
            axes = self._parallel
            same = axes.dp_shard * axes.cp // axes.ep
            self._experts = self._made(
                pp=axes.pp, dp_replicate=axes.dp_replicate, dp_shard_same=same, ep=axes.ep
            )
        return self._experts

    def _made(self, **axes: int) -> DeviceMesh:
        """All ranks divided, the last axis running fastest."""
        return init_device_mesh(self._device, tuple(axes.values()), mesh_dim_names=tuple(axes))
