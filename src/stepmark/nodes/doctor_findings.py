"""What `stepmark doctor` reports, and as much of it as is known without torch."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.cases.record import Environment
from stepmark.ground.packages import missing_package
from stepmark.measuring import host

if TYPE_CHECKING:
    from stepmark.nodes.bench_doctor import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network interface or InfiniBand port."""

    name: str
    kind: str  # "net" or "infiniband"
    state: str
    rate: str  # as the kernel reports it, e.g. "400 Gb/sec (4X NDR)"; "" unknown

    @property
    def is_up(self) -> bool:
        return self.state in ("up", "active")

    @property
    def bytes_per_s(self) -> float | None:
        """Return the rate as a number; None where it is not known."""
        number, _, unit = self.rate.partition(" ")
        return float(number) * 1e9 / 8 if unit.startswith("Gb/s") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Support of one backend of one family on this machine."""

    family: str
    backend: str
    dtype: str
    reason: str | None  # why it would be skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Support of one transport of `stepmark comm` on this machine."""

    api: str
    backend: str
    reason: str | None  # why not
    note: str = ""  # its description, or "written, not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The report of `stepmark doctor`."""

    environment: Environment
    devices: tuple["Device", ...]
    peer_access: tuple[tuple[bool, ...], ...]  # [from][to]; a device reaches itself
    nics: tuple[Nic, ...]
    backends: tuple[Backend, ...]
    transports: tuple[Transport, ...]
    shm_bytes: int | None
    compiler: str | None
    warnings: tuple[str, ...]


def examine_without_torch() -> Findings:
    """Examine the host alone, where nothing can be measured."""
    problem = f"no device is listed and nothing can be measured: {missing_package('torch')}"
    return Findings(
        environment=host.environment((), torch="", versions={}),
        devices=(),
        peer_access=(),
        nics=nics(Path("/sys/class")),
        backends=(),
        transports=(),
        shm_bytes=shm_bytes(),
        compiler=host.compiler(),
        warnings=(problem,),
    )


def shm_bytes() -> int | None:
    """Return the size of /dev/shm, which NCCL and data loaders share."""
    shm = Path("/dev/shm")
    return shutil.disk_usage(shm).total if shm.is_dir() else None


def nics(root: Path) -> tuple[Nic, ...]:
    """Return network interfaces except lo, then InfiniBand ports, from /sys/class."""
    ports = []
    for path in sorted((root / "net").glob("*")):
        if path.name != "lo" and path.is_dir():
            # Mb/s; -1 or unreadable where there is no link
            speed = host.read_fact(path / "speed")
            rate = f"{int(speed) / 1000:g} Gb/s" if speed.isdigit() and int(speed) else ""
            state = host.read_fact(path / "operstate")
            ports.append(Nic(name=path.name, kind="net", state=state, rate=rate))
    for port in sorted((root / "infiniband").glob("*/ports/*")):
        name = f"{port.parent.parent.name}:{port.name}"
        state = host.read_fact(port / "state").partition(": ")[2].lower()
        ports.append(
            Nic(name=name, kind="infiniband", state=state, rate=host.read_fact(port / "rate"))
        )
    return tuple(ports)
