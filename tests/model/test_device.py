import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.device import (
    DeviceSpec,
    find_device,
    find_device_by_alias,
    load_devices,
    parse_devices,
)

DEVICES = load_devices()
ALL = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())

FIGURES = (
    "peak_flops_per_s",
    "rated_clock_hz",
    "hbm_bytes_per_s",
    "hbm_bytes",
    "l2_bytes",
    "l3_bytes",
    "link_bytes_per_s",
    "link_domain",
    "pcie_bytes_per_s",
    "host_bytes_per_s",
    "tdp_w",
)

# key -> SMs or CUs, and FLOP per clock and unit (white papers, ROCm's gpu-arch pages).
HOPPER = {"fp64": 256, "fp32": 256, "tf32": 2048, "bf16": 4096, "fp16": 4096, "fp8_e4m3": 8192}
BLACKWELL = {
    "fp64": 128,
    "fp32": 256,
    "tf32": 4096,
    "bf16": 8192,
    "fp16": 8192,
    "fp8_e4m3": 16384,
    "mxfp8": 16384,
    "nvfp4": 32768,
}
AMPERE = {"fp64": 128, "fp32": 128, "tf32": 1024, "bf16": 2048, "fp16": 2048}
CDNA3 = {"fp64": 256, "fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "fp8_e4m3": 4096}
UNITS = {
    "h100-sxm": (132, HOPPER),
    "h100-pcie": (114, HOPPER),
    "h100-nvl": (132, HOPPER),
    "h200-sxm": (132, HOPPER),
    "h200-nvl": (132, HOPPER),
    "a100-40gb-sxm": (108, AMPERE),
    "a100-80gb-sxm": (108, AMPERE),
    "a100-40gb-pcie": (108, AMPERE),
    "a100-80gb-pcie": (108, AMPERE),
    "b200": (148, BLACKWELL),
    "l40s": (142, {"fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "fp8_e4m3": 2048}),
    "mi250x": (110, {"fp64": 256, "fp32": 256, "bf16": 1024, "fp16": 1024}),
    "mi300x": (304, CDNA3),
    "mi325x": (304, CDNA3),
    "mi355x": (256, {"fp64": 128, "fp32": 256, "bf16": 4096, "fp16": 4096, "mxfp8": 8192}),
}


def peaks(dtype: DType) -> Iterator[tuple[str, float, float]]:
    """Devices with this peak: key, the peak, the bf16 peak."""
    for key, device in DEVICES.items():
        peak, bf16 = device.peak(dtype), device.peak(DType.BF16)
        if peak is not None and bf16 is not None:
            yield key, peak, bf16


# Laws


@ALL
def test_every_figure_has_a_source_and_every_source_a_figure(device: DeviceSpec) -> None:
    stated = {name for name in FIGURES if getattr(device, name) is not None}
    assert {name.partition(".")[0] for name in device.sources} == stated
    assert all(url.startswith("https://") and len(url) > 12 for url in device.sources.values())


@pytest.mark.parametrize("key", UNITS)
def test_peak_is_units_times_flops_per_clock_times_rated_clock(key: str) -> None:
    units, per_clock = UNITS[key]
    for name, flops in per_clock.items():
        clock = DEVICES[key].rated_clock(DType(name))
        assert clock is not None
        assert DEVICES[key].peak(DType(name)) == pytest.approx(units * flops * clock, rel=1e-3)


def test_exactly_the_devices_with_known_units_have_a_rated_clock() -> None:
    assert {k for k, d in DEVICES.items() if d.rated_clock_hz is not None} == UNITS.keys()


@ALL
def test_bf16_and_fp16_are_equal(device: DeviceSpec) -> None:
    assert device.peak(DType.BF16) is not None
    assert device.peak(DType.BF16) == device.peak(DType.FP16)


@ALL
def test_both_fp8_types_are_equal_and_need_fp8_hardware(device: DeviceSpec) -> None:
    assert device.peak(DType.FP8_E4M3) == device.peak(DType.FP8_E5M2)
    if device.key.startswith(("a100", "mi250x")):
        assert device.peak(DType.FP8_E4M3) is None
    elif device.key != "h20":  # has fp8, but no source for its peak
        assert device.peak(DType.FP8_E4M3) is not None


def test_fp8_is_twice_and_tf32_half_of_bf16() -> None:
    assert {key for key, *_ in peaks(DType.FP8_E4M3)} >= {"h100-sxm", "b200", "mi355x"}
    for key, fp8, bf16 in peaks(DType.FP8_E4M3):
        assert fp8 / bf16 == pytest.approx(2, rel=0.02), key
    for key, tf32, bf16 in peaks(DType.TF32):
        assert tf32 / bf16 == pytest.approx(0.5, rel=0.02), key


def test_block_formats_are_for_blackwell_and_cdna4() -> None:
    """torch.cuda.get_device_capability: 10.x of Blackwell; gfx950 has MXFP4, but no NVFP4."""
    scaled = {key for key, device in DEVICES.items() if device.peak(DType.MXFP8)}
    assert scaled == {
        key
        for key, device in DEVICES.items()
        if device.capability >= ((10, 0) if device.vendor == "nvidia" else (9, 5))
    }
    assert {key for key, *_ in peaks(DType.NVFP4)} == scaled - {"mi355x"}
    for key in scaled:
        assert DEVICES[key].peak(DType.MXFP8) == DEVICES[key].peak(DType.FP8_E4M3)
    for key, nvfp4, bf16 in peaks(DType.NVFP4):
        # Blackwell Ultra's fp4 alone is 1.5 times as fast: 1,080 of 720 PFLOPS of 72 GPUs.
        factor = 6 if "300" in key else 4
        assert nvfp4 / bf16 == pytest.approx(factor, rel=0.03), key


def test_wider_types_are_never_faster() -> None:
    for key, fp32, bf16 in peaks(DType.FP32):
        assert fp32 < bf16 / 3, key  # H20, whose tensor cores are cut down, is the closest
    for key, fp64, _ in peaks(DType.FP64):
        if key == "h800-sxm":  # its fp32 has no source
            continue
        assert fp64 <= (DEVICES[key].peak(DType.FP32) or 0), key


@ALL
def test_the_ridge_is_where_a_gpu_has_it(device: DeviceSpec) -> None:
    # FLOPs per HBM byte: 37 on H20, 419 on L40S. A node's figures or a slip of 10 fall outside.
    bf16 = device.peak(DType.BF16)
    assert bf16 is not None
    assert device.hbm_bytes_per_s is not None
    assert 30 < bf16 / device.hbm_bytes_per_s < 450


@ALL
def test_sizes_are_of_one_device(device: DeviceSpec) -> None:
    assert device.hbm_bytes is not None
    assert device.hbm_bytes_per_s is not None
    assert 40 <= device.hbm_bytes / 2**30 <= 288
    assert device.hbm_bytes % 2**30 == 0
    assert 0.5e12 < device.hbm_bytes_per_s <= 8e12
    if device.l2_bytes is not None:
        assert 8 <= device.l2_bytes / 2**20 <= 126
    if device.link_bytes_per_s is not None:
        assert device.link_bytes_per_s < device.hbm_bytes_per_s / 3
    assert device.tdp_w is None or 250 <= device.tdp_w <= 1400
    assert device.rated_clock_hz is None or 1.4e9 <= device.rated_clock_hz <= 2.6e9


# Known figures: a data sheet each, dense


BF16 = {
    "h100-sxm": 989.4e12,
    "h100-pcie": 756.5e12,
    "h100-nvl": 835.5e12,
    "h200-sxm": 989.4e12,
    "h200-nvl": 835.5e12,
    "h20": 148e12,
    "a100-40gb-sxm": 312e12,
    "a100-80gb-sxm": 312e12,
    "a100-40gb-pcie": 312e12,
    "a100-80gb-pcie": 312e12,
    "b200": 2.25e15,
    "gb200": 2.5e15,
    "b300": 2.25e15,
    "gb300": 2.5e15,
    "h800-sxm": 989.4e12,
    "l40s": 362.05e12,
    "mi250x": 191.5e12,
    "mi300x": 1307.4e12,
    "mi325x": 1307.4e12,
    "mi355x": 2.5166e15,
}


@pytest.mark.parametrize(("key", "bf16"), BF16.items())
def test_known_dense_bf16_peak(key: str, bf16: float) -> None:
    assert DEVICES[key].peak(DType.BF16) == pytest.approx(bf16, rel=1e-3)


def test_all_devices_are_in_the_list_above() -> None:
    assert BF16.keys() == DEVICES.keys()


def test_links_are_per_direction() -> None:
    # Sold as 600, 900, 1,800 and 896 GB/s in both directions.
    assert DEVICES["a100-80gb-sxm"].link_bytes_per_s == 300e9
    assert DEVICES["h200-sxm"].link_bytes_per_s == 450e9
    assert DEVICES["b200"].link_bytes_per_s == 900e9
    assert DEVICES["mi300x"].link_bytes_per_s == 7 * 64e9


def test_infinity_cache_is_the_last_level() -> None:
    assert DEVICES["mi300x"].last_level_cache_bytes == 256 * 2**20
    assert DEVICES["h200-sxm"].last_level_cache_bytes == 60 * 2**20
    assert DEVICES["l40s"].last_level_cache_bytes is None


# Names


def test_every_name_finds_its_device_and_no_other() -> None:
    names = [name for device in DEVICES.values() for name in device.names]
    assert len(names) == len(set(names)) >= len(DEVICES)
    for key, device in DEVICES.items():
        assert device.key == key
        assert [find_device(name) for name in device.names] == [device] * len(device.names)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("AMD Instinct MI250X", "mi250x"),
    ],
)
def test_names_that_differ_in_little(name: str, key: str) -> None:
    assert find_device(name) is DEVICES[key]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "H100",
        "NVIDIA H100",
        "nvidia h200",
        "NVIDIA H200 ",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA H20-3e",
        "NVIDIA A100 80GB PCIe MIG 1g.10gb",
        "AMD Instinct MI250X/MI250",
        "AMD Instinct MI300X VF",
        "NVIDIA GeForce RTX 4090",
        "cpu",
    ],
)
def test_anything_else_is_unknown(name: str) -> None:
    assert find_device(name) is None


# The binding limit


def test_limit_is_the_peak_at_the_highest_clock() -> None:
    h200 = DEVICES["h200-sxm"]
    assert h200.max_flops_per_s(DType.BF16, 1.83e9) == pytest.approx(989.4e12)
    assert h200.max_flops_per_s(DType.BF16, 1.98e9) == pytest.approx(
        132 * 4096 * 1.98e9, rel=1e-3
    )
    assert h200.max_flops_per_s(DType.FP32, 1.98e9) == h200.peak(DType.FP32)  # rated there


@ALL
def test_limit_grows_with_the_clock(device: DeviceSpec) -> None:
    for dtype, peak in device.peak_flops_per_s.items():
        rated = device.rated_clock(dtype)
        if rated is None:
            assert device.max_flops_per_s(dtype, 2e9) is None
        else:
            assert device.max_flops_per_s(dtype, rated) == pytest.approx(peak)
            assert device.max_flops_per_s(dtype, 1.1 * rated) == pytest.approx(1.1 * peak)


def test_no_limit_without_all_of_its_parts() -> None:
    h200 = DEVICES["h200-sxm"]
    assert h200.max_flops_per_s(DType.BF16, None) is None
    assert DEVICES["a100-80gb-sxm"].max_flops_per_s(DType.FP8_E4M3, 1.41e9) is None
    assert DEVICES["gb200"].max_flops_per_s(DType.BF16, 2e9) is None
    with pytest.raises(ValueError, match="positive or None"):
        h200.max_flops_per_s(DType.BF16, 0.0)


# Reading


def test_devices_are_read_only() -> None:
    h200 = DEVICES["h200-sxm"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        h200.tdp_w = 1.0  # type: ignore[misc]
    for mapping in (DEVICES, h200.peak_flops_per_s, h200.rated_clock_hz_of, h200.sources):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]


GOOD = """
[x]
names = ["X"]
vendor = "nvidia"
device_is = "one GPU"
tdp_w = 300
peak_flops_per_s = { bf16 = 1e12 }
sources = { peak_flops_per_s = "https://a.example/x", tdp_w = "https://a.example/x" }
"""


def test_the_smallest_entry_reads() -> None:
    device = parse_devices(GOOD)["x"]
    assert (device.names, device.peak(DType.BF16), device.tdp_w) == (("X",), 1e12, 300)
    assert device.hbm_bytes is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tdp_w = 300", "tdp = 300", "x: unknown field tdp"),
        ("tdp_w = 300", "tdp_w = 0", "x.tdp_w: 0 is not a positive number"),
        ("tdp_w = 300", "tdp_w = '300'", "is not a positive number"),
        ("tdp_w = 300", "", "x: a source but no figure for tdp_w"),
        ("tdp_w = 300", "tdp_w = 300\nl2_bytes = 1", "x: no source for l2_bytes"),
        (
            "tdp_w = 300",
            "tdp_w = 300\nlink_kind = 'NVLink'",
            "must be given together",
        ),
        ("tdp_w = 300", "tdp_w = 300\nrated_clock_hz_of.bf16 = 1", "needs rated_clock_hz"),
        ("tdp_w = 300", "tdp_w = 300\nrated_clock_hz_of.fp16 = 1", "no peak for fp16"),
        ('vendor = "nvidia"', "", "x: missing vendor"),
        ('["X"]', "[]", "x: names must be"),
        ("bf16 = 1e12", "bf17 = 1e12", "'bf17' is not one of fp64"),
        ("bf16 = 1e12", "bf16 = -1e12", "x.peak_flops_per_s.bf16: -1"),
        (
            '"https://a.example/x", tdp',
            '"", tdp',
            "peak_flops_per_s: '' is not an https",
        ),
    ],
)
def test_a_malformed_entry_is_named(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ValueError, match=message):
        parse_devices(GOOD.replace(old, new))


def test_a_name_of_two_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="y: name 'X' is also a name of x"):
        parse_devices(GOOD + GOOD.replace("[x]", "[y]"))


def test_a_device_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("hbm_bytes_per_s = 6e12\n[peak_flops_per_s]\nbf16 = 1500e12\n")
    device = find_device_by_alias(str(path))
    assert device is not None
    assert device.peak(DType.BF16) == 1500e12
    assert (device.key, device.names, device.hbm_bytes) == ("mine", ("mine",), None)
    assert find_device("mine") == find_device_by_alias("mine") == device
    path.write_text('names = ["NVIDIA H200"]\n[peak_flops_per_s]\nbf16 = 1e12\n')
    with pytest.raises(ConfigError, match="a name of its own: h200-sxm is known already"):
        find_device_by_alias(str(path))
    for text, expected in (
        ("speed = 3\n[peak_flops_per_s]\nbf16 = 1e12\n", "unknown field speed"),
        ("hbm_bytes = 3\n", "missing peak_flops_per_s"),
        ("[peak_flops_per_s]\nbf16 = -1\n", "not a positive number"),
        ("nonsense", "a TOML file"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            find_device_by_alias(str(path))
    with pytest.raises(ConfigError, match="a file that exists"):
        find_device_by_alias(str(tmp_path / "none.toml"))
