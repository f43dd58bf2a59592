"""Work between a device and its host's memory: copies, and an optimizer on the host's cores."""

from stepmark.model.ops import HostCopy, Phase
from stepmark.step.workload import COMPUTE, ComputeOp, Kernel

HOST_ADAM = "cpu_adam"


def host_copy(
    num_bytes: int, direction: str, phase: Phase, module: str, stream: str = COMPUTE
) -> ComputeOp:
    """Return a copy. direction: d2h, to the host, or h2d."""
    op = HostCopy(num_bytes=num_bytes, direction=direction)
    return ComputeOp(op=op, phase=phase, module=module, stream=stream)


def host_adam(module: str = "optimizer") -> ComputeOp:
    """Return AdamW on the host's cores, whose time nobody knows."""
    return ComputeOp(op=Kernel(name=HOST_ADAM), phase=Phase.OPTIM, module=module)
