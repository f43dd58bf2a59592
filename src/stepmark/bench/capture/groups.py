"""Process groups as digits of ranks' numbers."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from stepmark.core.workload import Group


class Groups:
    """Groups met so far, by their names in the workload."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._names: dict[str, str] = {}  # by the process group's own name, which is unique
        self.groups: dict[str, Group] = {}
        self.notes: list[str] = []

    def name(self, group: Any) -> str:
        """Of a mesh's axis the axis' name, of the default group "world"."""
        if group.group_name not in self._names:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._names[group.group_name] = self._new(_wanted(group), ranks)
        return self._names[group.group_name]

    def _new(self, wanted: str, ranks: tuple[int, ...]) -> str:
        """Groups of the same ranks and purpose are one."""
        for number in itertools.count(1):
            name = wanted if number == 1 else f"{wanted}-{number}"
            if self._ranks.setdefault(name, ranks) == ranks:
                break
        if name not in self.groups:
            self.groups[name] = self._group(name, ranks)
        return name

    def _group(self, name: str, ranks: tuple[int, ...]) -> Group:
        found = Group(digits=digits(ranks))
        if found.members(self._rank) != ranks:
            found = Group(digits=((len(ranks), 1),))
            shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            self.notes.append(
                f"group {name} is ranks {shown}, which no digits of a rank's number tell:"
                f" {len(ranks)} neighbours stand for it"
            )
        return found


def digits(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(size, stride) of each digit that differs, fastest first, if ranks are of this form."""
    found: list[tuple[int, int]] = []
    left = [rank - ranks[0] for rank in ranks]
    while len(left) > 1:
        stride = left[1]
        if stride < 1:
            break
        size = next(
            (at for at, one in enumerate(left) if one != at * stride),
            len(left),
        )
        found.append((size, stride))
        left = left[::size]
    return tuple(found) or ((1, 1),)


def _wanted(group: Any) -> str:
    described = group.group_desc
    if described == "default_pg":
        return "world"
    if described in ("", "undefined"):
        return f"group_{group.group_name}"
    return str(described).removeprefix("mesh_")
