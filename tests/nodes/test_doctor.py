"""The doctor: every backend is accounted for, every fault has a warning, health has none."""

from pathlib import Path

import pytest
import torch

from stepmark.cases.record import DeviceInfo, Telemetry
from stepmark.measuring.nvidia import Health, Links
from stepmark.model.ops import FAMILIES, FAMILY_OF
from stepmark.model.ops.backends import Capabilities
from stepmark.nodes import bench_doctor
from stepmark.nodes.bench_doctor import Device, backends, warnings_of
from stepmark.nodes.doctor_findings import nics
from stepmark.operators.bench import IMPLS
from stepmark.operators.bench.call import Impl

CPU = Capabilities(
    device_type="cpu",
    capability=(0, 0),
    is_rocm=False,
    has_compiler=True,
    modules=frozenset(),
)


NO_HEALTH, NO_LINKS = Health(), Links()


def device(
    *, health: Health = NO_HEALTH, links: Links = NO_LINKS, throttle: tuple[str, ...] = ()
) -> Device:
    return Device(
        info=DeviceInfo(rank=0, index=2, name="NVIDIA H200", memory_bytes=1000),
        peak_flops_per_s={},
        hbm_bytes_per_s=None,
        peak_reason="",
        now=Telemetry(throttle=throttle),
        links=links,
        health=health,
        others_bytes=health.memory_used_bytes,
        note="",
    )


def test_there_is_a_sample_of_every_family_and_it_is_of_that_family() -> None:
    for family in FAMILIES:
        ops = bench_doctor.samples(family)
        assert ops
        assert {FAMILY_OF[type(op)] for op in ops} == {family}


def test_gemm_is_tried_in_bf16_fp32_and_fp8() -> None:
    dtypes = {found.dtype for found in backends({"gemm": {"x": _refuses("no")}}, CPU)}
    assert dtypes == {"bf16", "fp32", "fp8_e4m3"}


def _refuses(reason: str | None) -> Impl:
    def make(op: object, device: torch.device) -> None:
        raise AssertionError("the doctor allocates nothing")

    return Impl(make=make, unsupported=lambda op, found: reason)  # type: ignore[arg-type]


def test_every_backend_is_accounted_for() -> None:
    table = {"norm": {"a": _refuses(None), "b": _refuses("needs a GPU")}}
    found = backends(table, CPU)
    assert [(b.backend, b.reason) for b in found] == [("a", None), ("b", "needs a GPU")]


def test_the_real_table_is_walked_whole() -> None:
    seen = {(found.family, found.backend) for found in backends(IMPLS, CPU)}
    assert seen == {(family, name) for family, table in IMPLS.items() for name in table}


def test_a_healthy_card_has_no_warning() -> None:
    links = Links(pcie_generation=5, pcie_max_generation=5, pcie_width=16, pcie_max_width=16)
    health = Health(
        ecc=True, ecc_uncorrected=0, remapped_rows=0, remap_pending=False, memory_used_bytes=50
    )
    assert warnings_of(device(health=health, links=links, throttle=("idle",))) == []
    assert warnings_of(device()) == []  # what is unknown is no fault


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        (device(health=Health(ecc_uncorrected=2)), "2 uncorrected ECC errors"),
        (device(health=Health(remapped_rows=1)), "1 memory rows remapped"),
        (device(health=Health(remap_pending=True)), "remapped pending"),
        (device(health=Health(remap_failed=True)), "remapped failed"),
        (device(throttle=("idle", "power cap")), "throttled now: power cap"),
        (device(links=Links(pcie_width=8, pcie_max_width=16)), "PCIe x8 of x16"),
        (device(links=Links(pcie_generation=1, pcie_max_generation=5)), "gen1 of gen5"),
        (device(health=Health(memory_used_bytes=51)), "51 B of its memory is in use"),
    ],
)
def test_each_fault_has_one_warning_that_names_the_device(faulty: Device, words: str) -> None:
    (warning,) = warnings_of(faulty)
    assert warning.startswith("device 2: ")
    assert words in warning


def test_nics_from_sys_class(tmp_path: Path) -> None:
    for name, state, speed in [("lo", "unknown", ""), ("eth0", "up", "100000\n")]:
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(state + "\n")
        (tmp_path / "net" / name / "speed").write_text(speed)
    (tmp_path / "net" / "eth1").mkdir()
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    found = [(nic.name, nic.kind, nic.state, nic.rate) for nic in nics(tmp_path)]
    assert found == [
        ("eth0", "net", "up", "100 Gb/s"),
        ("eth1", "net", "", ""),
        ("mlx5_0:1", "infiniband", "active", "400 Gb/sec (4X NDR)"),
    ]
    assert nics(tmp_path / "none") == ()


def test_host_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench_doctor.examine()
    assert bench_doctor.host_warnings(found.environment, 64 << 20, None) == [
        "/dev/shm has 64 MiB; NCCL wants 1 GiB or more",
        "no C++ compiler: torch.compile cases will be skipped",
    ]


def test_a_device_without_a_peak_row_says_why() -> None:
    found = bench_doctor.examine_device(torch.device("cpu"), 0)
    assert found.peak_flops_per_s == {}
    assert "not in hardware.toml" in found.peak_reason
