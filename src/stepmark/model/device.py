"""Limits of devices: dense peaks, memory and links, read from data/hardware.toml.

That file defines units and conventions and gives a source for every figure.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.package_data import data_text
from stepmark.ground.read_text import read_toml

_PEAK = "peak_flops_per_s"
_CLOCK_OF = "rated_clock_hz_of"
_TEXTS = ("vendor", "device_is")
_FIGURES = (
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
_REQUIRED = {"names", *_TEXTS, _PEAK, "sources"}
_KEYS = _REQUIRED | {"aliases", "capability", _CLOCK_OF, *_FIGURES, "link_kind"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Data sheet of one device as torch counts devices. None: no source states the figure."""

    key: str
    names: tuple[str, ...]  # exact names in torch, NVML or amdsmi
    vendor: str
    device_is: str  # "one GPU", "one GCD, half a card"
    peak_flops_per_s: Mapping[DType, float]  # dense, of a matrix multiplication
    rated_clock_hz: float | None = None  # clock of the 16-bit peak
    # Types rated otherwise.
    rated_clock_hz_of: Mapping[DType, float] = field(default_factory=dict)
    hbm_bytes_per_s: float | None = None
    hbm_bytes: int | None = None
    l2_bytes: int | None = None  # of the whole device; torch reports one die's on MI300X
    l3_bytes: int | None = None  # Infinity Cache
    link_kind: str | None = None
    link_bytes_per_s: float | None = None  # per direction, all links of the device
    link_domain: int | None = None  # devices that these links connect; None: those of a host
    pcie_bytes_per_s: float | None = None  # per direction; of devices that bridges join
    host_bytes_per_s: float | None = None  # per direction, of copies from and to the host
    tdp_w: float | None = None
    aliases: tuple[str, ...] = ()  # as people call it
    capability: tuple[int, int] = (0, 0)  # as torch.cuda.get_device_capability has it
    sources: Mapping[str, str]  # figure -> URL

    @property
    def last_level_cache_bytes(self) -> int | None:
        """Return the size that a working set must far exceed for its bytes to come from HBM."""
        return self.l2_bytes if self.l3_bytes is None else self.l3_bytes

    @property
    def host_link_bytes_per_s(self) -> float | None:
        """Return the rate of copies from and to the host's memory, per direction."""
        return self.host_bytes_per_s or self.pcie_bytes_per_s

    def peak(self, dtype: DType) -> float | None:
        """Return dense FLOP/s at the rated clock; None for a type without a stated peak."""
        return self.peak_flops_per_s.get(dtype)

    def rated_clock(self, dtype: DType) -> float | None:
        """Return the clock in Hz of peak(dtype). On Hopper fp32 is rated above bf16."""
        return self.rated_clock_hz_of.get(dtype, self.rated_clock_hz)

    def max_flops_per_s(self, dtype: DType, max_clock_hz: float | None) -> float | None:
        """Return the upper limit of executed FLOP/s: peak x max clock / rated clock.

        max_clock_hz is the highest clock the device can run at (NVML: max SM clock), not the
        current one and not an average.

        The limit is None if the peak, the rated clock or max_clock_hz is unknown. The peak
        itself is not a limit: an H100 is rated at 1.83 GHz but runs short work at up to
        1.98 GHz, and then exceeds its bf16 peak.
        """
        peak = self.peak(dtype)
        rated_hz = self.rated_clock(dtype)
        if peak is None or rated_hz is None or max_clock_hz is None:
            return None
        if max_clock_hz <= 0:
            raise ValueError(f"max_clock_hz must be positive or None, got {max_clock_hz}")
        return peak * max_clock_hz / rated_hz


@cache
def load_devices() -> Mapping[str, DeviceSpec]:
    """Return all devices by key, read-only."""
    return MappingProxyType(parse_devices(data_text("hardware.toml")))


def find_device(name: str) -> DeviceSpec | None:
    """Return the device with exactly this name, or None; never a similar one."""
    known = (*load_devices().values(), *_own_devices.values())
    return next((spec for spec in known if name in spec.names), None)


def find_device_by_alias(text: str) -> DeviceSpec | None:
    """Return the device of this key, alias or reported name, whatever its case, or of a file.

    Raises ConfigError for a file that is none of a device.
    """
    if text.endswith(".toml"):
        return _read_device(Path(text))
    alias = text.strip().lower()
    for device in (*load_devices().values(), *_own_devices.values()):
        names = (device.key, *device.aliases, *device.names)
        if alias in map(str.lower, names):
            return device
    return None


_own_devices: dict[str, DeviceSpec] = {}  # of users' files, by key


def _read_device(path: Path) -> DeviceSpec:
    """Return the device of a file, which find_device then knows by its name.

    It has the keys of a table of hardware.toml; only peak_flops_per_s has to be given.
    """
    table = read_toml(path, "device")
    try:
        defaults = {"names": [path.stem], "vendor": "nvidia", "device_is": "one GPU"}
        device = _device(path.stem, {**defaults, **table}, needs_sources=False)
    except ValueError as error:
        raise ConfigError("device", path, f"a file of a device: {error}") from None
    others = [spec for name in device.names if (spec := find_device(name))]
    if others and others != [_own_devices.get(device.key)]:
        allowed = f"a file with a name of its own: {others[0].key} is known already"
        raise ConfigError("device", path, allowed)
    _own_devices[device.key] = device
    return device


def unknown_device(
    name: str, *others: str, note: str = "", field: str = "device"
) -> ConfigError:
    """Return the error of a device that nobody knows. others: more names that are valid."""
    devices = load_devices()
    aliases = (alias for device in devices.values() for alias in device.aliases)
    return not_one_of(field, name, (*others, *devices, *aliases), note)


def parse_devices(text: str) -> dict[str, DeviceSpec]:
    """Parse the text of hardware.toml. Raise ValueError that names the malformed entry."""
    devices = {key: _device(key, table) for key, table in tomllib.loads(text).items()}
    owner: dict[str, str] = {}
    for device in devices.values():
        for name in device.names:
            if name in owner:
                raise ValueError(f"{device.key}: name {name!r} is also a name of {owner[name]}")
            owner[name] = device.key
    return devices


def _device(key: str, table: dict[str, Any], *, needs_sources: bool = True) -> DeviceSpec:
    if unknown := table.keys() - _KEYS:
        raise ValueError(f"{key}: unknown field {', '.join(sorted(unknown))}")
    required = _REQUIRED if needs_sources else _REQUIRED - {"sources"}
    if missing := required - table.keys():
        raise ValueError(f"{key}: missing {', '.join(sorted(missing))}")
    figures = {name: table[name] for name in _FIGURES if name in table}
    for name, value in figures.items():
        _check_positive(f"{key}.{name}", value)
    peaks = _by_dtype(f"{key}.{_PEAK}", table[_PEAK])
    clocks = _by_dtype(f"{key}.{_CLOCK_OF}", table.get(_CLOCK_OF, {}))
    stray = clocks.keys() - peaks.keys()
    names = table["names"]
    aliases = table.get("aliases", [])
    capability = table.get("capability", [0, 0])
    rules = {
        ": names must be one or more non-empty strings": names
        and all(isinstance(name, str) and name for name in names),
        ": link_kind and link_bytes_per_s must be given together": ("link_kind" in table)
        == ("link_bytes_per_s" in table),
        f".{_CLOCK_OF}: no peak for {', '.join(sorted(stray))}": not stray,
        f": {_CLOCK_OF} needs rated_clock_hz": not clocks or "rated_clock_hz" in table,
        ": aliases must be words in lower case": isinstance(aliases, list)
        and all(isinstance(alias, str) and alias.islower() for alias in aliases),
        ": capability must be two whole numbers": isinstance(capability, list)
        and [type(number) for number in capability] == [int, int],
    }
    for text, is_kept in rules.items():
        if not is_kept:
            raise ValueError(f"{key}{text}")
    own_sources = table.get("sources", {})
    if needs_sources:
        named = {f"{_PEAK}.{dtype}" for dtype in peaks}
        _check_sources(key, own_sources, {*figures, _PEAK}, named)
    return DeviceSpec(
        key=key,
        names=tuple(names),
        **{name: table[name] for name in _TEXTS},
        peak_flops_per_s=peaks,
        rated_clock_hz_of=clocks,
        **figures,
        link_kind=table.get("link_kind"),
        aliases=tuple(aliases),
        capability=(capability[0], capability[1]),
        sources=MappingProxyType(dict(own_sources)),
    )


def _by_dtype(where: str, table: dict[str, Any]) -> Mapping[DType, float]:
    for name, value in table.items():
        if name not in set(DType):
            raise ValueError(f"{where}: {name!r} is not one of {', '.join(DType)}")
        _check_positive(f"{where}.{name}", value)
    return MappingProxyType({DType(name): float(value) for name, value in table.items()})


def _check_positive(where: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{where}: {value!r} is not a positive number")


def _check_sources(key: str, sources: dict[str, Any], needed: set[str], more: set[str]) -> None:
    if missing := needed - sources.keys():
        raise ValueError(f"{key}: no source for {', '.join(sorted(missing))}")
    if stray := sources.keys() - needed - more:
        raise ValueError(f"{key}: a source but no figure for {', '.join(sorted(stray))}")
    for name, url in sources.items():
        if not isinstance(url, str) or not url.startswith("https://"):
            raise ValueError(f"{key}.sources.{name}: {url!r} is not an https URL")
