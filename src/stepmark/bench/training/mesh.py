"""Which ranks work together along which axis: one device mesh for a case."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepmark.core.parallel import ParallelConfig
from stepmark.core.train_case import TrainCase

# Outermost first: ranks that talk most are neighbours.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    data_rank: int  # which micro-batch it works on


def place_of(rank: int, parallel: ParallelConfig) -> Place:
    """Coordinates of a rank, the last axis running fastest."""
    found: dict[str, int] = {}
    for axis in reversed(AXES):
        size = getattr(parallel, axis)
        found[axis] = rank % size
        rank //= size
    data_rank = found["dp_replicate"] * parallel.dp_shard + found["dp_shard"]
    return Place(**found, data_rank=data_rank)


class Meshes:
    """Sub-meshes by axis; None for an axis of one rank."""

    def __init__(self, case: TrainCase) -> None:
        parallel = case.parallel
        self._whole = (
            init_device_mesh(
                case.device,
                tuple(getattr(parallel, axis) for axis in AXES),
                mesh_dim_names=AXES,
            )
            if dist.is_initialized()
            else None
        )
        self._parallel = parallel
        self._device = case.device
        self._experts: DeviceMesh | None = None
        if self._whole is not None and parallel.tp > 1 and parallel.dp_shard > 1:
            # Norms over both axes then take one collective instead of two.
            names = [n for n in ("dp_replicate", "dp_shard") if getattr(parallel, n) > 1]
            self._whole[(*names, "tp")]._flatten("_".join((*names, "tp")))

    def axis(self, name: str) -> DeviceMesh | None:
        if self._whole is None or getattr(self._parallel, name) == 1:
            return None
        return self._whole[name]

    def data(self) -> DeviceMesh:
        """For FSDP: (dp_shard), or (dp_replicate, dp_shard) for HSDP."""
        assert self._whole is not None, "FSDP needs a process group"
        if self._parallel.dp_replicate > 1:
            return self._whole["dp_replicate", "dp_shard"]
        return self._whole["dp_shard"]

    def replicas(self) -> "dist.ProcessGroup":
        """For DDP: all that hold the same weights."""
        assert self._whole is not None, "DDP needs a process group"
        return self._whole["dp_replicate"].get_group()

    def experts(self) -> DeviceMesh:
        """The data-parallel ranks with dp_shard split into ep and those of the same experts."""
        if self._experts is None:
            axes = self._parallel
            shape = (axes.pp, axes.dp_replicate, axes.dp_shard // axes.ep, axes.ep)
            names = ("pp", "dp_replicate", "dp_shard_same", "ep")
            self._experts = init_device_mesh(self._device, shape, mesh_dim_names=names)
        return self._experts
