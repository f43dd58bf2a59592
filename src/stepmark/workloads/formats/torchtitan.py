"""torchtitan's TOML, of a workload that PyTorch's rules made."""

from collections.abc import Iterator, Sequence

from stepmark.framework_files import torchtitan
from stepmark.step.workload import Workload
from stepmark.workloads.formats.framework_keys import keys_of, routing_omissions


def check(workload: Workload) -> None:
    """Raise ConfigError for a workload that no such file makes."""
    keys_of(workload, torchtitan.TABLE)


def write(workload: Workload) -> Iterator[str]:
    """Yield the file."""
    keys = keys_of(workload, torchtitan.TABLE)
    keys.pop(_FUSED, None)
    yield torchtitan.toml(keys)


def omissions(workload: Workload, stages: Sequence[int]) -> Iterator[str]:
    """Yield what torchtitan does otherwise."""
    yield from routing_omissions(workload)
    if _FUSED in keys_of(workload, torchtitan.TABLE):
        yield "fuse-qkv: q, k and v are three products (--no-fuse-qkv)"


_FUSED = "model.fused_qkv"
