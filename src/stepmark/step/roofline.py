"""Lower bound of the time of an operation on a device, and what sets it."""

from stepmark.model.device import DeviceSpec
from stepmark.model.ops import HostCopy, Op
from stepmark.step.workload import Kernel


def roofline_time(op: Op | Kernel, device: DeviceSpec) -> float | None:
    """Return the seconds that the device needs at least; None: a cost or peak is unknown.

    A Kernel has no type: its FLOPs are compared with the highest peak of the device. An
    operation without any cost has no time.
    """
    if isinstance(op, HostCopy):  # it crosses the link to the host
        rate = device.host_link_bytes_per_s
        return op.num_bytes / rate if rate else None
    if op.executed_flops is None or op.bytes_moved is None or device.hbm_bytes_per_s is None:
        return None
    bound_s = op.bytes_moved / device.hbm_bytes_per_s
    if not op.executed_flops:
        return bound_s or None
    if isinstance(op, Kernel):
        peak = max(device.peak_flops_per_s.values(), default=None)
    else:
        peak = device.peak(op.dtype)
    return None if peak is None else max(bound_s, op.executed_flops / peak)


def limit_of(op: Op, flops_per_s: float | None, bytes_per_s: float | None) -> str | None:
    """Return whether compute or memory bounds an operator; None: a ceiling is unknown."""
    if not op.flops:
        return "memory"
    if not flops_per_s or not bytes_per_s:
        return None
    is_compute = op.executed_flops / flops_per_s >= op.bytes_moved / bytes_per_s
    return "compute" if is_compute else "memory"
