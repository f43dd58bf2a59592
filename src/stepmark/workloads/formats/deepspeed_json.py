"""DeepSpeed's JSON, of a workload that its rules made. The file names no model."""

from collections.abc import Iterator, Sequence

from stepmark.framework_files import deepspeed
from stepmark.step.workload import Workload
from stepmark.workloads.formats.framework_keys import keys_of


def check(workload: Workload) -> None:
    """Raise ConfigError for a workload that no such file makes."""
    keys_of(workload, deepspeed.TABLE)


def write(workload: Workload) -> Iterator[str]:
    """Yield the file."""
    yield deepspeed.text(keys_of(workload, deepspeed.TABLE))


def omissions(workload: Workload, stages: Sequence[int]) -> Iterator[str]:
    """Yield what the file does not have."""
    name = workload.model.name if workload.model else workload.name
    yield f"the model ({name}) and its sequence length"
