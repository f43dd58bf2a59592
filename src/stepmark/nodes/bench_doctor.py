"""Examine this machine: its devices, what can be measured on it, what not, and why."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from stepmark.cases.record import DeviceInfo, Environment, Telemetry
from stepmark.collectives.bench.nccl import find_library
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import GIB, format_bytes
from stepmark.measuring import amd
from stepmark.measuring.environment import capabilities, capture, local_device
from stepmark.measuring.host import compiler
from stepmark.measuring.nvidia import IDLE, Health, Links
from stepmark.measuring.telemetry import cpu_reading, open_gpu
from stepmark.model.device import find_device
from stepmark.model.ops import FAMILIES, Gemm, Op
from stepmark.model.ops.backends import Capabilities
from stepmark.nodes.doctor_findings import Backend, Findings, Transport, nics, shm_bytes
from stepmark.operators.bench import IMPLS
from stepmark.operators.bench.call import Impl

MIN_CORES_PER_GPU = 4
OTHERS_SHARE = 0.05  # of a card's memory in use before we start

# Types of products whose support differs.
_GEMM_DTYPES = (DType.BF16, DType.FP32, DType.FP8_E4M3)


def samples(family: str) -> list[Op]:
    """Return small operators from which support of a family is decided."""
    kind = FAMILIES[family]
    sizes = {
        field.name: max(64, field.metadata["low"])
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
    }
    if kind is Gemm:
        return [Gemm(**sizes, dtype=dtype) for dtype in _GEMM_DTYPES]
    return [kind(**sizes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, and the peaks that its figures are compared with."""

    info: DeviceInfo
    peak_flops_per_s: dict[str, float]  # by dtype; empty where the device is unknown
    hbm_bytes_per_s: float | None
    peak_reason: str  # why there is no peak; "" where there is
    now: Telemetry
    links: Links
    health: Health
    others_bytes: int | None  # memory in use that is not ours
    note: str  # "written, not run" where this path never ran on its hardware


def examine() -> Findings:
    """Examine this machine without starting a process or allocating memory on a device."""
    torch_devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    torch_devices = torch_devices or [torch.device("cpu")]
    devices = tuple(examine_device(d, rank) for rank, d in enumerate(torch_devices))
    environment = capture([device.info for device in devices])
    host = host_warnings(environment, shm_bytes(), compiler())
    warnings = (warning for device in devices for warning in warnings_of(device))
    return Findings(
        environment=environment,
        devices=devices,
        peer_access=peer_access(),
        nics=nics(Path("/sys/class")),
        backends=backends(IMPLS, capabilities(torch_devices[0])),
        transports=tuple(transports()),
        shm_bytes=shm_bytes(),
        compiler=compiler(),
        warnings=(*environment.warnings, *host, *warnings),
    )


def examine_device(device: torch.device, rank: int) -> Device:
    info = local_device(device, rank)
    gpu = open_gpu(info.index) if device.type == "cuda" else None
    spec = find_device(info.name)
    health = gpu.health() if gpu else Health()
    own = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    used_bytes = health.memory_used_bytes
    peaks = spec.peak_flops_per_s if spec else {}
    unknown = f"{info.name!r} is not in hardware.toml: peaks n/a, measured ceiling instead"
    return Device(
        info=info,
        peak_flops_per_s={str(dtype): peak for dtype, peak in peaks.items()},
        hbm_bytes_per_s=spec.hbm_bytes_per_s if spec else None,
        peak_reason="" if spec else unknown,
        now=gpu.reading() if gpu else Telemetry() if device.type == "cuda" else cpu_reading(),
        links=gpu.links() if gpu else Links(),
        health=health,
        others_bytes=None if used_bytes is None else used_bytes - own,
        note=amd.NOTE if device.type == "cuda" and torch.version.hip else "",
    )


def backends(
    impls: Mapping[str, Mapping[str, Impl]], capable: Capabilities
) -> tuple[Backend, ...]:
    """Return every backend of every family, and why it would be skipped here."""
    return tuple(
        Backend(
            family=family,
            backend=name,
            dtype=str(getattr(op, "dtype", "bytes")),
            reason=impl.unsupported(op, capable),
        )
        for family, table in impls.items()
        for op in samples(family)
        for name, impl in table.items()
    )


def transports() -> Iterator[Transport]:
    """Yield the ways to run a collective: torch's back ends, and libnccl itself."""
    count = torch.cuda.device_count()
    hip = torch.version.hip is not None
    too_few = None if count > 1 else f"{count} accelerators, and it takes two"
    rocm = "RCCL: written, not run" if hip else ""
    is_available = dist.is_available()
    gloo = None if is_available and dist.is_gloo_available() else "not in this torch"
    yield Transport(api="torch", backend="gloo", reason=gloo, note="on the CPU")
    nccl = too_few if is_available and dist.is_nccl_available() else "not in this torch"
    yield Transport(api="torch", backend="nccl", reason=nccl, note=rocm)
    try:
        path = find_library()
    except ConfigError:
        reason = "no libnccl or librccl in this torch"
        yield Transport(api="nccl", backend="nccl", reason=reason)
        return
    yield Transport(api="nccl", backend="nccl", reason=too_few, note=rocm or path)


def peer_access() -> tuple[tuple[bool, ...], ...]:
    indices = range(torch.cuda.device_count())
    return tuple(
        tuple(a == b or torch.cuda.can_device_access_peer(a, b) for b in indices)
        for a in indices
    )


def host_warnings(
    environment: Environment, shm_bytes: int | None, cxx: str | None
) -> list[str]:
    num_gpus = torch.cuda.device_count()
    num_cores = environment.num_cores
    shm = format_bytes(shm_bytes or 0)
    problems = {
        f"/dev/shm has {shm}; NCCL wants 1 GiB or more": shm_bytes is not None
        and shm_bytes < GIB,
        f"{num_cores} CPU cores for {num_gpus} GPUs: launches suffer": num_cores
        < MIN_CORES_PER_GPU * num_gpus,
        "no C++ compiler: torch.compile cases will be skipped": cxx is None,
    }
    return [text for text, is_so in problems.items() if is_so]


def warnings_of(device: Device) -> list[str]:
    """Return the present problems of one device."""
    health = device.health
    links = device.links
    is_remapped = health.remapped_rows or health.remap_pending or health.remap_failed
    state = " failed" if health.remap_failed else " pending" if health.remap_pending else ""
    words = [word for word in device.now.throttle if word != IDLE]
    width = links.pcie_max_width
    gen = links.pcie_generation
    max_gen = links.pcie_max_generation
    others_bytes = device.others_bytes or 0
    limit_bytes = OTHERS_SHARE * (device.info.memory_bytes or math.inf)
    problems = {
        f"{health.ecc_uncorrected} uncorrected ECC errors in its life": health.ecc_uncorrected,
        f"{health.remapped_rows or 0} memory rows remapped{state}": is_remapped,
        f"throttled now: {', '.join(words)}": words,
        f"PCIe x{links.pcie_width} of x{width}": _below(links.pcie_width, width),
        f"PCIe gen{gen} of gen{max_gen} (some cards save power when idle)": _below(
            gen, max_gen
        ),
        f"{format_bytes(others_bytes)} of its memory is in use by others": others_bytes
        > limit_bytes,
    }
    return [f"device {device.info.index}: {text}" for text, is_so in problems.items() if is_so]


def _below(now: int | None, most: int | None) -> bool:
    return now is not None and most is not None and now < most
