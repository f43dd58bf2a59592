"""The device of a plan, determined without torch: this machine's, or one by its name."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.packages import require
from stepmark.ground.waiting import Waiting
from stepmark.measuring import job
from stepmark.model.device import find_device_by_alias, unknown_device

_USUAL_HOST = 8  # accelerators
_MAX_CPU_RANKS = 1024
_TORCH_LIMIT_S = 120.0  # importing torch from a slow disk, and waking all drivers
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
cards = [torch.cuda.get_device_properties(index) for index in range(count)]
print(json.dumps([[card.name, card.total_memory, [card.major, card.minor]] for card in cards]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The accelerators or the CPU that cases are planned for."""

    device: str  # cuda or cpu
    name: str = ""  # of its accelerators, as they report it
    num_accelerators: int | None = 0  # None: of a device that is only named
    memory_bytes: int | None = None  # of one accelerator
    capability: tuple[int, int] = (0, 0)
    is_rocm: bool = False
    is_here: bool = True
    assumes_host: bool = False  # without --nproc, plan for a usual host of the named device

    def num_ranks(self, nproc: str | None, default: str = "1") -> int:
        """Return --nproc, the ranks of all hosts; under an outer launcher its world.

        Without --nproc a job has the ranks per host that its script names. Raises ConfigError.
        """
        if outer_launcher.is_rank():
            return outer_launcher.num_ranks()
        here = job.current()
        num_hosts = here.num_hosts if here else 1
        if nproc is None and here is not None and here.nproc is not None:
            return num_hosts * self._count(here.nproc, 1)
        if self.num_accelerators is None and (nproc or default) == "all":
            allowed = f"the number of ranks, because no {self.name} is on this machine"
            if nproc or not self.assumes_host:
                raise ConfigError("nproc", nproc, allowed)
            sys.stderr.write(f"# {_USUAL_HOST} ranks are assumed: give --nproc for others\n")
            return _USUAL_HOST
        count = self._count(nproc or default, num_hosts)
        if count > 1 and count % num_hosts:
            raise ConfigError("nproc", count, f"a multiple of the {num_hosts} hosts")
        return count

    @staticmethod
    def ranks_per_host(num_ranks: int) -> int:
        """Return how many of these ranks a host has, as far as the launcher says."""
        if outer_launcher.is_rank():
            return outer_launcher.num_local_ranks() or num_ranks
        here = job.current()
        return num_ranks // here.num_hosts if here else num_ranks

    def _count(self, text: str, num_hosts: int) -> int:
        if self.num_accelerators is None:
            most = 2**20
        else:
            per_host = self.num_accelerators if self.device == "cuda" else _MAX_CPU_RANKS
            most = per_host * num_hosts
        if text == "all":
            return most if self.device == "cuda" else num_hosts
        if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
            raise ConfigError("nproc", text, f"all, or from 1 to {most}")
        return int(text)


def machine(device: str | None, *, dry_run: bool = False) -> Machine:
    """Return this machine with its accelerators or its CPU, as --device says.

    A dry run accepts the name of any device in data/hardware.toml. Raises ConfigError.
    """
    if device in (None, "cuda", "cpu"):
        cards = [] if device == "cpu" else _cards()
        if not cards and device != "cpu" and (device == "cuda" or _has_driver()):
            require("torch")  # accelerators that it cannot list are not none
        if device == "cuda" and not cards:
            allowed = "cpu, since torch finds no accelerator here (or h200, ... with --dry-run)"
            raise ConfigError("device", "cuda", allowed)
        return _machine_of(cards)
    spec = find_device_by_alias(str(device))
    if spec is None:
        note = "; all but cuda and cpu need --dry-run"
        raise unknown_device(device, "cuda", "cpu", note=note)
    cards = _cards()
    if cards and cards[0].name in spec.names:
        return _machine_of(cards)
    if not dry_run:
        here = cards[0].name if cards else "a CPU"
        allowed = f"cuda or cpu: this machine has {here}; other names are for --dry-run"
        raise ConfigError("device", device, allowed)
    return Machine(
        device="cuda",
        name=spec.names[0],
        num_accelerators=None,
        memory_bytes=spec.hbm_bytes,
        capability=spec.capability,
        is_rocm=spec.vendor == "amd",
        is_here=False,
        assumes_host=dry_run,
    )


def _machine_of(cards: list[Machine]) -> Machine:
    """Return the machine with these accelerators, of which each is like the first."""
    if not cards:
        return Machine(device="cpu")
    return replace(cards[0], num_accelerators=len(cards), is_rocm=_torch_is_for("hip"))


def _has_driver() -> bool:
    """Return whether a driver of accelerators may be here, by its device files."""
    # Of NVIDIA, AMD, Tegra, WSL; other systems may have none.
    drivers = ("nvidia*", "kfd", "nvhost*", "nvmap", "dxg")
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in drivers)


@cache
def _cards() -> list[Machine]:
    """Return the accelerators that torch will see, in no particular order."""
    if not _has_driver():
        return []
    if not (_torch_is_for("cuda") or _torch_is_for("hip")):
        return []
    cards = _nvidia_cards() if _torch_is_for("cuda") else None
    return _asked_of_torch() if cards is None else cards


def _torch_is_for(toolkit: str) -> bool:
    """Read torch/version.py without importing torch. True where it does not state it."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        match = re.search(rf"^{toolkit}\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
        return match is None or match[1].strip() != "None"
    return True


def _nvidia_cards() -> list[Machine] | None:
    """Return None where NVML is unavailable or lists other devices than torch would."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", visible):
        return None if visible.strip() else []  # UUIDs, MIG slices, -1: torch has the rules
    try:
        import pynvml as nvml  # noqa: PLC0415
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        if any(_is_sliced(nvml, handle) for handle in handles):
            return None
        if visible is not None:
            indices = [int(word) for word in visible.split(",")]
            if len(set(indices)) < len(indices) or max(indices) >= len(handles):
                return None
            handles = [handles[index] for index in indices]
        return [
            Machine(
                device="cuda",
                name=str(nvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            for handle in handles
        ]
    except nvml.NVMLError:
        return None


def _is_sliced(nvml: Any, handle: object) -> bool:
    """Return whether a card is in MIG mode, in which torch sees its slices."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False


def _asked_of_torch() -> list[Machine]:
    """List the devices of torch in another process, because importing it takes seconds."""
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        with Waiting("asking torch for the devices of this machine"):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False
            )
    except subprocess.TimeoutExpired:
        raise StepmarkError(
            f"torch did not list the devices of this machine within {_TORCH_LIMIT_S:.0f} s: "
            "a driver may hang; --device cpu does not ask it."
        ) from None
    try:
        rows = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return []
    return [
        Machine(device="cuda", name=name, memory_bytes=memory, capability=(major, minor))
        for name, memory, (major, minor) in rows
    ]
