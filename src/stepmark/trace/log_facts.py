"""Collects the facts of a debug log while it is read, and hands them out at the end."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from stepmark.core.log_facts import (
    Communicator,
    GpuDirect,
    Interface,
    LogFacts,
    Member,
    NicUse,
    Plugin,
    Prediction,
    Remark,
    Seen,
    Transport,
)
from stepmark.trace.log_calls import Calls, Handle, histogram
from stepmark.trace.log_mismatch import Sequences
from stepmark.trace.log_said import Handles, Link, Notes, Said
from stepmark.trace.log_tuning import Choices, Tables

_MOST_REMARKS = 500
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_GPUDIRECT = re.compile(
    r"^(?:NET/(.+?) ?: )?GPU Direct RDMA (Enabled|Disabled) for (?:GPU (\S+) / )?"
    r"HCA (\S+?)(?: '([^']*)')?(?: \(distance (\w+) (?:<=|>) (\w+)\))?(?:[, ].*)?$"
)

Key = TypeVar("Key")


class Collector:
    """All trackers of one reading. Handlers of lines write into it."""

    def __init__(self) -> None:
        self.handles = Handles()
        self.calls = Calls()
        self.tables = Tables()
        self.choices = Choices()
        self.hosts: dict[str, None] = {}
        self.processes: dict[str, None] = {}
        self.versions: dict[tuple[str, str], Notes] = {}
        self.environment: dict[tuple[str, str], Notes] = {}
        self.networks: dict[str, Notes] = {}
        self.nvls: dict[bool, Notes] = {}
        self.warnings: dict[str, tuple[str, Notes]] = {}
        self.harmless: dict[str, tuple[str, Notes]] = {}
        self.p2p_disabled: dict[str, tuple[str, Notes]] = {}
        # [lines of the sending side, of the receiving side, first line]
        self.links: dict[tuple[int, Link], tuple[list[int], Said]] = {}
        self.nics: dict[tuple[int, int, int], tuple[list[int], Said]] = {}
        self.forget_cells: Callable[[], None] = lambda: None
        self._plugins: dict[tuple[str, str, str, int | None], Notes] = {}
        self._interfaces: dict[tuple[str, str, str], tuple[dict[str, None], Notes]] = {}
        self._gpudirect: dict[tuple[bool, str, str, str | None, str | None], Notes] = {}

    def say(self, table: dict[Key, Notes], key: Key, said: Said) -> None:
        """Note a line under what it says."""
        table.setdefault(key, Notes()).add(said)

    def plugin_said(
        self, said: Said, kind: str, event: str, name: str, api: int | None
    ) -> None:
        self.say(self._plugins, (kind, event, name, api), said)

    def interface_said(self, said: Said, role: str, name: str, address: str) -> None:
        hosts, notes = self._interfaces.setdefault((role, name, address), ({}, Notes()))
        hosts[said.host] = None
        notes.add(said)

    def gpudirect_said(self, said: Said) -> None:
        found = _GPUDIRECT.match(said.text)
        if found:
            net, state, gpu, index, name, distance, level = found.groups()
            device = name or (f"GPU {gpu} / HCA {index}" if gpu else f"HCA {index}")
            key = (state == "Enabled", net or "", device, distance, level)
        else:
            key = (False, "OFI", said.text, None, None)
        self.say(self._gpudirect, key, said)

    def remark(self, table: dict[str, tuple[str, Notes]], text: str, said: Said) -> None:
        """Note a line among those that are alike but for numbers."""
        key = _NUMBER.sub("#", text)[:300]
        if key in table or len(table) < _MOST_REMARKS:
            table.setdefault(key, (text, Notes()))[1].add(said)

    def result(self, files: Sequence[Path], num_lines: int, num_ranks: int | None) -> LogFacts:
        """Everything, once the last line was read."""
        listed = [handle for handle in self.handles.listed if _is_known(handle)]
        mismatches, behind = Sequences(self.calls, files).compared(listed)
        messages, rounded = histogram(listed, self.calls, num_ranks)
        communicators = _communicators(listed)
        return LogFacts(
            files=tuple(str(path) for path in files),
            num_lines=num_lines,
            hosts=tuple(self.hosts),
            processes=tuple(self.processes),
            versions=_seen(self.versions),
            environment=_seen(self.environment),
            networks=_seen(self.networks),
            nvls=_seen(self.nvls),
            communicators=communicators,
            transports=self._transports(communicators),
            nics=self._nic_uses(),
            plugins=tuple(
                Plugin(kind=kind, event=event, name=name, api=api, seen=notes.seen())
                for (kind, event, name, api), notes in self._plugins.items()
            ),
            interfaces=tuple(
                Interface(
                    role=role, name=name, address=at, hosts=tuple(hosts), seen=notes.seen()
                )
                for (role, name, at), (hosts, notes) in self._interfaces.items()
            ),
            gpudirect=tuple(
                GpuDirect(
                    enabled=enabled,
                    net=net,
                    device=device,
                    distance=distance,
                    level=level,
                    seen=notes.seen(),
                )
                for (enabled, net, device, distance, level), notes in self._gpudirect.items()
            ),
            predictions=self._predictions(),
            choices=self.choices.result(listed, self.calls, num_ranks),
            warnings=_remarks(self.warnings),
            harmless=_remarks(self.harmless),
            p2p_disabled=_remarks(self.p2p_disabled),
            messages=messages,
            mismatches=tuple(mismatches),
            behind=tuple(behind),
            unread_calls=self.calls.unread,
            rounded_calls=rounded,
        )

    def _predictions(self) -> tuple[Prediction, ...]:
        return tuple(
            Prediction(
                communicator=communicator,
                collective=collective,
                algorithm=algorithm,
                protocol=protocol,
                latency_s=latency_s,
                algbw_bytes_per_s=algbw,
            )
            for (communicator, collective, algorithm, protocol), (latency_s, algbw) in (
                self.tables.cells.items()
            )
        )

    def _transports(self, communicators: Sequence[Communicator]) -> tuple[Transport, ...]:
        hosts = {
            one.key: {member.rank: member.host for member in one.members}
            for one in communicators
        }
        nodes = {one.key: one.num_nodes for one in communicators}
        joined: dict[tuple[str, Link], tuple[list[int], Said]] = {}
        for (index, link), (lines, said) in self.links.items():
            counts, _ = joined.setdefault(
                (self.handles.listed[index].key, link), ([0, 0], said)
            )
            counts[0] += lines[0]
            counts[1] += lines[1]
        found = []
        for (communicator, link), (counts, said) in joined.items():
            where = hosts.get(communicator, {})
            target = None if link.target is None else where.get(link.target)
            ends = (where.get(link.source), target)
            found.append(
                Transport(
                    communicator=communicator,
                    kind=link.kind,
                    source=link.source,
                    target=link.target,
                    same_host=_same_host(link.kind, ends, nodes.get(communicator)),
                    channels=max(counts),
                    gdrdma=link.gdrdma,
                    pxn=link.pxn,
                    evidence=said.evidence(),
                )
            )
        return tuple(found)

    def _nic_uses(self) -> tuple[NicUse, ...]:
        return tuple(
            NicUse(
                communicator=self.handles.listed[index].key,
                rank=rank,
                host=said.host,
                device=device,
                channels=max(counts),
                evidence=said.evidence(),
            )
            for (index, rank, device), (counts, said) in self.nics.items()
        )


def _seen(table: dict[Key, Notes]) -> dict[Key, Seen]:
    return {key: notes.seen() for key, notes in table.items()}


def _remarks(table: dict[str, tuple[str, Notes]]) -> tuple[Remark, ...]:
    return tuple(Remark(text=text, seen=notes.seen()) for text, notes in table.values())


def _is_known(handle: Handle) -> bool:
    return bool(handle.pointer or handle.stream.tallies or handle.init)


def _same_host(
    kind: str, ends: tuple[str | None, str | None], nodes: int | None
) -> bool | None:
    if kind == "SHM" or (kind.startswith("P2P/") and kind != "P2P/MNNVL") or nodes == 1:
        return True
    if kind.startswith("COLLNET/"):
        return False
    return None if None in ends else ends[0] == ends[1]


def _communicators(handles: Sequence[Handle]) -> tuple[Communicator, ...]:
    groups: dict[str, list[Handle]] = {}
    for handle in handles:
        if handle.pointer or handle.init:
            groups.setdefault(handle.key, []).append(handle)
    return tuple(_communicator(key, held) for key, held in groups.items())


def _communicator(key: str, held: Sequence[Handle]) -> Communicator:
    num_ranks = _first(handle.num_ranks for handle in held)
    num_nodes = _first(handle.num_nodes for handle in held)
    if num_nodes is None and num_ranks and _has_all_ranks(held, num_ranks):
        num_nodes = len({handle.host for handle in held})
    rings: dict[tuple[int, ...], int] = {}
    for handle in held:
        for order, count in handle.rings.items():
            rings[order] = max(rings.get(order, 0), count)
    graphs = next((handle.graphs for handle in held if handle.graphs), [])
    return Communicator(
        key=key,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        local_ranks=max((h.local_ranks for h in held if h.local_ranks), default=None),
        members=tuple(_member(handle) for handle in sorted(held, key=_by_rank)),
        rings=tuple(rings.items()),
        num_trees=_first(handle.num_trees for handle in held),
        channels=next((handle.channels for handle in held if handle.channels), None),
        graphs=tuple(dict.fromkeys(graphs)),
        known_by_id=held[0].comm_id is not None,
    )


def _has_all_ranks(held: Sequence[Handle], num_ranks: int) -> bool:
    ranks = {handle.rank for handle in held}
    known = {rank for rank in ranks if rank is not None}
    return len(known) == len(ranks) == num_ranks == max(known) + 1


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def _by_rank(handle: Handle) -> int:
    return -1 if handle.rank is None else handle.rank


def _member(handle: Handle) -> Member:
    return Member(
        process=handle.process,
        host=handle.host,
        pointer=handle.pointer,
        rank=handle.rank,
        local_rank=handle.local_rank,
        device=handle.device,
        bus_id=handle.bus_id,
        started=handle.started,
        completed=handle.completed or bool(handle.stream.tallies),
        init=handle.init,
    )
