"""A shell script with Megatron-LM's arguments, of a workload that its rules made."""

from collections.abc import Iterator, Sequence

from stepmark.framework_files import megatron
from stepmark.step.workload import Workload
from stepmark.workloads.formats.framework_keys import keys_of, routing_omissions


def check(workload: Workload) -> None:
    """Raise ConfigError for a workload that no arguments make."""
    keys_of(workload, megatron.TABLE)


def write(workload: Workload) -> Iterator[str]:
    """Yield the script."""
    yield megatron.script(keys_of(workload, megatron.TABLE))


def omissions(workload: Workload, stages: Sequence[int]) -> Iterator[str]:
    """Yield what no argument decides; else reading the file generates the same workload."""
    yield from routing_omissions(workload)
