"""Facts needed to judge a figure: machine, devices, versions, variables, commit."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from stepmark.cases.plan import ROUND
from stepmark.cases.record import DeviceInfo, Environment, Levels
from stepmark.measuring import host
from stepmark.measuring.nvidia import pci_bus_id, torch_device_info
from stepmark.measuring.ranks import Ranks
from stepmark.measuring.telemetry import open_gpu
from stepmark.model.ops.backends import MODULES, Capabilities

PACKAGES = ("triton", "pytorch-triton-rocm", "flash_attn", "transformer_engine", "torchao")


def levels(ranks: Ranks) -> Levels:
    """Return the levels of what these processes measure first; all ranks call it."""
    hosts = ranks.gather(platform.node())
    began_at = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    sweep_round = os.environ.get(ROUND)
    return Levels(
        machine=", ".join(dict.fromkeys(hosts)),
        process=f"{os.getpid()} {began_at.isoformat(timespec='milliseconds')}",
        communicator=1,
        round=int(sweep_round) if sweep_round else None,
    )


def process_age_s() -> float:
    began_at: float = psutil.Process().create_time()
    return time.time() - began_at


def capture(devices: Sequence[DeviceInfo]) -> Environment:
    """Return the environment of this host, with the devices of all ranks, by rank."""
    return host.environment(devices, torch=str(torch.__version__), versions=versions())


def local_device(device: torch.device, rank: int) -> DeviceInfo:
    """Return the facts on the device of this rank."""
    if device.type != "cuda":
        return DeviceInfo(
            rank=rank,
            index=device.index or 0,
            name=host.cpu_name(Path("/proc/cpuinfo")),
            memory_bytes=host.memory_bytes(),
            l2_bytes=host.cache_bytes(),
            host=platform.node(),
            pid=os.getpid(),
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    gpu = open_gpu(index)
    info = gpu.device_info(rank) if gpu else torch_device_info(index, rank)
    # Without the function's number, as nccl-tests prints it.
    bus_id = pci_bus_id(index).removesuffix(".0")
    return dataclasses.replace(info, bus_id=bus_id, pid=os.getpid())


# Triton is not imported for this: that is slow, and fails without a driver.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def capabilities(device: torch.device) -> Capabilities:
    """Return the facts from which support of an operator is decided."""
    on_gpu = device.type == "cuda"
    return Capabilities(
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if on_gpu else (0, 0),
        is_rocm=torch.version.hip is not None,
        has_compiler=host.compiler() is not None,
        modules=frozenset(name for name in MODULES if importlib.util.find_spec(name)),
    )


def versions() -> dict[str, str]:
    """Return versions of drivers and packages without importing any package."""
    by_package = {"cuda": torch.version.cuda or "", "hip": torch.version.hip or ""}
    if torch.cuda.is_available():
        gpu = open_gpu(torch.cuda.current_device())
        by_package["driver"] = gpu.driver() if gpu else ""
        by_package["cudnn"] = str(torch.backends.cudnn.version() or "")
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            name = "rccl" if torch.version.hip else "nccl"
            by_package[name] = ".".join(map(str, torch.cuda.nccl.version()))
    by_package |= {name: host.package_version(name) for name in PACKAGES}
    return {name: version for name, version in by_package.items() if version}


def reset_peak_resident() -> None:
    """Forget the process's peak, so that it counts from now on (Linux, proc(5): clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int | None:
    """Return the most memory that the process had resident since the peak was reset.

    It is since the process started where the system resets none, None where it tells none.
    """
    lines = host.read_fact(Path("/proc/self/status")).splitlines()
    peaks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(peaks[0]) if peaks else None
