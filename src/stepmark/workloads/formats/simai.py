"""SimAI's workload text: one line of settings, the number of rows, then a row per layer.

A file is read as one program: all rows forward, then all backward from the last, as SimAI runs
them (HYBRID_TRANSFORMER_FWD_IN_BCKWD). Written again it is the same bytes. Generated workloads
are written by simai_rows.py.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.step.source_file import (
    in_file,
    origin_of,
    read_lines,
    stage_files,
)
from stepmark.step.workload import Block, CommOp, Group, Run, Stage, Workload
from stepmark.step.workload_stages import missing_pipeline, transfer_of
from stepmark.workloads.fold import Repeat, fold
from stepmark.workloads.formats import simai_rows
from stepmark.workloads.formats.loss import Representable, communication, rounding
from stepmark.workloads.formats.simai_rows import NONE, Row, blocks_of, parse, row_of
from stepmark.workloads.formats.walk import RepeatedText, remarks, with_end

FORMAT = "simai"
_LEAF = re.compile(r"row (\d+)\.fwd")
_MICRO = "MICRO"  # of files that have one collective per row
_POLICIES = ("HYBRID_TRANSFORMER_FWD_IN_BCKWD", "HYBRID_TRANSFORMER", _MICRO)
_REQUIRED = ("model_parallel_NPU_group", "all_gpus")


class _Origin(msgspec.Struct):
    """Content of a file that its operations lack."""

    header: str
    count: str
    end: str
    rows: dict[str, tuple[str, str]]  # by distinct row: as we would write it, as it was


def read(path: Path, *, world_size: int | None = None) -> Workload:
    """Read a file. Raise ConfigError, with the line's number, if it has another format.

    world_size: for files of 2024, whose line 1 lacks it.
    """
    files = stage_files(path, ".txt")
    if len(files) > 1:
        allowed = f"one of its files, e.g. {files[0]}: none has what the stages send each other"
        raise ConfigError("workload", path, allowed)
    lines = read_lines(files[0], "SimAI workload")
    with in_file(files[0]):
        end = "\n" if lines[-1] == "" else ""
        lines = lines[:-1] if end else lines
        if len(lines) < 3:
            raise ConfigError("lines", len(lines), "a header, a number of rows, rows")
        header = _header(lines[0], world_size)
        count = len(lines) - 2
        digits = lines[1].strip()
        if not digits.isascii() or not digits.isdecimal() or int(digits[:18]) != count:
            raise ConfigError("line 2", lines[1], f"the number of rows that follow, {count}")
        reader = Reader(header)
        numbers = [reader.number(text, place) for place, text in enumerate(lines[2:], start=3)]
        reader.program(fold(numbers))
        return Workload(
            name=path.name.partition(".")[0],
            rules=FORMAT,
            source="SimAI workload text; sizes are bytes, element types are not in the file",
            world_size=header["all_gpus"],
            num_microbatches=reader.num_microbatches or header.get("ga", 1),
            settings=header,
            groups=reader.groups,
            blocks=reader.blocks,
            stages=(Stage(step="step", layers=tuple(range(reader.num_layers))),),
            notes=reader.notes(Counter(numbers)),
            origin={
                FORMAT: {"header": lines[0], "count": lines[1], "end": end, "rows": reader.raw}
            },
        )


def check(workload: Workload) -> None:
    """Refuse one stage of a pipeline, for which line 1 would have pp 1 and no pp_comm."""
    if FORMAT not in workload.origin and (stages := missing_pipeline(workload)):
        allowed = (
            f"it needs pp, vpp and pp_comm of all stages, and the file has {stages}; "
            "convert the workload that the file is made from"
        )
        raise ConfigError("format", FORMAT, allowed)


def write(workload: Workload, *, stage: int = 0) -> Iterator[str]:
    """Yield the text in pieces. Raise ConfigError if compute times are unknown."""
    if FORMAT not in workload.origin:
        yield from simai_rows.write(workload, stage)
        return
    origin = origin_of(workload, FORMAT, _Origin)
    if "step.fwd" not in workload.blocks:
        raise ConfigError(
            f"origin.{FORMAT}", "step.fwd", "a block, as reading SimAI text makes"
        )

    def row_text(name: str) -> str | None:
        leaf = _LEAF.fullmatch(name)
        return _row_text(workload, leaf[1], origin.rows) if leaf else None

    text = RepeatedText(workload.blocks, lambda op: "", row_text)
    yield origin.header + "\n" + origin.count + "\n"
    yield from with_end(text.chunks("step.fwd"), origin.end)


def omissions(workload: Workload, stages: Iterable[int] | None = None) -> list[str]:
    """Return what the text cannot express of this workload besides messages, a line each."""
    return [] if FORMAT in workload.origin else simai_rows.omissions(workload)


def kept(workload: Workload, stage: int) -> Representable:
    """Return the messages of the file, read back; those of the pipeline are in line 1."""
    result = Representable(label=simai_rows.Messages(workload).label)
    header = _header(simai_rows.header(workload), None)
    groups = _groups_of(header)
    times = (1, workload.num_microbatches, 1)
    for rows, number in zip(simai_rows.rows(workload, stage), times, strict=True):
        for row in rows:
            parsed = parse(row.line(), row.name)
            for block in blocks_of(parsed, groups, row.name, layers=False, microbatches=False):
                for op in block:
                    if isinstance(op, CommOp):
                        result.add(op, groups[op.group], number)
    for op, number, setup in communication(workload, stage):
        is_pipeline = not setup and transfer_of(workload, stage, op)
        if is_pipeline and op.call_bytes() == header["pp_comm"]:
            result.add(op, workload.groups[op.group], number)
    return result


def _header(line: str, world_size: int | None) -> dict[str, int]:
    policy, *words = line.split() or [""]
    if policy not in _POLICIES:
        raise not_one_of("line 1", policy, _POLICIES)
    if len(words) % 2 or not (words or policy == _MICRO):
        raise ConfigError("line 1", line, "a policy word, then names and numbers in pairs")
    values: dict[str, int] = {"model_parallel_NPU_group": 1} if policy == _MICRO else {}
    for word, text in zip(words[::2], words[1::2], strict=True):
        name = word.removesuffix(":")
        digits = text.removesuffix(".0")
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 18:
            raise ConfigError(f"line 1, {name[:40]!a}", text, "a whole number, 0 or more")
        values[name] = int(digits)
    if world_size is not None:
        stated = values.setdefault("all_gpus", world_size)
        if stated != world_size:
            raise ConfigError(
                "world-size", world_size, f"{stated}, as line 1 says, or not given"
            )
    for name in _REQUIRED:
        if values.get(name, 0) < 1:
            raise ConfigError(f"line 1, {name}", values.get(name, "missing"), "1 or more")
    at_once = values["model_parallel_NPU_group"] * values.get("pp", 1)
    if not values.get("etp", 1):
        raise ConfigError("line 1, etp", 0, "1 or more")
    if not at_once or values["all_gpus"] % at_once:
        raise ConfigError("line 1, all_gpus", values["all_gpus"], f"a multiple of {at_once}")
    return values


def _row_text(workload: Workload, index: str, raw: Mapping[str, tuple[str, str]]) -> str:
    """Return the original row, but for fields that have changed since."""
    fwd, bwd = (workload.blocks.get(f"row {index}.{side}", ()) for side in ("fwd", "bwd"))
    ours, text = raw.get(index, ("", ""))
    modules = [op.module for op in (*fwd, *bwd) if not isinstance(op, Run)]
    name = ours.split("\t")[0] if ours else (modules or [f"row{index}"])[0]
    now = row_of(name, fwd, bwd, workload.groups).line()
    if not ours:
        return now
    if now == ours:
        return text
    trio = zip(now.split(), ours.split(), text.split(), strict=False)
    return "\t".join(old if new == then else new for new, then, old in trio) + "\n"


def _groups_of(header: Mapping[str, int]) -> dict[str, Group]:
    """Return groups with neighbouring tensor-parallel ranks; then come data, then pipeline.

    etp, tensor parallelism of experts, is ours: without it experts have that of the rest.
    """
    tp = header["model_parallel_NPU_group"]
    ep = header.get("ep", 1)
    dp = header["all_gpus"] // (tp * header.get("pp", 1))
    groups = {"tp": Group(digits=((tp, 1),)), "dp": Group(digits=((dp, tp),))}
    etp = header.get("etp", 1 if _is_folded(header) else tp)
    if ep and tp * dp % (etp * ep) == 0:
        groups["ep"] = Group(digits=((ep, etp),))
        groups["dp_ep"] = Group(digits=((tp * dp // (etp * ep), etp * ep),))
    return groups


def _is_folded(header: Mapping[str, int]) -> bool:
    """Return whether the data ranks are too few for the experts, so that tp ranks have some."""
    dp = header["all_gpus"] // (header["model_parallel_NPU_group"] * header.get("pp", 1))
    return "etp" not in header and bool(dp % (header.get("ep", 1) or 1))


@dataclass(frozen=True, slots=True)
class _Place:
    """Micro-batches begun so far, and layers begun in the newest of them."""

    microbatch: int = 0
    layer: int = 0


class Reader:
    """Reader of rows: `number` takes each, then `program` makes the blocks."""

    def __init__(self, header: Mapping[str, int]) -> None:
        self.groups = _groups_of(header)
        self._is_folded = _is_folded(header) and "ep" in self.groups
        self.blocks: dict[str, Block] = {}
        self.raw: dict[str, list[str]] = {}  # of rows that we would write otherwise
        self.rows: list[Row] = []
        self.num_microbatches = self.num_layers = 0
        self._num_microbatches = header.get("ga", 1)
        self._numbers: dict[tuple[str, bool], int] = {}
        self._in_attention = False  # of a layer that has started
        self._starts: list[bool] = []  # whether a row starts a layer
        self._lines: list[tuple[str, int]] = []
        self._bodies: dict[Repeat[int], tuple[str, _Place]] = {}
        self._num_repeats = 0

    def number(self, text: str, place: int) -> int:
        """Return the number of this row among the distinct ones.

        A layer that sends several messages in its attention has as many rows of that name, of
        which only the first starts it.
        """
        self._in_attention = self._in_attention and text.startswith("attention")
        key = text, self._in_attention
        number = self._numbers.setdefault(key, len(self.rows))
        if number == len(self.rows):
            row = parse(text, f"line {place}")
            self.rows.append(row)
            self._lines.append((text, place))
            self._starts.append(row.starts_layer and not self._in_attention)
        self._in_attention = self._in_attention or self._starts[number]
        return number

    def program(self, folded: tuple[int | Repeat[int], ...]) -> None:
        """Make the blocks, once all rows are numbered."""
        microbatches = any(row.starts_microbatch for row in self.rows)
        # Without the first stage's embedding no row tells where the next micro-batch begins.
        layers = microbatches or self._num_microbatches == 1
        layers = layers and any(self._starts)
        for index, row in enumerate(self.rows):
            text, place = self._lines[index]
            fwd, bwd = blocks_of(
                row, self.groups, f"line {place}", layers=layers, microbatches=microbatches
            )
            self.blocks[f"row {index}.fwd"] = fwd
            self.blocks[f"row {index}.bwd"] = bwd
            ours = row_of(row.name, fwd, bwd, self.groups).line()
            if ours != text + "\n" or not (fwd or bwd):
                self.raw[str(index)] = [ours, text + "\n"]
        last = self._body("step", folded)
        self.num_microbatches = last.microbatch
        self.num_layers = last.layer if layers else 0
        self.blocks["step"] = (Run(block="step.fwd"), Run(block="step.bwd"))

    def _body(self, name: str, body: tuple[int | Repeat[int], ...]) -> _Place:
        """Make the forward and the backward block. Return their layers and micro-batches."""
        place = _Place()
        runs = []
        for item in body:
            if isinstance(item, int):
                row = self.rows[item]
                if row.starts_microbatch:
                    place = _Place(place.microbatch + 1, 0)
                if self._starts[item]:
                    place = replace(place, layer=place.layer + 1)
                at = _Place(place.microbatch - 1, place.layer - 1)
                runs.append((f"row {item}", 1, at, _Place()))
                continue
            if item not in self._bodies:
                self._num_repeats += 1
                inner = f"rows {self._num_repeats}"
                self._bodies[item] = (inner, self._body(inner, item.body))
            inner, step = self._bodies[item]
            at = _Place(place.microbatch, 0 if step.microbatch else place.layer)
            if step.microbatch:
                place = _Place(place.microbatch + item.times * step.microbatch, step.layer)
                step = _Place(step.microbatch, 0)
            else:
                place = replace(place, layer=place.layer + item.times * step.layer)
            runs.append((inner, item.times, at, step))
        self.blocks[f"{name}.fwd"] = tuple(_run(*run, backward=False) for run in runs)
        self.blocks[f"{name}.bwd"] = tuple(_run(*run, backward=True) for run in runs[::-1])
        return place

    def notes(self, times: Mapping[int, int]) -> tuple[str, ...]:
        """Return notes. times: how often each distinct row occurs."""
        in_file = Representable()
        read = Representable()
        for number, row in enumerate(self.rows):
            blocks = self.blocks[f"row {number}.fwd"] + self.blocks[f"row {number}.bwd"]
            sent = [cell.num_bytes for cell in row.cells if cell.comm != NONE]
            comms = [op for op in blocks if isinstance(op, CommOp)]
            for op, num_bytes in zip(comms, sent, strict=True):
                group = self.groups[op.group]
                in_file.add(op, group, times[number], num_bytes=num_bytes)
                read.add(op, group, times[number])
        cells = [cell for row in self.rows for cell in row.cells]
        # aliyun/SimAI#123: AICB's generator with --aiob_enable, without sequence parallelism.
        layers = [row for row in self.rows if row.name in ("attention_layer", "mlp_layer")]
        reducing = [row for row in layers if row.cells[0].comm == "ALLREDUCE"]
        lacks_backward = bool(reducing) and all(row.cells[1].comm == NONE for row in reducing)
        notes = remarks(
            (
                lacks_backward,
                "no row has an all-reduce of input gradients, which tensor parallelism needs "
                "where a row has one forward: AICB leaves them out with --aiob_enable, so the "
                "backward pass sends too little (the same without AIOB has them)",
            ),
            (
                all(cell.compute_ns <= 1 for cell in cells),
                "every compute time is 1 ns: AICB's filler where there is no profile",
            ),
            (self._is_folded, "ep does not divide dp: read as neighbouring ranks, across tp"),
        )
        return (*notes, *rounding(in_file, read))


def _run(block: str, times: int, at: _Place, step: _Place, *, backward: bool) -> Run:
    """Return a run of the forward block, or of the backward block from its last repetition."""
    first, direction = (times - 1, -1) if backward else (0, 1)
    return Run(
        block=f"{block}.bwd" if backward else f"{block}.fwd",
        times=times,
        layer=at.layer + step.layer * first,
        layer_step=direction * step.layer,
        microbatch=at.microbatch + step.microbatch * first,
        microbatch_step=direction * step.microbatch,
    )
