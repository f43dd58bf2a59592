"""AMD cards through amdsmi (from the ROCm install). Written, not run on AMD hardware.

Names, keys and units follow the Python API of amdsmi 7.0; a value that a card does not report
is "N/A" in amdsmi and None here. A card is found by the PCI address that torch reports.
"""

import importlib
from dataclasses import replace
from typing import Any

from stepmark.cases.record import DeviceInfo, Telemetry
from stepmark.measuring.nvidia import (
    MHZ,
    Card,
    Health,
    Links,
    pci_bus_id,
    scaled,
    torch_device_info,
)

NOTE = "written, not run"

# Keys of amdsmi_get_violation_status.
VIOLATIONS = {
    "active_ppt_pwr": "power cap",
    "active_socket_thrm": "thermal (socket)",
    "active_hbm_thrm": "thermal (memory)",
    "active_vr_thrm": "thermal (voltage regulator)",
    "active_prochot_thrm": "thermal (hardware)",
}

PCIE_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def number(answer: Any, key: str) -> Any:
    """Return answer[key] where the card gave a number, else None."""
    value = answer.get(key) if answer else None
    return value if isinstance(value, (int, float)) else None


def pcie_generation(speed: float | None) -> int | None:
    """Return the generation of a speed in GT/s, or in MT/s as newer releases report it."""
    if speed is None:
        return None
    return PCIE_GENERATION.get(speed / 1000 if speed >= 1000 else float(speed))


def find(index: int) -> "AmdGpu | None":
    """Return the card of a torch device index; None where amdsmi is missing or hides it."""
    try:
        smi = importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError):  # it looks for its library while importing
        return None
    try:
        smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
        bus_id = pci_bus_id(index)
        for handle in smi.amdsmi_get_processor_handles():
            if smi.amdsmi_get_gpu_device_bdf(handle).lower() == bus_id:
                return AmdGpu(smi, handle, index, smi.AmdSmiException)
    except smi.AmdSmiException:
        return None
    return None


class AmdGpu(Card):
    """One card behind an amdsmi handle."""

    def device_info(self, rank: int) -> DeviceInfo:
        info = torch_device_info(self._index, rank)
        health = self.health()
        asic = self._ask("amdsmi_get_gpu_asic_info") or {}
        clocks = self._library.AmdSmiClkType
        gfx = self._ask("amdsmi_get_clock_info", clocks.GFX)
        memory = self._ask("amdsmi_get_clock_info", clocks.MEM)
        name = str(asic.get("market_name", "N/A"))
        return replace(
            info,
            name=info.name if name == "N/A" else name,
            uuid=self._ask("amdsmi_get_gpu_device_uuid") or info.uuid,
            num_sms=number(asic, "num_compute_units") or info.num_sms,
            max_sm_clock_hz=scaled(number(gfx, "max_clk"), MHZ),
            max_memory_clock_hz=scaled(number(memory, "max_clk"), MHZ),
            power_limit_w=health.power_limit_w,
            default_power_limit_w=health.default_power_limit_w,
            ecc=health.ecc,
            pcie=self.links().pcie,
        )

    def reading(self) -> Telemetry:
        smi = self._library
        power = self._ask("amdsmi_get_power_info")
        watts = [
            number(power, key)
            for key in ("socket_power", "current_socket_power", "average_socket_power")
        ]
        # The field with the figure depends on card and release; the others are 0 or N/A.
        readings = [value for value in watts if value]
        clock = self._ask("amdsmi_get_clock_info", smi.AmdSmiClkType.GFX)
        status = self._ask("amdsmi_get_violation_status") or {}
        return Telemetry(
            sm_clock_hz=scaled(number(clock, "clk"), MHZ),
            power_w=float(readings[0]) if readings else None,
            temperature_c=scaled(
                self._ask(
                    "amdsmi_get_temp_metric",
                    smi.AmdSmiTemperatureType.HOTSPOT,
                    smi.AmdSmiTemperatureMetric.CURRENT,
                ),
                1.0,
            ),
            throttle=tuple(word for key, word in VIOLATIONS.items() if status.get(key) is True),
            num_readings=1,
        )

    def energy_j(self) -> float | None:
        """Return the energy used since the driver was loaded; the counter's unit is given."""
        count = self._ask("amdsmi_get_energy_count")
        unit_uj = number(count, "counter_resolution")
        return unit_uj and scaled(number(count, "energy_accumulator"), unit_uj * 1e-6)

    def links(self) -> Links:
        pcie = self._ask("amdsmi_get_pcie_info") or {}
        now = pcie.get("pcie_metric")
        most = pcie.get("pcie_static")
        fabric = self._ask("amdsmi_get_link_metrics")
        return Links(
            pcie_generation=pcie_generation(number(now, "pcie_speed")),
            pcie_max_generation=pcie_generation(number(most, "max_pcie_speed")),
            pcie_width=number(now, "pcie_width"),
            pcie_max_width=number(most, "max_pcie_width"),
            fabric="xGMI",
            num_fabric_links=number(fabric, "num_links"),
        )

    def health(self) -> Health:
        cap = self._ask("amdsmi_get_power_cap_info")  # microwatts
        errors = self._ask("amdsmi_get_gpu_total_ecc_count")
        pages = self._ask("amdsmi_get_gpu_bad_page_info")
        memory = self._ask("amdsmi_get_gpu_vram_usage")  # MiB
        used_mib = number(memory, "vram_used")
        return Health(
            ecc=None if errors is None else True,
            ecc_uncorrected=number(errors, "uncorrectable_count"),
            remapped_rows=None if pages is None else len(pages),
            power_limit_w=scaled(number(cap, "power_cap"), 1e-6),
            default_power_limit_w=scaled(number(cap, "default_power_cap"), 1e-6),
            memory_used_bytes=None if used_mib is None else int(used_mib) << 20,
        )

    def driver(self) -> str:
        answer = self._ask("amdsmi_get_gpu_driver_info") or {}
        version = str(answer.get("driver_version", "N/A"))
        return "" if version == "N/A" else version
