"""stepmark doctor: this machine, and what stepmark would measure on it or skip, and why."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import dashed, plain
from stepmark.ground.packages import is_installed
from stepmark.ground.units import GB, TFLOP, format_bytes
from stepmark.ground.waiting import Waiting
from stepmark.measuring.delivery import write_files
from stepmark.nodes.doctor_findings import Findings, examine_without_torch
from stepmark.nodes.node_options import DoctorOptions

if TYPE_CHECKING:
    from stepmark.measuring.nvidia import Health, Links
    from stepmark.nodes.bench_doctor import Device

OK = "ok"
WARNING = "warning"
MISSING = "missing"
STYLE = {OK: "green", WARNING: "yellow", MISSING: "dim"}
PACKAGES = ("triton", "flash_attn", "transformer_engine", "torchao")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the report; also one row of the CSV."""

    section: str
    item: str
    mark: str
    detail: str


def run(options: DoctorOptions) -> int:
    """Examine the machine, print the report and write the files of --json and --csv.

    With --nodes check it for a job instead. Returns the exit code.
    """
    options.check_stdout()
    if options.nodes:
        from stepmark.nodes import node_check_verb  # noqa: PLC0415 - 90 ms

        return node_check_verb.run(options)
    outer_launcher.leave_hosts()
    for name, value in plain(options).items():
        if name not in ("json", "csv"):
            raise ConfigError(dashed(name), value, "only with --nodes")
    findings = _examine()
    report = list(lines(findings))
    draw(report, to_stderr=options.to_stdout)
    rows = [asdict(line) for line in report]
    write_files(options, "doctor", msgspec.to_builtins(findings), rows)
    return 0


def _examine() -> Findings:
    if not is_installed("torch"):
        return examine_without_torch()
    with Waiting("importing torch and examining the devices"):
        from stepmark.nodes.bench_doctor import examine  # noqa: PLC0415 - torch

        return examine()


def draw(report: list[Line], *, to_stderr: bool) -> None:
    """Print a table per section. Names are plain text, in which brackets are no markup."""
    console = Console(stderr=to_stderr, markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200  # a file needs no folding
    for section in dict.fromkeys(line.section for line in report):
        console.print(Text(section, style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for line in report:
            if line.section == section:
                mark = Text(line.mark, style=STYLE[line.mark])
                table.add_row(mark, Text(line.item), Text(line.detail))
        console.print(table)
        console.print()


def lines(findings: Findings) -> Iterator[Line]:
    """Yield the whole report, with warnings last."""
    yield from host_lines(findings)
    for device in findings.devices:
        yield from device_lines(device)
    yield from fabric_lines(findings)
    for backend in findings.backends:
        item = f"{backend.family} {backend.backend} {backend.dtype}"
        yield support_line("Operators", item, backend.reason)
    for transport in findings.transports:
        item = f"--api {transport.api} --backend {transport.backend}"
        yield support_line("Collectives", item, transport.reason, transport.note)
    for text in findings.warnings:
        yield Line(section="Warnings", item="", mark=WARNING, detail=text)
    if not findings.warnings:
        yield Line(section="Warnings", item="", mark=OK, detail="none")


def host_lines(findings: Findings) -> Iterator[Line]:
    env = findings.environment
    facts = {
        "host": f"{env.host}: {env.os}, {env.kernel}",
        "cpu": f"{env.cpu}, {env.num_cores} cores usable",
        "memory": format_bytes(env.memory_bytes),
        "/dev/shm": "" if findings.shm_bytes is None else format_bytes(findings.shm_bytes),
        "C++ compiler": findings.compiler or "",
    }
    yield from (fact("Host", item, detail) for item, detail in facts.items())
    software = {
        "stepmark": f"{env.stepmark}, commit {env.git_commit or 'unknown'}",
        "python": env.python,
        "torch": env.torch,
        **dict.fromkeys(PACKAGES, ""),
        **env.versions,
    }
    yield from (fact("Software", item, detail) for item, detail in software.items())


def fact(section: str, item: str, detail: str) -> Line:
    return Line(
        section=section,
        item=item,
        mark=OK if detail else MISSING,
        detail=detail or "not found",
    )


def device_lines(device: "Device") -> Iterator[Line]:
    info = device.info
    section = f"Device {device.info.index}: {device.info.name}"
    if device.note:
        yield Line(section=section, item="this path", mark=WARNING, detail=device.note)
    if device.peak_reason:
        yield Line(section=section, item="peak", mark=MISSING, detail=device.peak_reason)
    for dtype, peak in device.peak_flops_per_s.items():
        yield fact(section, f"peak {dtype}", f"{peak / TFLOP:.5g} TFLOP/s dense")
    if device.hbm_bytes_per_s:
        yield fact(section, "peak memory", f"{device.hbm_bytes_per_s / GB:.5g} GB/s")
    memory = format_bytes(info.memory_bytes) if info.memory_bytes else ""
    yield fact(section, "memory", memory)
    now = device.now
    clock = f"{figure(now.sm_clock_hz, 1e6)} of {figure(info.max_sm_clock_hz, 1e6)} MHz now"
    yield fact(section, "clock", clock if now.sm_clock_hz else "")
    if info.num_sms is None:
        return  # a CPU
    limits = (
        f"limit {figure(info.power_limit_w)} W, default {figure(info.default_power_limit_w)} W"
    )
    power = f"{figure(now.power_w)} W now, {limits}, {figure(now.temperature_c)} C"
    yield fact(section, "power", power if now.power_w is not None else "")
    yield fact(section, "links", link_text(device.links))
    yield fact(section, "health", health_text(device.health))
    if now.throttle:
        yield fact(section, "clock reasons", ", ".join(now.throttle))


def figure(value: float | None, unit: float = 1.0) -> str:
    return "?" if value is None else f"{value / unit:.0f}"


def link_text(links: "Links") -> str:
    most = f"gen{links.pcie_max_generation} x{links.pcie_max_width}"
    pcie = f"PCIe {links.pcie} (max {most})" if links.pcie else ""
    count = links.num_fabric_links
    fabric = f"{links.fabric} " + ("not reported" if count is None else f"{count} links active")
    return ", ".join(part for part in (pcie, fabric if links.fabric else "") if part)


def health_text(health: "Health") -> str:
    facts = {
        "ECC": health.ecc,
        "uncorrected errors": health.ecc_uncorrected,
        "rows remapped": health.remapped_rows,
        "remap pending": health.remap_pending,
        "persistence": health.persistence,
        "power throttled s": health.power_throttled_s,
        "thermal throttled s": health.thermal_throttled_s,
    }
    words = {True: "on", False: "off"}
    return ", ".join(
        f"{name} {words[value] if isinstance(value, bool) else f'{value:.4g}'}"
        for name, value in facts.items()
        if value is not None
    )


def fabric_lines(findings: Findings) -> Iterator[Line]:
    for nic in findings.nics:
        mark = OK if nic.is_up else MISSING
        detail = f"{nic.state or 'state unknown'}, {nic.rate or 'rate unknown'}"
        yield Line(section="Network", item=nic.name, mark=mark, detail=detail)
    if len(findings.peer_access) > 1:
        for index, row in enumerate(findings.peer_access):
            blocked = [str(other) for other, reached in enumerate(row) if not reached]
            detail = f"no access to {', '.join(blocked)}" if blocked else "all"
            mark = WARNING if blocked else OK
            yield Line(section="Peer access", item=f"GPU {index}", mark=mark, detail=detail)


def support_line(section: str, item: str, reason: str | None, note: str = "") -> Line:
    if reason:
        return Line(section=section, item=item, mark=MISSING, detail=f"skipped: {reason}")
    return Line(
        section=section,
        item=item,
        mark=OK,
        detail=f"would be measured ({note})" if note else "would be measured",
    )
