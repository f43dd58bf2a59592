"""State and memory of one device, for `stepmark doctor --nodes`."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepmark.ground.units import GIB, MIB, format_bytes, plural
from stepmark.measuring.nvidia import pci_bus_id
from stepmark.nodes.bench_doctor import Device, examine_device, warnings_of

# Alternating and constant bits as 64-bit words; with None a word holds its own address.
PATTERNS: tuple[int | None, ...] = (0, -1, 0x5555555555555555, ~0x5555555555555555, None)
SHARE = 0.9  # of the free memory of a GPU that is tested
CPU_BYTES = 128 * MIB  # of a rank on a CPU: host memory belongs to the whole machine
_BLOCK_BYTES = GIB
# Lines of the kernel that report a fault of a GPU: NVIDIA's driver, AMD's driver.
_FAULT = re.compile(r"NVRM: Xid|amdgpu.*(ring \w+ timeout|GPU reset|uncorrectable)")
_DMESG_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of a device at one moment. faults: the kernel's lines; None: not readable."""

    device: Device
    faults: tuple[str, ...] | None
    faults_reason: str  # why they are not readable


def state(kind: str) -> State:
    """Return the state of the first visible device, with the kernel's lines on it."""
    examined = examine_device(torch.device(kind, 0), 0)
    if kind == "cpu":
        return State(device=examined, faults=None, faults_reason="a CPU has none")
    address = pci_bus_id(0).rpartition(".")[0]
    lines, reason = _kernel_lines()
    faults = tuple(line for line in lines if _FAULT.search(line) and address in line)
    return State(device=examined, faults=None if reason else faults, faults_reason=reason)


def _kernel_lines() -> tuple[list[str], str]:
    """Return the lines of dmesg, or why they cannot be read."""
    if shutil.which("dmesg") is None:
        return [], "there is no dmesg"
    try:
        done = subprocess.run(
            ["dmesg"], capture_output=True, timeout=_DMESG_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return [], f"dmesg did not end within {_DMESG_S:.0f} s"
    if done.returncode:
        return [], (done.stderr.strip() or "dmesg failed").splitlines()[-1]
    return done.stdout.splitlines(), ""


def failures(before: State, after: State) -> list[str]:
    """Return what went wrong between two states, and faults that need a reset or a repair."""
    old = before.device.health
    new = after.device.health
    num_errors = (new.ecc_uncorrected or 0) - (old.ecc_uncorrected or 0)
    num_rows = (new.remapped_rows or 0) - (old.remapped_rows or 0)
    problems = {
        f"{num_errors} uncorrected ECC errors during the check": num_errors > 0,
        f"{num_rows} memory rows remapped during the check": num_rows > 0,
        "a memory row waits to be remapped: reset the GPU": new.remap_pending,
        "a memory row could not be remapped: replace the GPU": new.remap_failed,
    }
    texts = [text for text, is_seen in problems.items() if is_seen]
    if before.faults is not None:
        lines = (after.faults or ())[len(before.faults) :]
        texts += [f"during the check the kernel reported: {line}" for line in lines[:3]]
    return texts


def not_tested(state: State) -> list[str]:
    """Return what this device does not report, with the reason."""
    health = state.device.health
    facts = {
        "ECC errors: the device does not report them": health.ecc_uncorrected,
        "remapped memory rows: the device does not report them": health.remapped_rows,
        f"Xid messages of the kernel: {state.faults_reason}": state.faults,
    }
    return [text for text, fact in facts.items() if fact is None]


def facts(state: State) -> dict[str, str]:
    """Return what should be equal on all devices of a job, by name; without what is unknown.

    The generation of a PCIe link falls while it idles, so only the greatest one is a property.
    """
    info = state.device.info
    if info.num_sms is None:
        return {"CPU": info.name}
    links = state.device.links
    width = f"gen{links.pcie_max_generation}, x{links.pcie_width} of x{links.pcie_max_width}"
    num_links = links.num_fabric_links
    values = {
        "GPU": info.name,
        "memory of the GPU": info.memory_bytes and format_bytes(info.memory_bytes),
        "power limit": info.power_limit_w and f"{info.power_limit_w:.0f} W",
        "PCIe": links.pcie and width,
        f"{links.fabric} links": None if num_links is None else str(num_links),
    }
    return {name: value for name, value in values.items() if value}


def notes(before: State, after: State) -> list[str]:
    """Return present problems that do not fail a device, such as reasons of a low clock."""
    texts = [*warnings_of(before.device), *warnings_of(after.device)]
    if before.faults:
        texts.append(f"{len(before.faults)} faults in the kernel's log: {before.faults[-1]}")
    return [text.partition(": ")[2] or text for text in dict.fromkeys(texts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTest:
    """Result of a memory test: each byte was written and read once per pattern."""

    num_bytes: int
    num_patterns: int
    num_wrong: int  # wrong bytes over all patterns

    @property
    def text(self) -> str:
        size = format_bytes(self.num_bytes)
        patterns = plural(self.num_patterns, "pattern")
        return f"{self.num_wrong} wrong bytes in {size}, {patterns}"


def check_memory(
    kind: str,
    *,
    limit_s: float,
    num_bytes: int | None = None,
    between: Callable[[Sequence[Tensor]], object] = lambda blocks: None,
) -> MemoryTest:
    """Write patterns to most of the first visible device's free memory and read them back.

    It takes about limit_s at most.

    All blocks are written before the first is read, so that caches do not serve the reads and
    a wrong address line shows. num_bytes: the size instead. between: what runs between
    writing and reading.
    """
    device = torch.device(kind, 0)
    begin = time.monotonic()
    count = 0
    num_wrong = 0
    if num_bytes is None:
        is_cpu = kind == "cpu"
        num_bytes = CPU_BYTES if is_cpu else int(torch.cuda.mem_get_info(device)[0] * SHARE)
    size = min(_BLOCK_BYTES, max(8, num_bytes // 16))
    # But for the scratch block, the mask of a comparison, and its allocator's rounding.
    num_blocks = max(1, num_bytes // size - 2)
    blocks = [
        torch.empty(size // 8, dtype=torch.int64, device=device) for _ in range(num_blocks)
    ]
    scratch = torch.empty_like(blocks[0])
    firsts = range(0, num_blocks * len(scratch), len(scratch))
    for pattern in PATTERNS:
        spent_s = time.monotonic() - begin
        if count and spent_s * (count + 1) / count > limit_s:
            break
        for block, first in zip(blocks, firsts, strict=True):
            _fill(block, pattern, first)
        between(blocks)
        for block, first in zip(blocks, firsts, strict=True):
            _fill(scratch, pattern, first)
            wrong = block != scratch
            if wrong.any():
                expected = scratch[wrong].view(torch.uint8)
                num_wrong += int((block[wrong].view(torch.uint8) != expected).sum())
        count += 1
    num_tested = sum(block.nbytes for block in blocks)
    return MemoryTest(num_bytes=num_tested, num_patterns=count, num_wrong=num_wrong)


def _fill(words: Tensor, pattern: int | None, first: int) -> None:
    if pattern is None:
        torch.arange(first, first + len(words), out=words)
    else:
        words.fill_(pattern)
