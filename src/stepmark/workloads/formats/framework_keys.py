"""The keys of a framework's file for a workload, by the table that reads such files."""

from collections.abc import Iterator

from stepmark.framework_files.table import Keys, Table
from stepmark.step.workload import Workload
from stepmark.workloads.configured import options_of


def keys_of(workload: Workload, table: Table) -> Keys:
    """Return the keys. Raises ConfigError for a workload of another framework."""
    return table.write(*options_of(workload, table.framework))


def routing_omissions(workload: Workload) -> Iterator[str]:
    """Yield how tokens are routed, which is no key of any framework."""
    if "imbalance" in workload.settings:
        yield f"imbalance {workload.settings['imbalance']}: experts get as many rows"
