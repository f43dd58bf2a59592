"""The keys of a framework's file for a workload, by the table that reads such files."""

from stepmark.framework_files.table import Keys, Table
from stepmark.ground.errors import ConfigError
from stepmark.step.workload import Workload
from stepmark.workloads.configured import options_of
from stepmark.workloads.rules import RULES


def keys_of(workload: Workload, table: Table) -> Keys:
    """Return the keys. Raises ConfigError for a workload of another framework."""
    rule = RULES.get(workload.rules)
    if rule is None or rule.module != RULES[table.framework].module:
        allowed = f"one by the rules of {table.framework}, whose file this is"
        raise ConfigError("workload", workload.rules, allowed)
    return table.write(*options_of(workload))
