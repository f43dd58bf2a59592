"""A generated workload's messages in SimAI's words."""

from collections.abc import Mapping

from stepmark.core.collectives import Collective
from stepmark.core.workload import CommOp, Workload
from stepmark.workload.formats.aicb_names import group_names
from stepmark.workload.formats.simai_row import TYPE_OF

# AICB's groups by SimAI's suffix: of messages within a pass, and of those of the whole step.
_PASS = {"tp_group": "", "ep_group": "_EP"}
_GRADIENTS = {"dp_group": "", "ep_dp_group": "_DP_EP"}


class Messages:
    """SimAI's words for a workload's messages; None: it has none."""

    def __init__(self, workload: Workload) -> None:
        self._names = group_names(workload)
        self._groups = workload.groups

    def in_pass(self, op: CommOp) -> str | None:
        return self._type(op, _PASS)

    def of_step(self, op: CommOp) -> str | None:
        return self._type(op, _GRADIENTS)

    def num_bytes(self, op: CommOp) -> int:
        return op.message_bytes(self._groups[op.group])

    def _type(self, op: CommOp, suffixes: Mapping[str, str]) -> str | None:
        """SimAI 1.6 and 1.7 take a broadcast for nothing."""
        suffix = suffixes.get(self._names.get(op.group, ""))
        known = op.collective in TYPE_OF and op.collective != Collective.BROADCAST
        return TYPE_OF[op.collective] + suffix if known and suffix is not None else None
