"""Facts and findings of a debug log, and tables of a file: as lines and as flat rows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from stepmark.core.collectives import Collective
from stepmark.core.columns import Row
from stepmark.core.finding import Finding
from stepmark.core.log_facts import Communicator, LogFacts, Occurrences, Transport
from stepmark.core.reading import Table
from stepmark.core.units import GB, format_bytes, format_time
from stepmark.report.summary import LEAD

if TYPE_CHECKING:
    from rich.console import Console

_MOST = 8


def fact_lines(facts: LogFacts) -> list[str]:
    """One fact per line, starting with what it is about, LEAD columns wide."""
    return [f"{lead:<{LEAD}}{line}" for lead, line in _facts(facts)]


def _facts(facts: LogFacts) -> Iterator[tuple[str, str]]:
    yield (
        "log",
        f"{facts.num_lines} lines of {_number(len(facts.files), 'file')}, "
        f"{_number(len(facts.processes), 'process')} on {_number(len(facts.hosts), 'host')}",
    )
    if facts.versions:
        names = (f"{what} {value}" for what, value in facts.versions)
        yield "versions", ", ".join(names)
    if facts.networks:
        yield "network", _counted(facts.networks)
    for plugin in facts.plugins:
        if plugin.event == "loaded":
            api = f" (v{plugin.api})" if plugin.api else ""
            yield "plugin", f"{plugin.kind} {plugin.name}{api}"
    for role in dict.fromkeys(one.role for one in facts.interfaces):
        held = [one for one in facts.interfaces if one.role == role]
        shown = dict.fromkeys(f"{one.name} {one.address}".strip() for one in held)
        yield "interface", f"{role}: {_some(shown)}"
    for one in facts.communicators[:_MOST]:
        yield "group", _communicator(one)
    if len(facts.communicators) > _MOST:
        yield "group", f"and {len(facts.communicators) - _MOST} more"
    for kind, ways in _by_kind(facts.transports).items():
        yield "transport", _transport(kind, ways)
    if facts.nvls:
        words = (f"{'' if has else 'not '}available" for has in facts.nvls)
        yield "NVLS", ", ".join(words)
    for (name, value), lines in facts.environment.items():
        yield "variable", f"{name}={value} ({_number(lines.processes, 'process')})"
    yield from (("tuning", line) for line in _choices(facts))
    if facts.messages:
        calls = sum(tally.calls for tally in facts.messages.values())
        yield "calls", f"{calls} in {len(facts.messages)} kinds"


def _number(many: int, noun: str) -> str:
    ending = "" if many == 1 else "es" if noun.endswith("s") else "s"
    return f"{many} {noun}{ending}"


def _communicator(communicator: Communicator) -> str:
    words = [communicator.key]
    words += [f"{communicator.num_ranks} ranks"] if communicator.num_ranks else []
    words += [_number(communicator.num_nodes, "node")] if communicator.num_nodes else []
    if communicator.channels:
        counts = communicator.channels
        words.append(f"{counts.coll} coll, {counts.nvls or 0} nvls, {counts.p2p} p2p channels")
    if communicator.rings:
        count = sum(count for _, count in communicator.rings)
        words.append(f"{count} rings, {_number(len(communicator.rings), 'order')}")
    times = [member.init.total_s for member in communicator.members if member.init]
    words += [f"started in {format_time(max(times))}"] if times else []
    return ", ".join(words)


def _transport(kind: str, ways: Sequence[Transport]) -> str:
    channels = sum(way.channels for way in ways)
    text = f"{kind}: {_number(channels, 'connection')}, {_number(len(ways), 'pair')} of ranks"
    where = {True: "inside hosts", False: "between hosts", None: "hosts unknown"}
    sides = Counter({where[way.same_host]: 0 for way in ways})
    for way in ways:
        sides[where[way.same_host]] += way.channels
    text += f" ({', '.join(f'{count} {side}' for side, count in sides.items())})"
    direct = sum(way.channels for way in ways if way.gdrdma)
    relayed = sum(way.channels for way in ways if way.pxn)
    if ways[0].is_net:
        text += f", {direct} with GPUDirect RDMA"
    return text + (f", {relayed} by PXN" if relayed else "")


def _by_kind(transports: Iterable[Transport]) -> dict[str, list[Transport]]:
    by_kind: dict[str, list[Transport]] = {}
    for way in transports:
        by_kind.setdefault(way.kind, []).append(way)
    return by_kind


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


def _counted(table: Mapping[str, Occurrences]) -> str:
    return ", ".join(
        f"{name} ({_number(lines.processes, 'process')})" for name, lines in table.items()
    )


def _some(words: Iterable[str]) -> str:
    held = list(words)
    more = f" and {len(held) - _MOST} more" if len(held) > _MOST else ""
    return ", ".join(held[:_MOST]) + more


def fact_rows(facts: LogFacts) -> list[Row]:
    """Everything that is said as a name and a value, one shape for all."""
    rows = [
        _row("version", what, value, lines) for (what, value), lines in facts.versions.items()
    ]
    rows += [
        _row("variable", name, value, lines)
        for (name, value), lines in facts.environment.items()
    ]
    rows += [_row("network", "in use", name, lines) for name, lines in facts.networks.items()]
    rows += [
        _row("NVLS", "multicast", "available" if has else "not available", lines)
        for has, lines in facts.nvls.items()
    ]
    rows += [
        _row("plugin", f"{one.kind} {one.event}", _api(one.name, one.api), lines)
        for one, lines in facts.plugins.items()
    ]
    rows += [
        _row("interface", one.role, f"{one.name} {one.address}".strip(), lines)
        for one, lines in facts.interfaces.items()
    ]
    rows += [
        _row("GPUDirect", one.device, "enabled" if one.enabled else "disabled", lines)
        for one, lines in facts.gpudirect.items()
    ]
    rows += [_row("warning", "", text, lines) for text, lines in facts.warnings.items()]
    return rows


def _api(name: str, api: int | None) -> str:
    return f"{name} (v{api})".strip() if api else name


def _row(about: str, name: str, value: str, lines: Occurrences) -> Row:
    first = lines.evidence[0] if lines.evidence else None
    return {
        "about": about,
        "name": name,
        "value": value,
        "lines": lines.lines,
        "processes": lines.processes,
        "file": first.file if first else None,
        "line": first.line if first else None,
    }


def communicator_rows(facts: LogFacts) -> list[Row]:
    """One row per rank of each communicator."""
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
    """One row per pair of ranks and way between them."""
    return [
        {name: value for name, value in asdict(way).items() if name != "evidence"}
        for way in facts.transports
    ]


def choice_rows(facts: LogFacts) -> list[Row]:
    """One row per size and algorithm that NCCL chose; size_bytes as nccl-tests counts it."""
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
    """One row per cell of NCCL's own table."""
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


Found = Sequence[tuple[Table, Sequence[Finding]]]
_TITLE_WIDTH = 60


def rows(tables: Found) -> list[Row]:
    """One flat row per table; unknown is None, as in all rows of ours."""
    return [_table_row(table, findings) for table, findings in tables]


def name_of(table: Table) -> str:
    """FILE:2, as a command line names the second table of a file."""
    return f"{table.file}:{table.index}"


def print_tables(tables: Found, console: "Console", *, file_width: int = 40) -> None:
    """A block per table: what it is, how each fact is known, what is odd."""
    for table, findings in tables:
        row = _table_row(table, findings)
        name = name_of(table)
        name = name if len(name) <= file_width else f"...{name[3 - file_width :]}"
        _say(console, f"{name}  {table.title[:_TITLE_WIDTH]}")
        for line in (*_table_facts(row), *(f"note: {note}" for note in table.notes)):
            _say(console, f"    {line}")
        for finding in findings:
            _say(console, f"    {finding.severity}: {finding.text}")


def _table_row(table: Table, findings: Sequence[Finding]) -> Row:
    sizes = [reading.size_bytes for reading in table.readings if reading.size_bytes is not None]
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
        "findings": len(findings),
        "notes": "; ".join(table.notes) or None,
    }


def _table_facts(row: Mapping[str, object]) -> list[str]:
    """What is known, with the evidence; what is not, said so."""
    tool = " ".join(str(row[key]) for key in ("tool", "version", "method") if row[key])
    plural = "" if row["rows"] == 1 else "s"
    lines = [f"{tool}, {row['rows']} row{plural}{_range(row)}"]
    what = "collective" if row["collective"] in list(Collective) else "figure"
    for key, word in (("collective", what), ("num_ranks", "ranks")):
        if row[key] is not None:
            why = f" ({row[f'{key}_from']})" if row[f"{key}_from"] else ""
            lines.append(f"{word}: {row[key]}{why}")
    if row["columns"]:
        unit = row["unit"] or "unit not said"
        lines.append(f"columns ({unit}): {row['columns']}")
    elif row["unit"]:
        lines.append(f"unit: {row['unit']}")
    return lines


def _range(row: Mapping[str, object]) -> str:
    low, high = row["min_bytes"], row["max_bytes"]
    if not isinstance(low, int) or not isinstance(high, int):
        return ""
    return f", {format_bytes(low)} to {format_bytes(high)}"


def _say(console: "Console", line: str) -> None:
    """As it stands: titles and notes of other people's files may hold brackets."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
