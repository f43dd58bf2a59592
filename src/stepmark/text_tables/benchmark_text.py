"""Read the tables of other benchmarks of communication, each told by its headings.

- mscclpp-test: in-place figures stand before out-of-place ones, and only one of both is
  measured; a row's figures belong to the headings above which they end.
- PARAM's comms.py: lines with COMMS-RES; the time is the median over ranks. Its table of pairs
  has a column per figure: latencies one way and there and back, bandwidths in GB/s.
- OSU micro-benchmarks: the time is the average over ranks, MB are 10^6 bytes. Some of its
  tests count the part of one rank as size: these sizes are labels here.
- all_reduce_bench.py and torch-dist-bench.py of stas00/ml-engineering: bandwidths, GB of 10^9.
  Its first releases with a row per payload print sizes as KB and divide rates by 2^30.
- DeepSpeed's communication logger (deepspeed.comm.log_summary, utils/comms_logging.py of
  deepspeedai/DeepSpeed): a line with the operation stands above a row per message size. Sizes
  are in binary units and rounded, so they are labels here. Times are milliseconds: the average
  is trimmed by a tenth at both ends, so that it times the calls is not the total. With
  show_straggler=True a second table divides them into communication, the shortest time of any
  rank, and waiting for stragglers. Bus bandwidth (Gbit/s) is kept where the size is counted as
  nccl-tests does: versions differ in the size of gathers and scatters.

Headings without rows are a StoppedOutput; rows that do not fit the headings are left out, and
a note says so.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepmark.ground.reading import Reading, Table
from stepmark.ground.units import GB, GIB, parse_bytes
from stepmark.model.collectives import Collective, collective_named
from stepmark.text_tables import nccl_lines, nccl_notes, printed_figures
from stepmark.text_tables.nccl_lines import dtype_named
from stepmark.text_tables.printed_figures import (
    NUMBER,
    parse_integer,
    parse_number,
    rounding_error,
)
from stepmark.text_tables.stopped_outputs import NO_ROW_FITS, StoppedOutput

# Each format has one of these; a text without any of them needs no search.
_DEEPSPEED_MARK = "Comm. Op"
_MARKS = ("COMMS-RES", "# OSU ", "The average bandwidth", _DEEPSPEED_MARK)
_MSCCLPP_MARK = re.compile(r"#\s+size\s+count\s+time\s+algbw\s+busbw")
_MSCCLPP_ROW = re.compile(r"\s*\d+\s+\S+\s+\S")
_MAX_SHIFT = 3  # columns between the ends of a heading and of its figure
_MAX_GAP = 60  # lines of a log between two rows
_MAX_NOTES = 5
Line = tuple[int, str, str]  # number, text without a launcher's prefix, text as it stands


@dataclass(slots=True)
class Section:
    """A table while it is read."""

    table: Table  # its facts, without rows
    header_line: int = 0
    header: str = ""  # as it stands, with a launcher's prefix
    names: Sequence[str] = ()  # headings, in order; of mscclpp-test the placements
    dtype: str = ""
    readings: list[Reading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last_line: int = 0

    def add(self, reading: Reading | None, number: int) -> None:
        """Add a row; None is one that does not fit the headings."""
        self.last_line = number
        if reading:
            self.readings.append(reading)
        elif len(self.notes) < _MAX_NOTES:
            self.notes.append(f"line {number}: a row that does not fit the headings: left out")


def read(text: str, lines: Sequence[str], file: str) -> tuple[list[Table], list[StoppedOutput]]:
    """Return (tables, headings without rows) of all formats, in no order."""
    sections: list[Section] = []
    if any(mark in text for mark in _MARKS) or _MSCCLPP_MARK.search(text):
        for stream in _streams(lines):
            sections += [each for reader in _READERS for each in reader(stream)]
    stops = [
        StoppedOutput(
            tool=_STOPPED_NAMES.get(section.table.tool, section.table.tool),
            first_line=section.table.first_line,
            header_line=section.header_line,
            last_line=section.last_line or section.header_line,
            unread=NO_ROW_FITS if section.last_line else "",
        )
        for section in sections
        if section.header_line and not section.readings
    ]
    return [_table(section, file) for section in sections if section.readings], stops


def _streams(lines: Sequence[str]) -> list[list[Line]]:
    """Return the lines of each task of a launcher."""
    streams: dict[str, list[Line]] = {}
    for number, line in enumerate(lines, 1):
        tag, rest = nccl_lines.split_prefix(line)
        streams.setdefault(tag, []).append((number, rest, line))
    return list(streams.values())


def _facts(tool: str, number: int, **facts: Any) -> Table:
    """Return a table without rows that begins on this line."""
    return Table(
        file="", first_line=number, last_line=number, tool=tool, **{"title": "", **facts}
    )


def _table(section: Section, file: str) -> Table:
    """Return the table of a section, with what follows from its figures."""
    facts = section.table
    readings = section.readings
    notes = section.notes
    collective = facts.collective
    reason = facts.collective_from
    has_sizes = facts.unit != "s"  # DeepSpeed's are labels
    is_any_rate = facts.unit == "GB/s"  # of no single collective
    if not collective and has_sizes and not is_any_rate:
        collective, reason = nccl_lines.inferred_collective(file, readings)
        notes += [] if collective else [nccl_lines.UNKNOWN_COLLECTIVE]
    num_ranks = facts.num_ranks
    num_ranks_from = facts.num_ranks_from
    if num_ranks is None and has_sizes:
        num_ranks, num_ranks_from = printed_figures.num_ranks_of(readings, collective)
        notes += [] if num_ranks else [nccl_lines.UNKNOWN_RANKS]
    return replace(
        facts,
        file=file,
        last_line=section.last_line,
        collective=collective,
        collective_from=reason,
        num_ranks=num_ranks,
        num_ranks_from=num_ranks_from if num_ranks else "",
        readings=tuple(readings),
        notes=tuple(notes),
    )


def _mscclpp(stream: Sequence[Line]) -> Iterator[Section]:
    """Yield the tables of mscclpp-test (common.cc of microsoft/mscclpp)."""
    section: Section | None = None
    placements: list[str] = []
    ranks: list[int] = []
    for number, text, line in stream:
        if found := nccl_lines.ranks_of(text):
            ranks = [*(ranks if found[0][0] else []), *(rank for rank, _ in found)]
        elif names := nccl_lines.placements_of(text):
            placements = names
        elif _MSCCLPP_MARK.match(text):
            has_all = bool(ranks) and ranks == list(range(len(ranks)))
            facts = _facts(
                "mscclpp-test",
                number,
                method="mscclpp-test graph",
                num_ranks=len(ranks) if has_all else None,
                num_ranks_from=f"{len(ranks)} rank lines",
            )
            section = Section(facts, number, line, placements)
            yield section
            placements = []
            ranks = []
        elif section and number - max(section.last_line, section.header_line) > _MAX_GAP:
            section = None
        elif section and _MSCCLPP_ROW.match(text):
            for reading in _mscclpp_readings(section, text.split(), line, number):
                section.add(reading, number)


def _mscclpp_readings(
    section: Section, cells: Sequence[str], line: str, number: int
) -> Iterator[Reading | None]:
    """Yield the reading of each placement in a row, None for a row of another layout."""
    size = parse_integer(cells[0])
    count = parse_integer(cells[1])
    figures = cells[2:]
    width = len(figures) // 2 if len(figures) in (6, 8) else len(figures)
    if size is None or count is None or width not in (3, 4):
        yield None
        return
    placements = section.names if len(figures) > width else [_place(section, line)]
    if len(placements) * width != len(figures):
        yield None
        return
    for index, placement in enumerate(placements):
        printed = figures[index * width : (index + 1) * width]
        time, algbw, busbw = map(parse_number, printed[:3])
        if time is None or algbw is None or busbw is None:
            yield None
            continue
        yield Reading(
            line=number,
            size_bytes=size,
            count=count,
            placement=placement,
            time_s=time * 1e-6 if time > 0 else None,
            algbw_bytes_per_s=algbw * GB,
            busbw_bytes_per_s=busbw * GB,
            num_wrong=parse_integer(printed[3]) if width == 4 else None,
            printed=(printed[0], printed[1], printed[2]),
        )


def _place(section: Section, line: str) -> str:
    """Return the placement under whose heading the time of a row ends; "" if under none."""
    headings = [match.end() for match in re.finditer(r"\btime\b", section.header)]
    time = re.search(r"\S+(?:\s+[\d.]+){2}(?:\s+\d+)?\s*$", line)
    near = [
        placement
        for placement, end in zip(section.names, headings, strict=False)
        if time and abs(end - time.start() - len(time[0].split()[0])) <= _MAX_SHIFT
    ]
    return near[0] if len(near) == 1 else ""


# stepmark's own headings stand behind a name. Rows with QUANT have no time of the collective.
_PARAM_HEADINGS = re.compile(
    r"\bCOMMS-RES(?:-\S{1,80})?\s+(?P<names>(?:total-)?size \(B\)\s.*)"
)
_PARAM_ROW = re.compile(
    r"\bCOMMS-RES-(?:QUANT-)?(?P<collective>[a-z][a-z0-9_]{2,39})-(?P<dtype>\w{1,20})"
    r"(?P<tag>-\S{1,60})?\s+(?P<cells>\d.*)"
)
_PARAM_RANKS = re.compile(r"'world_size': (\d{1,7})\b")
_PARAM_COLUMNS = {
    "size": re.compile(r"(?:total-)?size \(B\)"),
    "count": re.compile(r"nElementsPerRank"),
    "time": re.compile(r"(?:Time|Latency)\(us\):p50"),
    "algbw": re.compile(r"AlgBW\(GB/s\)"),
    "busbw": re.compile(r"BusBW\(GB/s\)"),
}
_PAIRS = "pt2pt"
_PARAM_PAIR_COLUMN = re.compile(r"[A-Za-z]{2,40}\((?P<unit>us|GB/s)\)(?::p50)?")
_NOT_PRINTED = "nElementsPairPerRank"  # a heading of some versions, without figures


def _param(stream: Sequence[Line]) -> Iterator[Section]:
    """Yield a table per collective, type and tag below each line of headings.

    Format: reportBenchTimeColl of facebookresearch/param, as stepmark writes it too.
    """
    names: list[str] = []
    header_line = 0
    num_ranks: int | None = None
    sections: dict[str, Section] = {}
    for number, text, _ in stream:
        if world := _PARAM_RANKS.search(text):
            num_ranks = int(world[1])
        elif head := _PARAM_HEADINGS.search(text):
            if header_line and not sections:
                yield Section(_facts("PARAM", header_line), header_line)
            names = re.findall(r"(?:total-)?size \(B\)|\S+", head["names"])
            header_line = number
            sections = {}
        elif header_line and (row := _PARAM_ROW.search(text)):
            title = f"{row['collective']}-{row['dtype']}{row['tag'] or ''}"
            section = sections.get(title)
            if section is None:
                is_of_pairs = row["collective"] == _PAIRS
                columns = filter(_PARAM_PAIR_COLUMN.fullmatch, names)
                facts = _facts(
                    "PARAM",
                    header_line,
                    title=title,
                    collective=collective_named(row["collective"]),
                    collective_from="its rows",
                    num_ranks=num_ranks,
                    num_ranks_from="world_size of its environment",
                    columns=tuple(columns) if is_of_pairs else (),
                )
                section = sections[title] = Section(facts, header_line)
                yield section
            for reading in _param_readings(names, row, number):
                section.add(reading, number)
    if header_line and not sections:
        yield Section(_facts("PARAM", header_line), header_line)


def _param_readings(
    names: Sequence[str], row: re.Match[str], number: int
) -> Iterator[Reading | None]:
    """Yield the reading of a row, of pairs one for each column; None where it does not fit."""
    cells = row["cells"].split()
    if len(cells) == len(names) - 1 and _NOT_PRINTED in names:
        names = [name for name in names if name != _NOT_PRINTED]
    if len(cells) != len(names):
        yield None
    elif row["collective"] == _PAIRS:
        yield from _pair_readings(names, cells, row["dtype"], number)
    else:
        yield _param_reading(names, cells, row, number)


def _pair_readings(
    names: Sequence[str], cells: Sequence[str], dtype: str, number: int
) -> Iterator[Reading | None]:
    size = parse_integer(cells[0])
    figures = map(parse_number, cells)
    for name, figure, cell in zip(names, figures, cells, strict=True):
        column = _PARAM_PAIR_COLUMN.fullmatch(name)
        if column is None:
            continue
        if size is None or figure is None or figure < 0:
            yield None
            continue
        is_time = column["unit"] == "us"
        yield Reading(
            line=number,
            column=name,
            size_bytes=size,
            dtype=dtype_named(dtype),
            time_s=figure * 1e-6 if is_time and figure else None,
            rate=figure * GB if figure and not is_time else None,
            rate_below=None if figure or is_time else rounding_error(cell) * GB,
        )


def _param_reading(
    names: Sequence[str], cells: Sequence[str], row: re.Match[str], number: int
) -> Reading | None:
    figures = {
        key: cell
        for name, cell in zip(names, cells, strict=True)
        for key, pattern in _PARAM_COLUMNS.items()
        if pattern.fullmatch(name)
    }
    if figures.keys() != _PARAM_COLUMNS.keys():
        return None
    size = parse_integer(figures["size"])
    count = parse_integer(figures["count"])
    printed = figures["time"], figures["algbw"], figures["busbw"]
    time, algbw, busbw = map(parse_number, printed)
    if size is None or not time or time < 0 or algbw is None or busbw is None:
        return None
    return Reading(
        line=number,
        size_bytes=size,
        count=count,
        dtype=dtype_named(row["dtype"]),
        placement="in-place" if "-in-place" in (row["tag"] or "") else "",
        time_s=time * 1e-6,
        algbw_bytes_per_s=algbw * GB or None,
        busbw_bytes_per_s=busbw * GB or None,
        printed=printed,
    )


_OSU_TITLE = re.compile(
    r"\s*#\s*OSU (?P<library>\S{2,30}) (?P<test>\S.{0,79}?) Test(?: v(?P<version>\S{1,20}))?\s*"
)
_OSU_DATATYPE = re.compile(r"\s*#\s*Datatype: MPI_(?P<name>\w{1,30})")
_OSU_HEADINGS = re.compile(r"\s*#\s*(?P<names>Size\s{2,}\S.*)")
_OSU_TIME = re.compile(r"(?:Avg )?Lat(?:ency)?\s?\(us\)")
_OSU_RATE = re.compile(r"Bandwidth \(MB/s\)|MB/s")
_OSU_TESTS = {"latency": Collective.PING_PONG, "bandwidth": Collective.P2P}
# Their size is the whole buffer, as nccl-tests counts it.
_OSU_WHOLE = (*_OSU_TESTS.values(), "all_reduce", "broadcast", "reduce")
_OSU_SIZES = "OSU's size is the part of one rank in some tests: sizes are kept as they stand"


def _osu(stream: Sequence[Line]) -> Iterator[Section]:
    """Yield the tables of OSU micro-benchmarks."""
    section: Section | None = None
    for number, text, _ in stream:
        if title := _OSU_TITLE.fullmatch(text):
            section = _osu_section(title, number)
            yield section
        elif section is None:
            continue
        elif kind := _OSU_DATATYPE.match(text):
            section.dtype = dtype_named(kind["name"])
        elif head := _OSU_HEADINGS.match(text):
            section.header_line = number
            section.names = re.split(r"\s{2,}", head["names"].strip())
        elif number - max(section.last_line, section.header_line) > _MAX_GAP:
            section = None
        elif section.names and text.strip()[:1].isdecimal() and "." in text:
            section.add(_osu_reading(section, text.split(), number), number)


def _osu_section(title: re.Match[str], number: int) -> Section:
    test = title["test"].lower()
    kind = _OSU_TESTS.get(test) or collective_named(test.partition(" ")[0])
    is_collective = kind in list(Collective) and "non-blocking" not in test
    unit = "" if "bandwidth" not in test else "busbw" if is_collective else "GB/s"
    facts = _facts(
        "OSU",
        number,
        title=f"{title['test']} Test",
        version=title["version"] or "",
        method=f"OSU {title['library']}",
        unit=unit,
        collective=kind if is_collective else "",
        collective_from="its title" if is_collective else "",
        num_ranks=2 if test in _OSU_TESTS else None,
        num_ranks_from="a test of one pair",
    )
    is_whole = not is_collective or kind in _OSU_WHOLE
    return Section(facts, notes=[] if is_whole else [_OSU_SIZES])


def _osu_reading(section: Section, cells: Sequence[str], number: int) -> Reading | None:
    if len(cells) != len(section.names):
        return None
    time = rate = None
    for name, cell in zip(section.names, cells, strict=True):
        if _OSU_TIME.fullmatch(name):
            time = parse_number(cell)
        elif _OSU_RATE.fullmatch(name):
            rate = parse_number(cell)
        elif name == "Validation" and cell.lower() != "pass":
            section.notes.append(f"{nccl_notes.NOT_VALID}: line {number} says {cell}")
    size = parse_integer(cells[0])
    if size is None or (not time and not rate):
        return None
    is_whole = section.table.collective in _OSU_WHOLE
    return Reading(
        line=number,
        label="" if is_whole else f"size {size}",
        size_bytes=size if is_whole else None,
        dtype=section.dtype,
        time_s=time * 1e-6 if time else None,
        rate=rate * 1e6 if rate else None,
    )


_BENCH_TITLE = re.compile(
    r"\s*The average bandwidth (?:and the per-call latency )?of (?P<name>[a-z_]{3,40}) "
    r"(?:over (?P<ranks>\d{1,7}) ranks|with a (?P<gigabytes>\d{1,9}(?:\.\d{1,20})?)GB payload "
    r"\(\d+ trials, (?P<ranks_of_one>\d{1,7}) ranks\))"
)
_BENCH_HEADINGS = re.compile(r"\s*\|\s*payload\s*\|\s*busbw\s*\|\s*algbw\s*\|")
_BENCH_ROW = re.compile(
    r"\s*\|\s*(?P<size>\d{1,6}[KMGTPE]?i?B)\s*\|\s*(?P<busbw>\d{1,9}\.\d+)GBps\s*\|"
    r"\s*(?P<algbw>\d{1,9}\.\d+)GBps\s*\|"
)
_BINARY_RATES = "a release that prints sizes as KB divides by 2^30: rates are read as GiB/s"
_BENCH_RATE = re.compile(r"\s*(?P<name>algbw|busbw): (?P<rate>\d{1,9}\.\d+) GBps\b")


def _all_reduce_bench(stream: Sequence[Line]) -> Iterator[Section]:
    """Yield the tables of all_reduce_bench.py, and its earlier lines for one payload."""
    section: Section | None = None
    size = 0
    rates: dict[str, str] = {}
    for number, text, _ in stream:
        if title := _BENCH_TITLE.match(text):
            facts = _facts(
                "all_reduce_bench.py",
                number,
                title=title["name"],
                unit="busbw",
                collective=collective_named(title["name"]),
                collective_from="its title",
                num_ranks=int(title["ranks"] or title["ranks_of_one"]),
                num_ranks_from="its title",
            )
            size = round(float(title["gigabytes"] or 0) * 1e9)
            section = Section(facts, number if size else 0)
            rates = {}
            yield section
        elif section is None:
            continue
        elif size and (rate := _BENCH_RATE.match(text)):
            rates[rate["name"]] = rate["rate"]
            if len(rates) == 2:
                section.add(_bench_reading(number, size, rates), number)
                section = None
        elif not size and _BENCH_HEADINGS.match(text):
            section.header_line = number
        elif section.header_line and (row := _BENCH_ROW.match(text)):
            size_bytes = parse_bytes(row["size"], "payload")
            is_binary = not row["size"].endswith("iB")
            if is_binary and not section.readings:
                section.notes.append(_BINARY_RATES)
            unit = GIB if is_binary else GB
            section.add(_bench_reading(number, size_bytes, row.groupdict(), unit), number)
        elif number - max(section.last_line, section.table.first_line) > _MAX_GAP:
            section = None


def _bench_reading(number: int, size: int, rates: dict[str, str], unit: float = GB) -> Reading:
    """Return a reading; a bandwidth that was rounded to 0 is a bound."""
    algbw, busbw = (float(rates[name]) * unit for name in ("algbw", "busbw"))
    return Reading(
        line=number,
        size_bytes=size,
        algbw_bytes_per_s=algbw or None,
        busbw_bytes_per_s=busbw or None,
        rate=busbw or None,
        rate_below=None if busbw else rounding_error(rates["busbw"]) * unit,
        printed=("", rates["algbw"], rates["busbw"]),
    )


_DEEPSPEED_HEADINGS = re.compile(
    r"\bComm\. Op\s+Message Size\s+Count\s+(?:Total (?P<kind>Latency|comm lat)\(ms\)\s+"
    r"(?:Avg Latency\(ms\)\s+tput_avg \(Gbps\)\s+busbw_avg \(Gbps\)"
    r"|Total straggler\(ms\)\s+Avg comm lat\(ms\)\s+Avg straggler\(ms\)))\s*$"
)
_DEEPSPEED_OPERATION = re.compile(
    r"\s*(?P<name>[a-z]\w{2,60}(?: \| \[Caller Func: \w{1,80}\])?)\s*$"
)
_DEEPSPEED_ROW = re.compile(
    r"\s*(?P<size>0B|\d{1,20}(?:\.\d{1,3})? [KMGTP]?B)\s+(?P<count>\d{1,12})"
    rf"\s+(?P<first>{NUMBER})\s+(?P<second>{NUMBER})\s+(?P<third>{NUMBER})"
    rf"\s+(?P<fourth>{NUMBER})\s*$"
)
# Operations whose size is that of nccl-tests in all versions.
_DEEPSPEED_WHOLE = re.compile(
    r"(?:all_reduce|inference_all_reduce|broadcast|reduce|i?send|i?recv)\b"
)
_DEEPSPEED_COLUMNS = ("average", "total")
_STRAGGLER_COLUMNS = (*_DEEPSPEED_COLUMNS, "average straggler", "total straggler")


def _deepspeed(stream: Sequence[Line]) -> Iterator[Section]:
    """Yield the tables of DeepSpeed's communication logger."""
    section: Section | None = None
    has_stragglers = False
    name = ""
    for number, text, _ in stream:
        if _DEEPSPEED_MARK in text and (head := _DEEPSPEED_HEADINGS.search(text)):
            has_stragglers = head["kind"] != "Latency"
            facts = _facts(
                "DeepSpeed",
                number,
                title="communication and stragglers" if has_stragglers else "communication",
                unit="s",
                columns=_STRAGGLER_COLUMNS if has_stragglers else _DEEPSPEED_COLUMNS,
            )
            notes = ["sizes are as printed, in binary units and rounded"]
            section = Section(facts, number, notes=notes)
            name = ""
            yield section
        elif section is None:
            continue
        elif (
            _DEEPSPEED_MARK in text
            or number - max(section.last_line, section.header_line) > _MAX_GAP
        ):
            section = None
        elif operation := _DEEPSPEED_OPERATION.match(text):
            name = operation["name"]
        elif name and (row := _DEEPSPEED_ROW.match(text)):
            for reading in _deepspeed_readings(
                row, name, number, has_stragglers=has_stragglers
            ):
                section.add(reading, number)


def _deepspeed_readings(
    row: re.Match[str], name: str, number: int, *, has_stragglers: bool
) -> Iterator[Reading]:
    figures = [parse_number(row[key]) for key in ("first", "second", "third", "fourth")]
    total, second, third, busbw = figures
    times = {"average": third if has_stragglers else second, "total": total}
    if has_stragglers:
        times |= {"average straggler": busbw, "total straggler": second}
    is_comparable = not has_stragglers and busbw and _DEEPSPEED_WHOLE.match(name)
    for column, milliseconds in times.items():
        if milliseconds is None or milliseconds < 0:
            continue
        is_rate = is_comparable and column == "average"
        yield Reading(
            line=number,
            label=f"{name} {row['size']}",
            column=column,
            num_calls=int(row["count"]),
            time_s=milliseconds * 1e-3,
            busbw_bytes_per_s=busbw * 1e9 / 8 if busbw and is_rate else None,
        )


_STOPPED_NAMES = {"DeepSpeed": "DeepSpeed's communication logger"}
_READERS: tuple[Callable[[Sequence[Line]], Iterator[Section]], ...] = (
    _mscclpp,
    _param,
    _osu,
    _all_reduce_bench,
    _deepspeed,
)
