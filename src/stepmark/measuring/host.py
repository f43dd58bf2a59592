"""The host, its programs and its variables, determined without torch."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from stepmark import __version__
from stepmark.cases.record import DeviceInfo, Environment
from stepmark.ground.redaction import redact_variable

PREFIXES = (
    *("NCCL_", "RCCL_", "CUDA_", "HIP_", "ROCR_", "HSA_", "TORCH_", "PYTORCH_"),
    *("TORCHINDUCTOR_", "TORCHDYNAMO_"),
    *("OMP_", "KMP_", "MKL_", "GLOO_", "FI_", "UCX_", "SLURM_"),
    *("CUBLAS", "CUDNN_", "NVIDIA_TF32", "NVTE_"),
)


def environment(
    devices: Sequence[DeviceInfo], *, torch: str, versions: Mapping[str, str]
) -> Environment:
    """Return the environment of this host, with these devices and versions.

    torch: its version, "" where it is not installed.
    """
    system = platform.uname()
    return Environment(
        host=system.node,
        os=os_name(Path("/etc/os-release")),
        kernel=f"{system.system} {system.release}",
        cpu=cpu_name(Path("/proc/cpuinfo")),
        num_cores=num_cores(),
        memory_bytes=memory_bytes(),
        python=platform.python_version(),
        torch=torch,
        versions=dict(versions),
        devices=tuple(devices),
        # For a copy of the tree without its history.
        git_commit=os.environ.get("STEPMARK_COMMIT")
        or git_commit(Path(__file__).resolve().parents[3]),
        stepmark=__version__,
        variables=captured_variables(os.environ),
        warnings=device_warnings(devices),
    )


def compiler() -> str | None:
    """Return the C++ compiler that torch.compile would find."""
    return _program(os.environ.get("CXX", ""), "c++", "g++", "clang++")


def c_compiler() -> str | None:
    """Return the C compiler that compiles what this package has in C."""
    return _program(os.environ.get("CC", ""), "cc", "gcc", "clang")


def _program(*names: str) -> str | None:
    """Return the path of the first of these programs that is here."""
    return next((path for name in names if name and (path := shutil.which(name))), None)


def package_version(name: str) -> str:
    """Return the version from the package's metadata; "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def captured_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that control the measured libraries, secrets redacted."""
    names = sorted(name for name in variables if name.startswith(PREFIXES))
    return {name: redact_variable(name, variables[name]) for name in names}


def git_commit(root: Path) -> str:
    """Return the commit of the checkout at `root`, "+dirty" where its tree differs, or ""."""
    if not (root / ".git").exists():  # installed, perhaps inside someone else's checkout
        return ""
    commit = _git(root, "rev-parse", "HEAD")
    return commit + ("+dirty" if commit and _git(root, "status", "--porcelain") else "")


def _git(root: Path, *args: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def memory_bytes() -> int:
    """Return the size of the host's memory, or a container's smaller limit."""
    limit = cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def cache_bytes() -> int:
    """Return the size of the largest cache that Linux reports; 32 MiB where it reports none."""
    sizes_kib = [32 * 2**10]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes_kib.append(int(text[:-1]))
    return max(sizes_kib) * 2**10


def cgroup_limit(membership: Path, mount: Path) -> int | None:
    """Return the smallest memory.max from our cgroup (v2) to the root; None if unlimited."""
    lines = read_fact(membership).splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    groups = [mount / path, *(mount / path).parents]
    texts = [read_fact(group / "memory.max") for group in groups if group != mount.parent]
    limits = [int(text) for text in texts if text.isdigit()]
    return min(limits, default=None)


def cpu_name(cpuinfo: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", read_fact(cpuinfo), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def os_name(release: Path) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', read_fact(release), re.MULTILINE)
    return match[1] if match else platform.system()


def read_fact(path: Path) -> str:
    """Return the stripped text; "" if unreadable, as the speed of an interface that is down."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def device_warnings(devices: Sequence[DeviceInfo]) -> tuple[str, ...]:
    """Return the reasons why figures of these devices are hard to compare with others."""
    names = sorted({device.name for device in devices})
    texts = [f"mixed device models: {', '.join(names)}"] if len(names) > 1 else []
    for device in devices:
        where = f"{device.host or 'host'} device {device.index}"
        limit = device.power_limit_w
        default = device.default_power_limit_w
        if limit is not None and default is not None and limit < default:
            texts.append(f"{where}: power limited to {limit:.0f} W, default {default:.0f} W")
        if device.persistence is False:
            texts.append(f"{where}: persistence mode is off")
    return tuple(texts)
