"""NVIDIA cards through NVML, and the types that both vendors' cards fill.

A card is found by the UUID that torch reports, so CUDA_VISIBLE_DEVICES needs no care.
A value that driver, card or virtual machine does not report is None.
"""

import importlib
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepmark.cases.record import DeviceInfo, Telemetry

MHZ = 1e6
IDLE = "idle"

# Bits of nvmlDeviceGetCurrentClocksEventReasons.
EVENT_REASONS = {
    0x1: IDLE,
    0x2: "clocks set by user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Connections of a card. None where it does not report them."""

    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    fabric: str = ""  # "NVLink" or "xGMI"
    num_fabric_links: int | None = None  # active

    @property
    def pcie(self) -> str:
        """The link as it is now, e.g. 'gen5 x16'."""
        if self.pcie_generation is None or self.pcie_width is None:
            return ""
        return f"gen{self.pcie_generation} x{self.pcie_width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Causes of slow or wrong results. None where the card does not report them."""

    ecc: bool | None = None
    ecc_uncorrected: int | None = None  # over the life of the card
    remapped_rows: int | None = None  # rows (AMD: pages) retired for uncorrectable errors
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    persistence: bool | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    power_throttled_s: float | None = None  # since the driver was loaded
    thermal_throttled_s: float | None = None
    memory_used_bytes: int | None = None  # by all processes


def throttle_words(reasons: int | None) -> tuple[str, ...]:
    """Return the set bits as words; an unknown bit keeps its number."""
    number = reasons or 0
    bits = [1 << i for i in range(number.bit_length()) if number >> i & 1]
    return tuple(EVENT_REASONS.get(bit, f"reason {bit:#x}") for bit in bits)


def scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def torch_device_info(index: int, rank: int) -> DeviceInfo:
    """Return the facts on a CUDA or ROCm device that torch alone provides."""
    properties = torch.cuda.get_device_properties(index)
    arch = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return DeviceInfo(
        rank=rank,
        index=index,
        name=properties.name,
        uuid=str(getattr(properties, "uuid", "")),
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size or None,
        num_sms=properties.multi_processor_count,
        capability=arch or f"{properties.major}.{properties.minor}",
        host=os.uname().nodename,
    )


def pci_bus_id(index: int) -> str:
    """Return e.g. '0000:3b:00.0'; "" where this torch does not report it."""
    properties = torch.cuda.get_device_properties(index)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    parts: list[Any] = [getattr(properties, name, None) for name in names]
    return "" if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def find(index: int) -> "NvidiaGpu | None":
    """Return the card of a torch device index; None where NVML is missing or hides it."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", "")
    for query, key in (
        (nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}"),
        (nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}"),
        (nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id(index)),
    ):
        try:
            return NvidiaGpu(nvml, query(key), index, nvml.NVMLError)
        except nvml.NVMLError:
            continue
    return None


class Card:
    """A card behind a handle of a vendor's library. No method calls torch or waits for it."""

    def __init__(self, library: Any, handle: Any, index: int, error: type[Exception]) -> None:
        self._library = library
        self._handle = handle
        self._index = index
        self._error = error

    def _ask(self, query: str, *args: Any) -> Any:
        """Return the answer, or None where it is not supported."""
        try:
            return getattr(self._library, query)(self._handle, *args)
        except self._error:
            return None


class NvidiaGpu(Card):
    """One card behind an NVML handle."""

    def device_info(self, rank: int) -> DeviceInfo:
        nvml = self._library
        health = self.health()
        info = torch_device_info(self._index, rank)
        sm = self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
        memory = self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM)
        return replace(
            info,
            name=self._ask("nvmlDeviceGetName") or info.name,
            uuid=self._ask("nvmlDeviceGetUUID") or info.uuid,
            max_sm_clock_hz=scaled(sm, MHZ),
            max_memory_clock_hz=scaled(memory, MHZ),
            power_limit_w=health.power_limit_w,
            default_power_limit_w=health.default_power_limit_w,
            ecc=health.ecc,
            persistence=health.persistence,
            pcie=self.links().pcie,
        )

    def reading(self) -> Telemetry:
        """Clock, power, temperature and throttle reasons of this moment; at most 3 ms."""
        nvml = self._library
        return Telemetry(
            sm_clock_hz=scaled(self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM), MHZ),
            power_w=scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
            temperature_c=scaled(
                self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU), 1.0
            ),
            throttle=throttle_words(self._ask("nvmlDeviceGetCurrentClocksEventReasons")),
            num_readings=1,
        )

    def energy_j(self) -> float | None:
        """Return the energy used since the driver was loaded."""
        return scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3)

    def links(self) -> Links:
        states = [
            self._ask("nvmlDeviceGetNvLinkState", link)
            for link in range(self._library.NVML_NVLINK_MAX_LINKS)
        ]
        answers = [state for state in states if state is not None]
        return Links(
            pcie_generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_max_generation=self._ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_max_width=self._ask("nvmlDeviceGetMaxPcieLinkWidth"),
            fabric="NVLink",
            num_fabric_links=sum(map(bool, answers)) if answers else None,
        )

    def health(self) -> Health:
        nvml = self._library
        ecc = self._ask("nvmlDeviceGetEccMode")  # [current, pending]
        rows = self._ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
        persistence = self._ask("nvmlDeviceGetPersistenceMode")
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return Health(
            ecc=None if ecc is None else bool(ecc[0]),
            ecc_uncorrected=self._ask(
                "nvmlDeviceGetTotalEccErrors",
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_AGGREGATE_ECC,
            ),
            remapped_rows=None if rows is None else rows[1],
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            persistence=None if persistence is None else bool(persistence),
            power_limit_w=scaled(self._ask("nvmlDeviceGetPowerManagementLimit"), 1e-3),
            default_power_limit_w=scaled(
                self._ask("nvmlDeviceGetPowerManagementDefaultLimit"), 1e-3
            ),
            power_throttled_s=self._throttled_s(nvml.NVML_PERF_POLICY_POWER),
            thermal_throttled_s=self._throttled_s(nvml.NVML_PERF_POLICY_THERMAL),
            memory_used_bytes=None if memory is None else memory.used,
        )

    def _throttled_s(self, policy: int) -> float | None:
        violation = self._ask("nvmlDeviceGetViolationStatus", policy)
        return None if violation is None else violation.violationTime * 1e-9

    def driver(self) -> str:
        try:
            return str(self._library.nvmlSystemGetDriverVersion())
        except self._error:
            return ""
