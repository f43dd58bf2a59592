"""Facts and findings of a debug log, and tables of a file, as lines and as flat rows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from stepmark.findings.finding import Finding
from stepmark.findings.log_facts import (
    Communicator,
    Interface,
    LogFacts,
    Occurrences,
    Plugin,
    Transport,
)
from stepmark.ground.reading import Table
from stepmark.ground.units import GB, comma_list, format_bytes, format_time, plural
from stepmark.model.collectives import Collective
from stepmark.tables.columns import Row
from stepmark.tables.row_tables import LEAD

_MOST = 8


def fact_lines(facts: LogFacts) -> list[str]:
    """Return one fact per line, starting with its subject, LEAD columns wide."""
    return [f"{lead:<{LEAD}}{line}" for lead, line in _facts(facts)]


def _facts(facts: LogFacts) -> Iterator[tuple[str, str]]:
    size = f"{facts.num_lines} lines of {plural(len(facts.files), 'file')}"
    if not facts.has_messages:
        yield "output", f"{size}, none of NCCL or RCCL"
        return
    processes = plural(len(facts.processes), "process")
    hosts = len(facts.hosts)
    yield "log", f"{size}, {processes} on {plural(hosts, 'host')}"
    if facts.versions:
        names = (f"{what} {value}" for what, value in facts.versions)
        yield "versions", ", ".join(names)
    if facts.networks:
        networks = (
            f"{name} ({plural(lines.processes, 'process')})"
            for name, lines in facts.networks.items()
        )
        yield "network", ", ".join(networks)
    for plugin in facts.plugins:
        if plugin.event == "loaded":
            yield "plugin", f"{plugin.kind} {_with_api(plugin)}"
    for role in dict.fromkeys(interface.role for interface in facts.interfaces):
        same = (interface for interface in facts.interfaces if interface.role == role)
        yield "interface", f"{role}: {comma_list(dict.fromkeys(map(_address, same)), _MOST)}"
    for communicator in facts.communicators[:_MOST]:
        yield "group", _communicator(communicator)
    if len(facts.communicators) > _MOST:
        yield "group", f"and {len(facts.communicators) - _MOST} more"
    for kind in dict.fromkeys(way.kind for way in facts.transports):
        yield "transport", _transport(kind, [w for w in facts.transports if w.kind == kind])
    if facts.nvls:
        words = (f"{'' if has else 'not '}available" for has in facts.nvls)
        yield "NVLS", ", ".join(words)
    for (name, value), lines in facts.environment.items():
        yield "variable", f"{name}={value} ({plural(lines.processes, 'process')})"
    yield from (("tuning", line) for line in _choices(facts))
    if facts.messages:
        calls = sum(tally.calls for tally in facts.messages.values())
        yield "calls", f"{calls} in {len(facts.messages)} kinds"


def _communicator(communicator: Communicator) -> str:
    words = [communicator.key]
    words += [f"{communicator.num_ranks} ranks"] if communicator.num_ranks else []
    words += [plural(communicator.num_nodes, "node")] if communicator.num_nodes else []
    if communicator.channels:
        counts = communicator.channels
        words.append(f"{counts.coll} coll, {counts.nvls or 0} nvls, {counts.p2p} p2p channels")
    if communicator.rings:
        count = sum(count for _, count in communicator.rings)
        words.append(f"{count} rings, {plural(len(communicator.rings), 'order')}")
    times = [member.init.total_s for member in communicator.members if member.init]
    words += [f"started in {format_time(max(times))}"] if times else []
    return ", ".join(words)


def _transport(kind: str, ways: Sequence[Transport]) -> str:
    channels = sum(way.channels for way in ways)
    text = f"{kind}: {plural(channels, 'connection')}, {plural(len(ways), 'pair')} of ranks"
    where = {True: "inside hosts", False: "between hosts", None: "hosts unknown"}
    sides = Counter({where[way.same_host]: 0 for way in ways})
    for way in ways:
        sides[where[way.same_host]] += way.channels
    text += f" ({', '.join(f'{count} {side}' for side, count in sides.items())})"
    direct = sum(way.gdrdma_channels for way in ways)
    relayed = sum(way.channels for way in ways if way.pxn)
    if ways[0].is_net:
        text += f", {direct} with GPUDirect RDMA"
    return text + (f", {relayed} by PXN" if relayed else "")


def _choices(facts: LogFacts) -> Iterator[str]:
    for choice in facts.choices[:_MOST]:
        size = choice.printed_bytes if choice.message_bytes is None else choice.message_bytes
        channels = f", {choice.channels} channels" if choice.channels else ""
        yield (
            f"{choice.collective or 'call'} of {format_bytes(size)}: {choice.algorithm} "
            f"{choice.protocol}{channels}, {choice.calls} times"
        )
    if len(facts.choices) > _MOST:
        yield f"and {len(facts.choices) - _MOST} more"


def fact_rows(facts: LogFacts) -> list[Row]:
    """Return every fact as a name and a value, in rows of one shape."""
    return [
        {
            "about": about,
            "name": name,
            "value": value,
            "lines": lines.lines,
            "processes": lines.processes,
            "file": lines.evidence[0].file if lines.evidence else None,
            "line": lines.evidence[0].line if lines.evidence else None,
        }
        for about, name, value, lines in _named_facts(facts)
    ]


def _named_facts(facts: LogFacts) -> Iterator[tuple[str, str, str, Occurrences]]:
    for (name, value), lines in facts.versions.items():
        yield "version", name, value, lines
    for (name, value), lines in facts.environment.items():
        yield "variable", name, value, lines
    for network, lines in facts.networks.items():
        yield "network", "in use", network, lines
    for has_nvls, lines in facts.nvls.items():
        yield "NVLS", "multicast", "available" if has_nvls else "not available", lines
    for plugin, lines in facts.plugins.items():
        yield "plugin", f"{plugin.kind} {plugin.event}", _with_api(plugin), lines
    for interface, lines in facts.interfaces.items():
        yield "interface", interface.role, _address(interface), lines
    for nic, lines in facts.gpudirect.items():
        yield "GPUDirect", nic.device, "enabled" if nic.enabled else "disabled", lines
    for text, lines in facts.warnings.items():
        yield "warning", "", text, lines


def _address(interface: Interface) -> str:
    return f"{interface.name} {interface.address}".strip()


def _with_api(plugin: Plugin) -> str:
    return f"{plugin.name} (v{plugin.api})".strip() if plugin.api else plugin.name


def communicator_rows(facts: LogFacts) -> list[Row]:
    """Return one row per rank of each communicator."""
    return [
        {
            "communicator": communicator.key,
            "num_ranks": communicator.num_ranks,
            "num_nodes": communicator.num_nodes,
            "rank": member.rank,
            "local_rank": member.local_rank,
            "process": member.process,
            "host": member.host,
            "device": member.device,
            "bus_id": member.bus_id,
            "coll_channels": communicator.channels.coll if communicator.channels else None,
            "nvls_channels": communicator.channels.nvls if communicator.channels else None,
            "p2p_channels": communicator.channels.p2p if communicator.channels else None,
            "num_rings": sum(count for _, count in communicator.rings) or None,
            "num_trees": communicator.num_trees,
            "init_s": member.init.total_s if member.init else None,
            **{f"init_{name}_s": s for name, s in (member.init.parts_s if member.init else ())},
        }
        for communicator in facts.communicators
        for member in communicator.members
    ]


def transport_rows(facts: LogFacts) -> list[Row]:
    """Return one row per pair of ranks and transport between them."""
    return [
        {
            "communicator": way.communicator,
            "kind": way.kind,
            "source": way.source,
            "target": way.target,
            "same_host": way.same_host,
            "channels": way.channels,
            "gdrdma": way.gdrdma,
            "gdrdma_channels": way.gdrdma_channels,
            "pxn": way.pxn,
        }
        for way in facts.transports
    ]


def choice_rows(facts: LogFacts) -> list[Row]:
    """Return one row per size and NCCL's algorithm; size_bytes as nccl-tests counts it."""
    return [
        {
            "collective": choice.collective or None,
            "size_bytes": choice.message_bytes,
            "printed_bytes": choice.printed_bytes,
            "algorithm": choice.algorithm,
            "protocol": choice.protocol,
            "channels": choice.channels,
            "predicted_s": choice.time_s,
            "calls": choice.calls,
        }
        for choice in facts.choices
    ]


def prediction_rows(facts: LogFacts) -> list[Row]:
    """Return one row per cell of NCCL's own table."""
    return [
        {
            "communicator": prediction.communicator,
            "collective": prediction.collective,
            "algorithm": prediction.algorithm,
            "protocol": prediction.protocol,
            "latency_s": prediction.latency_s,
            "algbw_gb_s": prediction.algbw_bytes_per_s / GB,
        }
        for prediction in facts.predictions
    ]


TableFindings = Sequence[tuple[Table, Sequence[Finding]]]
_TITLE_WIDTH = 60
_NAME_WIDTH = 200


def rows(tables: TableFindings) -> list[Row]:
    """Return one flat row per table; None is unknown."""
    return [_table_row(table, findings) for table, findings in tables]


def name_of(table: Table) -> str:
    """Return e.g. FILE:2, as a command line names the second table of a file."""
    return f"{table.file}:{table.index}"


def table_lines(table: Table) -> list[str]:
    """Return the name of a table, its contents, and how each fact is known."""
    name = name_of(table)
    name = name if len(name) <= _NAME_WIDTH else f"...{name[3 - _NAME_WIDTH :]}"
    facts = [*_table_facts(_table_row(table, ())), *_call_lines(table)]
    facts += [f"note: {note}" for note in table.notes]
    lines = (f"{name}  {table.title[:_TITLE_WIDTH]}", *(f"    {fact}" for fact in facts))
    return [line.rstrip() for line in lines]


def _call_lines(table: Table) -> list[str]:
    """Return the times of a summary of calls, a line per operation and size."""
    lines: dict[str, str] = {}
    for reading in table.readings:
        if reading.num_calls is None or reading.time_s is None:
            continue
        start = lines.get(
            reading.label, f"{reading.label}: {plural(reading.num_calls, 'call')}"
        )
        lines[reading.label] = f"{start}, {reading.column} {format_time(reading.time_s)}"
    return list(lines.values())


def _table_row(table: Table, findings: Sequence[Finding]) -> Row:
    sizes = [reading.size_bytes for reading in table.readings if reading.size_bytes is not None]
    rates = [reading.busbw_bytes_per_s for reading in table.readings]
    peak = max(filter(None, rates), default=None)
    return {
        "table": name_of(table),
        "file": table.file,
        "index": table.index,
        "first_line": table.first_line,
        "last_line": table.last_line,
        "title": table.title or None,
        "tool": table.tool,
        "version": table.version or None,
        "collective": table.collective or None,
        "collective_from": table.collective_from or None,
        "num_ranks": table.num_ranks,
        "num_ranks_from": table.num_ranks_from or None,
        "num_hosts": table.num_hosts,
        "device": table.device or None,
        "method": table.method or None,
        "unit": table.unit or None,
        "columns": ", ".join(table.columns) or None,
        "rows": len(
            {
                (
                    reading.line,
                    reading.size_bytes,
                    reading.dtype,
                    reading.redop,
                    reading.root,
                    reading.cycle,
                )
                for reading in table.readings
            }
        ),
        "readings": len(table.readings),
        "min_bytes": min(sizes, default=None),
        "max_bytes": max(sizes, default=None),
        "peak_busbw_gb_s": None if peak is None else peak / GB,
        "findings": len(findings),
        "notes": "; ".join(table.notes) or None,
    }


def _table_facts(row: Mapping[str, object]) -> list[str]:
    """Return what is known about a table, with the evidence, and what is unknown."""
    tool = " ".join(str(row[key]) for key in ("tool", "version", "method") if row[key])
    plural = "" if row["rows"] == 1 else "s"
    lines = [f"{tool}, {row['rows']} row{plural}{_range(row)}"]
    kind = "collective" if row["collective"] in list(Collective) else "figure"
    for key, word in (("collective", kind), ("num_ranks", "ranks")):
        if row[key] is not None:
            why = f" ({row[f'{key}_from']})" if row[f"{key}_from"] else ""
            lines.append(f"{word}: {row[key]}{why}")
    if row["device"]:
        hosts = f", hosts: {row['num_hosts']}" if row["num_hosts"] else ""
        lines.append(f"GPUs: {row['device']}{hosts}")
    if row["peak_busbw_gb_s"] is not None and row["collective"] is None:
        lines.append(f"peak busbw: {row['peak_busbw_gb_s']:.4g} GB/s")
    if row["columns"]:
        unit = row["unit"] or "unit not said"
        lines.append(f"columns ({unit}): {row['columns']}")
    elif row["unit"]:
        lines.append(f"unit: {row['unit']}")
    return lines


def _range(row: Mapping[str, object]) -> str:
    low = row["min_bytes"]
    high = row["max_bytes"]
    if not isinstance(low, int) or not isinstance(high, int):
        return ""
    return f", {format_bytes(low)} to {format_bytes(high)}"
