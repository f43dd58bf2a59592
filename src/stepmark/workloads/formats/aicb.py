"""AICB's per-operation CSV: the operations of rank 0 (of each stage, in older files).

A folder of stage0.csv, stage1.csv, ... is read as such an older file, section after section.

Lines up to the first epoch_end are the set-up, then each iteration ends in one. A file that is
read and written again has the same bytes. The log of a physical run has the same columns with
times: it is read as one step of median times, and is written without them.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.units import GIB
from stepmark.model.collectives import Collective
from stepmark.model.ops import Gemm
from stepmark.step.source_file import (
    in_file,
    origin_of,
    read_lines,
    stage_files,
)
from stepmark.step.workload import (
    COMPUTE,
    Block,
    CommOp,
    ComputeOp,
    Group,
    Operation,
    Run,
    Stage,
    Workload,
)
from stepmark.workloads.fold import Repeat, fold
from stepmark.workloads.formats.aicb_line import (
    END,
    EPOCH_END,
    GROUPS,
    HEADER,
    TRANSFERS,
    Line,
    Lines,
    aicb_group,
    column_excess,
    group_of,
    is_transfer,
    no_setup,
    operation,
    parse,
    text_of,
)
from stepmark.workloads.formats.loss import (
    Representable,
    communication,
    present,
    rounding,
    tallied,
)
from stepmark.workloads.formats.walk import RepeatedText, remarks, with_end

FORMAT = "aicb"
_EMBEDDING = "forward.MegatronEmbedding"
_HEAD = "forward.MegatronColumnLinear.final_column"
_Call = tuple[Operation, ...]  # issued together
_ONE_GROUP = (
    "transfers of two interleaved stages are read as of one group: Megatron-LM sends one"
    " direction in that of all ranks"
)


def line_of(op: Operation, groups: Mapping[str, Group]) -> str:
    """Return our line for an operation that was read."""
    if isinstance(op, ComputeOp):
        return text_of(op, op.module, "", 0)
    return text_of(op, op.module, aicb_group(op.group), groups[op.group].size)


@dataclass(slots=True, kw_only=True)
class _Numbered:
    """A section as numbers of distinct lines, an iteration each, without its end."""

    before: str
    epochs: list[list[int]]
    ends: list[int]


class Reader:
    """Reader of lines: distinct ones become operations, each iteration a block of repeats."""

    def __init__(
        self, lines: Sequence[str], sizes: dict[str, int], files: Mapping[int, str]
    ) -> None:
        """files: names of a folder's files by the lines before them; empty for one file."""
        self._files = files
        self._texts: list[str] = []
        self._parsed: list[Line] = []
        self._places: list[int] = []
        self._numbers: dict[str, int] = {}
        self._sections = list(self._split(lines))
        if not self._sections:
            raise ConfigError("AICB workload", "empty", HEADER)
        self._groups = self._find_groups(sizes)
        self._blocks: dict[str, Block] = {}
        self._bodies: dict[Repeat[_Call], str] = {}
        self._lines: dict[str, str] = {}
        self._ends: dict[str, str] = {}
        self._notes: list[str] = []

    def workload(self, name: str, end: str) -> Workload:
        timed = any(line.elapsed_ms is not None for line in self._parsed)
        ops: list[Operation | None] = [
            None if line.kind == END else self._operation(index, timed=timed)
            for index, line in enumerate(self._parsed)
        ]
        stages = []
        sections = []
        for index, section in enumerate(self._sections):
            prefix = f"stage {index} " if len(self._sections) > 1 else ""
            make = self._timed_stage if timed else self._stage
            stage, epochs = make(prefix, section, ops)
            stages.append(stage)
            sections.append({"before": section.before, "epochs": epochs})
        self._notes += self._rounding(ops)
        self._notes += remarks((self._is_interleaved(ops), _ONE_GROUP))
        tp = self._groups["tp"].size if "tp" in self._groups else 1
        if (excess := column_excess(filter(None, ops), tp)) > 1:
            self._notes.append(f"products of MegatronColumnLinear are {excess} times too large")
        origin = {"end": end, "sections": sections, "lines": self._lines, "ends": self._ends}
        return Workload(
            name=name,
            rules=FORMAT,
            source="AICB per-operation CSV; sizes are bytes, element types are not in the file",
            world_size=self._world,
            num_microbatches=self._num_microbatches(),
            groups=self._groups,
            blocks=self._blocks,
            stages=tuple(stages),
            notes=tuple(dict.fromkeys(self._notes)),
            origin={FORMAT: origin},
        )

    def _split(self, lines: Sequence[str]) -> Iterator[_Numbered]:
        """Yield sections; one starts with its header, or with a line in brackets before it."""
        place = 0
        while place < len(lines):
            before = ""
            if lines[place].startswith("["):
                before = lines[place] + "\n"
                place += 1
            if place >= len(lines) or lines[place] != HEADER:
                line = lines[place] if place < len(lines) else "nothing"
                raise ConfigError(self._where(place + 1), line, HEADER)
            start = place = place + 1
            while place < len(lines) and not lines[place].startswith(("[", "comm_type")):
                place += 1
            yield self._section(before, lines, start, place)

    def _section(self, before: str, lines: Sequence[str], start: int, stop: int) -> _Numbered:
        section = _Numbered(before=before, epochs=[[]], ends=[])
        for place in range(start, stop):
            text = lines[place]
            number = self._numbers.setdefault(text, len(self._texts))
            if number == len(self._texts):
                self._parsed.append(parse(text, self._where(place + 1)))
                self._texts.append(text)
                self._places.append(place + 1)
            if self._parsed[number].kind == END:
                section.ends.append(number)
                section.epochs.append([])
            else:
                section.epochs[-1].append(number)
        if not section.ends or section.epochs.pop():
            allowed = "CommType.epoch_end at the end"
            raise ConfigError(self._where(stop), lines[stop - 1], allowed)
        return section

    def _where(self, place: int) -> str:
        """Return the line of this number, counted over all files, as a user finds it."""
        before = max((lines for lines in self._files if lines < place), default=None)
        if before is None:
            return f"line {place}"
        return f"{self._files[before]}, line {place - before}"

    def _find_groups(self, sizes: dict[str, int]) -> dict[str, Group]:
        """Return groups in AICB's order of ranks: tensor, data (with experts), pipeline."""
        for name in sizes:
            if name not in GROUPS.values():
                raise not_one_of("group-sizes", name, GROUPS.values())
        others: set[tuple[str, int]] = set()
        for line in self._parsed:
            if line.group and line.group_size:
                name = GROUPS[line.group]
                sizes[name] = max(sizes.get(name, 1), line.group_size)
                if line.kind not in TRANSFERS:
                    others.add((name, line.group_size))
        tp, dp, pp = (sizes.get(name, 1) for name in ("tp", "dp", "pp"))
        pp = max(pp, len(self._sections))
        self._world = max(tp * dp * pp, *sizes.values(), 1)
        ep = sizes.get("ep", 1)
        etp = sizes["ep_tp"] // ep if "ep_tp" in sizes else tp
        if etp * ep > self._world or not etp:  # experts are spread over tensor ranks, too
            etp = 1
        strides = {"tp": 1, "dp": tp, "pp": tp * dp, "ep": etp, "world": 1}
        strides |= {"ep_dp": etp * ep, "ep_tp": 1, "embedding": tp * dp}
        if sizes.get("embedding") == 2 and pp == len(self._sections) > 1:
            strides["embedding"] *= pp - 1  # the first and the last stage
        groups = {}
        for name, size in (*sizes.items(), *sorted(others)):
            key = name if size == sizes[name] else f"{name}_{size}"
            groups[key] = Group(digits=((size, strides[name]),))
        return groups

    def _operation(self, index: int, *, timed: bool) -> Operation:
        op = operation(self._parsed[index], self._groups, self._where(self._places[index]))
        ours = line_of(op, self._groups)
        text = self._texts[index] + "\n"
        if timed:
            return op
        if f"|{ours}" in self._lines or (ours != text and ours[:-1] in self._numbers):
            op = replace(op, name=f"line {self._places[index]}")
        if ours != text:
            self._lines[f"{op.name}|{ours}"] = text
        return op

    def _is_interleaved(self, ops: Sequence[Operation | None]) -> bool:
        """Return whether one of two stages sends or receives on both of its sides."""
        if "pp" not in self._groups or self._groups["pp"].size != 2:
            return False
        steps = (itertools.chain(*section.epochs) for section in self._sections)
        peers = ({getattr(ops[number], "peer", None) for number in step} for step in steps)
        return any({1, -1} <= both for both in peers)

    def _rounding(self, ops: Sequence[Operation | None]) -> tuple[str, ...]:
        """Return notes on sizes that their ranks do not divide."""
        epochs = [epoch for section in self._sections for epoch in section.epochs]
        times = Counter(itertools.chain.from_iterable(epochs))
        in_file = Representable()
        read = Representable()
        for number, op in enumerate(ops):
            if isinstance(op, CommOp):
                size = math.ceil(float(self._parsed[number].size))
                in_file.add(op, self._groups[op.group], times[number], num_bytes=size)
                read.add(op, self._groups[op.group], times[number])
        return rounding(in_file, read)

    def _stage(
        self, prefix: str, section: _Numbered, ops: Sequence[Operation | None]
    ) -> tuple[Stage, list[str]]:
        """Return a stage whose step is all iterations in a row, or one if they are equal."""
        names: list[str] = []
        by_lines: dict[tuple[int, ...], str] = {}
        for index, (numbers, end) in enumerate(zip(section.epochs, section.ends, strict=True)):
            key = (*numbers, end)
            if key not in by_lines:
                name = by_lines[key] = f"{prefix}{f'iteration {index}' if index else 'setup'}"
                self._block(name, list(filter(None, (ops[number] for number in numbers))))
                if self._texts[end] != EPOCH_END:
                    self._ends[name] = self._texts[end]
            names.append(by_lines[key])
        if len(names) == 1:
            return Stage(step=names[0]), names
        steps = dict.fromkeys(names[1:])
        if len(steps) == 1:
            return Stage(step=names[1], setup=names[0]), names
        self._blocks[f"{prefix}step"] = tuple(Run(block=name) for name in names[1:])
        self._notes.append(f"a step is {len(names) - 1} iterations of the file, which differ")
        return Stage(step=f"{prefix}step", setup=names[0]), names

    def _timed_stage(
        self, prefix: str, section: _Numbered, ops: Sequence[Operation | None]
    ) -> tuple[Stage, list[str]]:
        """Return a log's iterations as one, with the median time of each operation."""
        setup = section.epochs[0] if len(section.epochs) > 1 else []
        steps = section.epochs[1:] or section.epochs
        operations = []
        for column in itertools.zip_longest(*steps):
            if None in column or len({ops[number] for number in column}) > 1:
                raise ConfigError("iterations", len(steps), "ones of the same operations")
            operations.append(self._timed(column, ops))
        self._block(f"{prefix}setup", [self._timed([number], ops) for number in setup])
        self._block(f"{prefix}step", operations)
        self._notes.append(
            f"times are medians of {len(steps)} iterations, as the host saw them"
        )
        names = [f"{prefix}setup", f"{prefix}step"]
        return Stage(step=names[1], setup=names[0]), names

    def _timed(self, column: Sequence[int], ops: Sequence[Operation | None]) -> Operation:
        lines = (self._parsed[number] for number in column)
        times = [line.elapsed_ms for line in lines if line.elapsed_ms is not None]
        op = ops[column[0]]
        assert op is not None
        return replace(op, time_s=median(times) * 1e-3 if times else None)

    def _block(self, name: str, ops: Sequence[Operation]) -> None:
        """Add a block; transfers in a row do not wait for each other: isend and irecv."""
        calls: list[_Call] = []
        for op in ops:
            if is_transfer(op) and calls and is_transfer(calls[-1][-1]):
                calls[-1] = (*calls[-1], replace(op, fused=True))
            else:
                calls.append((op,))
        self._blocks[name] = self._items(fold(calls))

    def _items(self, folded: Sequence[_Call | Repeat[_Call]]) -> Block:
        items: list[Operation | Run] = []
        for item in folded:
            if not isinstance(item, Repeat):
                items += item
                continue
            if item not in self._bodies:
                body = self._items(item.body)
                self._bodies[item] = f"lines {len(self._bodies)}"
                self._blocks[self._bodies[item]] = body
            items.append(Run(block=self._bodies[item], times=item.times))
        return tuple(items)

    def _num_microbatches(self) -> int:
        """Return the micro-batches of the first iteration, by its embeddings or heads."""
        for section in self._sections:
            epoch = section.epochs[:2][-1]  # after the set-up, where there is one
            parts = Counter(self._parsed[number].stage for number in epoch)
            if number := parts[_EMBEDDING] or parts[_HEAD]:
                return number
        self._notes.append("no embedding and no head tell the number of micro-batches")
        return 1


class _Section(msgspec.Struct):
    """One rank's lines: the line before its header, and its iterations by block."""

    before: str
    epochs: list[str]


class _Origin(msgspec.Struct):
    """Text of the file. lines: the original ones, by our text for them ("name|line")."""

    end: str
    sections: list[_Section]
    lines: dict[str, str]
    ends: dict[str, str]  # of iterations that end in another line than usual


def read(path: Path, *, group_sizes: Mapping[str, int] | None = None) -> Workload:
    """Read a file, or a folder's file of each stage.

    Raise ConfigError, with the line's number, if it has another format. group_sizes:
    {"ep": 16} where no line has the size, as for AICB's experts.
    """
    lines = list[str]()
    names = dict[int, str]()
    for file in stage_files(path, ".csv"):
        names[len(lines)] = file.name
        lines += read_lines(file, "AICB workload")
        end = "" if lines[-1] else "\n"
        lines = lines[:-1] if end else lines
    with in_file(path):
        is_folder = path.is_dir()
        reader = Reader(lines, dict(group_sizes or {}), names if is_folder else {})
        workload = reader.workload(path.name.partition(".")[0], end)
        num_stages = workload.groups["pp"].size if "pp" in workload.groups else 1
        if is_folder and num_stages > len(names):
            allowed = f"those of stages 0 to {num_stages - 1}"
            raise ConfigError("files", ", ".join(names.values()), allowed)
        workload.check()
    return workload


def write(workload: Workload, *, stage: int = 0, computation: bool = True) -> Iterator[str]:
    """Yield the text in pieces; of a generated workload, one stage's.

    computation: with lines of matrix products. Raise ConfigError for a broken origin.
    """
    if FORMAT in workload.origin:
        origin = origin_of(workload, FORMAT, _Origin)
        yield from with_end(_lines_again(workload, origin), origin.end)
        return
    yield from write_generated(workload, stage, computation=computation)


def omissions(workload: Workload, stages: Iterable[int] | None = None) -> list[str]:
    """Return what the CSV cannot express of this workload besides messages, a line each."""
    if FORMAT not in workload.origin:
        return generated_omissions(workload, stages)
    ops = (item for block in workload.blocks.values() for item in block)
    timed = any(getattr(op, "time_s", None) is not None for op in ops)
    return ["times: a workload of AICB has none, only its log of a run"] if timed else []


def kept(workload: Workload, stage: int) -> Representable:
    """Return the messages of a stage's file: its distinct lines, read back."""
    lines = {setup: Lines(workload, computation=False, setup=setup) for setup in (False, True)}
    result = Representable(label=lines[False].label, has_setup=True)
    for op, times, setup in communication(workload, stage):
        if text := lines[setup](op):
            line = parse(text.rstrip("\n"), text)
            group = Group(digits=((line.group_size or 1, 1),))
            read_back = operation(line, {group_of(line, {}): group}, text)
            assert isinstance(read_back, CommOp)
            result.add(read_back, group, times, setup=setup, label=line.group)
    return result


def _lines_again(workload: Workload, origin: _Origin) -> Iterator[str]:
    def line(op: Operation) -> str:
        ours = line_of(op, workload.groups)
        return origin.lines.get(f"{op.name}|{ours}", ours)

    text = RepeatedText(workload.blocks, line)
    for section in origin.sections:
        yield section.before + HEADER + "\n"
        for name in section.epochs:
            if name not in workload.blocks:
                raise ConfigError(f"origin.{FORMAT}", name, "one of the blocks")
            yield from text.chunks(name)
            yield origin.ends.get(name, EPOCH_END) + "\n"


def write_log(workload: Workload, iterations: Iterable[Sequence[float]]) -> Iterator[str]:
    """Yield the operations of rank 0 with their times.

    iterations: seconds of each operation, not a number where it has no time. As in AICB,
    times are in ms and bandwidths in GiB/s; the bus factor is nccl-tests' (AICB has 1 for an
    all-to-all). The end of an iteration has no time: it is not that of a timed pass.
    """
    yield HEADER + "\n"
    yield no_setup(workload.world_size)
    yield EPOCH_END + "\n"
    line = Lines(workload, computation=True)
    is_aicb = FORMAT in workload.origin
    ops = list(workload.expand())
    for times in iterations:
        for op, time_s in zip(ops, times, strict=False):
            text = line_of(op, workload.groups) if is_aicb else line(op)
            yield _logged(text, op, workload.groups, time_s) if text else ""
        yield EPOCH_END + "\n"


def _logged(text: str, op: Operation, groups: Mapping[str, Group], time_s: float) -> str:
    """Return a line with its time and bandwidths, where it has them."""
    if math.isnan(time_s):
        return text
    rates = [0.0, 0.0]
    if isinstance(op, CommOp) and time_s:
        group = groups[op.group]
        num_bytes = op.message_bytes(group), op.bus_bytes(group)
        rates = [size / time_s / GIB for size in num_bytes]
    known = ",".join([f"{time_s * 1e3:.6g}", *(f"{rate:.4g}" for rate in rates)])
    return text.replace(",None,None,None,1\n", f",{known},1\n")


def write_generated(workload: Workload, stage: int, *, computation: bool) -> Iterator[str]:
    """Yield the text of a stage in pieces. computation: with lines of matrix products."""
    program = workload.stages[stage]
    yield HEADER + "\n"
    init = Lines(workload, computation=computation, setup=True)
    before = RepeatedText(workload.blocks, init)
    setup = "".join(before.chunks(program.setup)) if program.setup else ""
    yield setup or no_setup(workload.world_size)
    yield EPOCH_END + "\n"
    line = Lines(workload, computation=computation)
    yield from RepeatedText(workload.blocks, line).chunks(program.step)
    yield EPOCH_END + "\n"


def generated_omissions(workload: Workload, stages: Iterable[int] | None) -> list[str]:
    """Return what the CSV cannot express of these stages besides messages, a line each."""
    stages = list(range(len(workload.stages)) if stages is None else stages)
    ops = tallied(workload, stages)
    for stage in stages:
        ops.update(workload.tally(stage, setup=True))
    comms = [op for op in ops if isinstance(op, CommOp)]
    line = Lines(workload, computation=False)
    lines = present(workload, "layers", "micro-batches", "times", "start times")
    lines += present(workload, "model", "settings", "notes")
    lines += remarks(
        (
            any(op.stream != COMPUTE for op in ops),
            "overlap: every line waits for the one before",
        ),
        (
            any(op.dtype is not DType.UINT8 for op in comms),
            "element types: sizes are bytes",
        ),
        (
            any(op.collective == Collective.ALL_TO_ALL_V for op in comms),
            "uneven parts of all_to_all_v: written as all_to_all of the average",
        ),
        (
            any(line.in_pipeline(op) != op for op in comms),
            "the second group of transfers between two stages: they are in pp_group, too",
        ),
    )
    modules: dict[str, dict[str, int]] = {}
    for op, times in ops.items():
        if isinstance(op, ComputeOp) and not isinstance(op.op, Gemm):
            counts = modules.setdefault(type(op.op).__name__.lower(), {})
            counts[op.module] = counts.get(op.module, 0) + times
    for kind, counts in sorted(modules.items()):
        lines.append(
            f"{kind}: {sum(counts.values())} computations ({', '.join(counts)}): only matrix"
            " products have lines"
        )
    return lines
