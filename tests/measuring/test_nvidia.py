"""NVML on recorded answers of an H200 (driver 580.159.04, a VM without NVLink state)."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepmark.measuring import nvidia

UUID = "9b755e1f-1cbc-0faa-2f81-e5a7ae9e4c3b"

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    uuid=UUID,
    total_memory=150_109_028_352,
    L2_cache_size=60 << 20,
    multi_processor_count=132,
    major=9,
    minor=0,
    pci_domain_id=0,
    pci_bus_id=0,
    pci_device_id=6,
)


class NVMLError(Exception):
    pass


ANSWERS: dict[Any, Any] = {
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": f"GPU-{UUID}",
    "nvmlDeviceGetPowerUsage": 132894,
    "nvmlDeviceGetTotalEnergyConsumption": 9_876_543_210,
    "nvmlDeviceGetPowerManagementLimit": 700000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
    ("nvmlDeviceGetClockInfo", 1): 1980,
    ("nvmlDeviceGetMaxClockInfo", 1): 1980,
    ("nvmlDeviceGetMaxClockInfo", 2): 3201,
    ("nvmlDeviceGetTemperature", 0): 41,
    "nvmlDeviceGetCurrentClocksEventReasons": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetEccMode": [1, 1],
    ("nvmlDeviceGetTotalEccErrors", 1, 1): 0,
    ("nvmlDeviceGetViolationStatus", 0): SimpleNamespace(violationTime=2_500_000_000),
    ("nvmlDeviceGetViolationStatus", 1): SimpleNamespace(violationTime=0),
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150754820096, used=648347648),
}


class FakeNvml:
    """pynvml with recorded answers: what was not recorded is Not Supported."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC = 1, 1
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, answers: dict[Any, Any], *, uuids: tuple[str, ...] = (f"GPU-{UUID}",)):
        self.answers, self.uuids = answers, uuids

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return f"handle of {uuid}"

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:  # noqa: N802
        if bus != "0000:00:06.0":
            raise NVMLError("Not Found")
        return f"handle of {bus}"

    def __getattr__(self, query: str) -> Any:
        if not query.startswith("nvmlDeviceGet"):
            raise AttributeError(query)

        def ask(handle: str, *args: int) -> Any:
            assert handle.startswith("handle of ")
            key = (query, *args) if args else query
            if key not in self.answers:
                raise NVMLError("Not Supported")
            return self.answers[key]

        return ask


def card(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> nvidia.NvidiaGpu | None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: PROPERTIES)
    return nvidia.find(0)


def h200(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> nvidia.NvidiaGpu:
    gpu = card(monkeypatch, FakeNvml(ANSWERS | changed))
    assert gpu is not None
    return gpu


def test_every_answer_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = card(monkeypatch, FakeNvml({}))
    assert gpu is not None
    reading, health, links = gpu.reading(), gpu.health(), gpu.links()
    assert (reading.sm_clock_hz, reading.power_w, reading.temperature_c) == (None, None, None)
    assert reading.throttle == ()
    assert gpu.energy_j() is None
    assert health == nvidia.Health()
    assert links == nvidia.Links(fabric="NVLink")
    assert gpu.device_info(0).name == "NVIDIA H200"  # torch still knows


def test_only_nvml_errors_are_taken_for_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = h200(monkeypatch, nvmlDeviceGetRemappedRows=7)  # not a tuple: our mistake, be loud
    with pytest.raises(TypeError):
        gpu.health()


def test_reading_is_in_si_units(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = h200(monkeypatch)
    reading = gpu.reading()
    assert gpu.energy_j() == pytest.approx(9_876_543.210)
    assert reading.sm_clock_hz == 1.98e9
    assert reading.power_w == pytest.approx(132.894)
    assert reading.temperature_c == 41
    assert reading.throttle == ()


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (None, ()),
        (0x0, ()),
        (0x1, ("idle",)),
        (0x4, ("power cap",)),
        (0x4 | 0x40, ("power cap", "thermal (hardware)")),
        (0x800, ("reason 0x800",)),
    ],
)
def test_throttle_bits_read_as_words(bits: int | None, words: tuple[str, ...]) -> None:
    assert nvidia.throttle_words(bits) == words


def test_device_info_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    info = h200(monkeypatch).device_info(3)
    assert (info.rank, info.index, info.name) == (3, 0, "NVIDIA H200")
    assert info.uuid == f"GPU-{UUID}"
    assert (info.max_sm_clock_hz, info.max_memory_clock_hz) == (1.98e9, 3.201e9)
    assert info.power_limit_w == info.default_power_limit_w == pytest.approx(700)
    assert (info.ecc, info.persistence, info.pcie) == (True, True, "gen5 x16")
    assert (info.capability, info.num_sms, info.l2_bytes) == ("9.0", 132, 60 << 20)


def test_health_and_links_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = h200(monkeypatch)
    health = gpu.health()
    assert (health.ecc_uncorrected, health.remapped_rows) == (0, 0)
    assert (health.remap_pending, health.remap_failed) == (False, False)
    assert health.power_throttled_s == pytest.approx(2.5)
    assert health.memory_used_bytes == 648347648
    assert gpu.links().num_fabric_links is None  # Not Supported is not "none"
    assert gpu.driver() == "580.159.04"


def test_nvlinks_are_counted_where_told(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {("nvmlDeviceGetNvLinkState", link): int(link < 17) for link in range(18)}
    gpu = card(monkeypatch, FakeNvml(ANSWERS | states))
    assert gpu is not None
    assert gpu.links().num_fabric_links == 17


def test_pending_remap_and_rows_come_from_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    health = h200(monkeypatch, nvmlDeviceGetRemappedRows=(5, 2, 1, 0)).health()
    assert (health.remapped_rows, health.remap_pending) == (2, True)
    assert health.remap_failed is False


@pytest.mark.parametrize(
    ("uuids", "handle"),
    [
        ((f"GPU-{UUID}",), f"handle of GPU-{UUID}"),
        ((f"MIG-{UUID}",), f"handle of MIG-{UUID}"),
        ((), "handle of 0000:00:06.0"),
    ],
)
def test_card_is_found_by_identity_not_by_index(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...], handle: str
) -> None:
    gpu = card(monkeypatch, FakeNvml(ANSWERS, uuids=uuids))
    assert gpu is not None
    assert gpu._handle == handle


def test_no_driver_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(ANSWERS)

    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(fake, "nvmlInit", fail)
    assert card(monkeypatch, fake) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_real_card_answers() -> None:
    gpu = nvidia.find(0)
    assert gpu is not None
    info = gpu.device_info(0)
    assert str(torch.cuda.get_device_properties(0).uuid) in info.uuid
    assert 0 < (gpu.reading().sm_clock_hz or 0) <= (info.max_sm_clock_hz or 0)


def test_a_torch_without_the_pci_address_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: PROPERTIES)
    assert nvidia.pci_bus_id(0) == "0000:00:06.0"
    older = SimpleNamespace(name="NVIDIA H200", uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: older)
    assert nvidia.pci_bus_id(0) == ""
