"""amdsmi on a fake module whose answers have the shape of amdsmi 7.0.2's Python API.

Shapes and units: amdsmi_interface.py of the amdsmi 7.0.2 wheel on PyPI. The figures are an
MI300X's as documented, not recorded from one: this path is written, not run.
"""

import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepmark.measuring import amd, nvidia

PROPERTIES = SimpleNamespace(
    name="AMD Instinct MI300X",
    uuid="abc",
    total_memory=205_822_885_888,
    L2_cache_size=4 << 20,
    multi_processor_count=304,
    major=9,
    minor=4,
    gcnArchName="gfx942:sramecc+:xnack-",
    pci_domain_id=0,
    pci_bus_id=0x23,
    pci_device_id=0,
)


class AmdSmiException(Exception):  # noqa: N818
    pass


class ClkType(IntEnum):
    GFX = 1
    MEM = 5


ANSWERS: dict[Any, Any] = {
    "amdsmi_get_gpu_asic_info": {
        "market_name": "AMD Instinct MI300X",
        "vendor_id": "0x1002",
        "num_compute_units": 304,
        "target_graphics_version": "gfx942",
    },
    "amdsmi_get_gpu_device_uuid": "c4ff74a1-0000-1000-80ea-d9c3cf2e6f9d",
    "amdsmi_get_power_info": {
        "socket_power": 412,
        "current_socket_power": 412,
        "average_socket_power": "N/A",
        "power_limit": 750000000,
    },
    "amdsmi_get_energy_count": {
        "energy_accumulator": 2_000_000,
        "counter_resolution": 15.3,
        "timestamp": 1,
    },
    "amdsmi_get_power_cap_info": {"power_cap": 650000000, "default_power_cap": 750000000},
    ("amdsmi_get_clock_info", ClkType.GFX): {"clk": 1432, "min_clk": 500, "max_clk": 2100},
    ("amdsmi_get_clock_info", ClkType.MEM): {"clk": 1300, "min_clk": 900, "max_clk": 1300},
    ("amdsmi_get_temp_metric", 1, 0): 58,
    "amdsmi_get_violation_status": {
        "active_ppt_pwr": True,
        "active_socket_thrm": False,
        "active_hbm_thrm": "N/A",
    },
    "amdsmi_get_pcie_info": {
        "pcie_static": {"max_pcie_width": 16, "max_pcie_speed": 32000},
        "pcie_metric": {"pcie_width": 8, "pcie_speed": 16000},
    },
    "amdsmi_get_link_metrics": {"num_links": 7, "links": []},
    "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 3, "uncorrectable_count": 1},
    "amdsmi_get_gpu_bad_page_info": [{"value": 1}, {"value": 2}],
    "amdsmi_get_gpu_vram_usage": {"vram_total": 196288, "vram_used": 297},
    "amdsmi_get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.12.12"},
}


class FakeAmdsmi:
    """amdsmi with given answers: what is not given is not supported."""

    AmdSmiException = AmdSmiException
    AmdSmiInitFlags = SimpleNamespace(INIT_AMD_GPUS=2)
    AmdSmiClkType = ClkType
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)

    def __init__(self, answers: dict[Any, Any]) -> None:
        self.answers = answers

    def amdsmi_init(self, flag: int) -> None:
        assert flag == 2

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["0000:13:00.0", "0000:23:00.0"]

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return handle

    def __getattr__(self, query: str) -> Any:
        if not query.startswith("amdsmi_get"):
            raise AttributeError(query)

        def ask(handle: str, *args: int) -> Any:
            assert handle == "0000:23:00.0"
            key = (query, *args) if args else query
            if key not in self.answers:
                raise AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED")
            return self.answers[key]

        return ask


def card(monkeypatch: pytest.MonkeyPatch, answers: dict[Any, Any]) -> amd.AmdGpu:
    monkeypatch.setitem(sys.modules, "amdsmi", FakeAmdsmi(answers))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: PROPERTIES)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu = amd.find(0)  # torch's 0 is the second card of amdsmi here
    assert gpu is not None
    return gpu


def test_every_answer_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = card(monkeypatch, {})
    reading = gpu.reading()
    assert (reading.sm_clock_hz, reading.power_w, reading.temperature_c) == (None, None, None)
    assert gpu.energy_j() is None
    assert gpu.health() == nvidia.Health()
    assert gpu.links() == nvidia.Links(fabric="xGMI")
    assert gpu.device_info(0).name == "AMD Instinct MI300X"
    assert gpu.driver() == ""


def test_reading_is_in_si_units(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = card(monkeypatch, ANSWERS)
    reading = gpu.reading()
    assert gpu.energy_j() == pytest.approx(30.6)
    assert (reading.sm_clock_hz, reading.power_w) == (1.432e9, 412)
    assert reading.temperature_c == 58
    assert reading.throttle == ("power cap",)  # "N/A" is not a reason


def test_power_falls_back_to_the_field_that_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    power = {"socket_power": 0, "current_socket_power": "N/A", "average_socket_power": 300}
    gpu = card(monkeypatch, ANSWERS | {"amdsmi_get_power_info": power})
    assert gpu.reading().power_w == 300


def test_device_info(monkeypatch: pytest.MonkeyPatch) -> None:
    info = card(monkeypatch, ANSWERS).device_info(1)
    assert (info.power_limit_w, info.default_power_limit_w) == pytest.approx((650, 750))
    assert (info.max_sm_clock_hz, info.max_memory_clock_hz) == (2.1e9, 1.3e9)
    assert (info.num_sms, info.capability) == (304, "gfx942:sramecc+:xnack-")
    assert info.pcie == "gen4 x8"


def test_links_and_health(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = card(monkeypatch, ANSWERS)
    links, health = gpu.links(), gpu.health()
    assert (links.pcie_max_generation, links.pcie_max_width) == (5, 16)
    assert (links.fabric, links.num_fabric_links) == ("xGMI", 7)
    assert (health.ecc_uncorrected, health.remapped_rows) == (1, 2)
    assert health.memory_used_bytes == 297 << 20
    assert gpu.driver() == "6.12.12"


@pytest.mark.parametrize(("speed", "generation"), [(32, 5), (32000, 5), (2.5, 1), (7, None)])
def test_pcie_speed_in_either_unit(speed: float, generation: int | None) -> None:
    assert amd.pcie_generation(speed) == generation


def test_no_library_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)  # type: ignore[arg-type]
    assert amd.find(0) is None
