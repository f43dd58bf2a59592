"""Formats of workload files, and the recognition of a file's format.

A format is a module here with `read(path)`, `write(workload, ...)` and
`omissions(workload, stages)`, or some of them, and is imported on first use. `check(workload)`
refuses a workload that it cannot hold at all. Other modules here read models and shapes.
"""

import contextlib
import importlib
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.read_text import read_head
from stepmark.step.source_file import read_json

_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format. module: in this folder. is_one: whether a file with this beginning has it.

    needs_times: a file must have times of computation. picks: it holds the program of one
    pipeline stage or of one rank, `write(workload, stage=...)` or `rank=...`. first: pattern of
    a file that a folder of all ranks or stages has (`files(workload, ranks)` fills that of
    ranks). takes: patterns of files that a reader of a folder takes for a part of the
    workload. takes_samples: `write(workload, samples=...)` has the spread of operators that
    were measured. framework: it is a framework's own file, of workloads by its rules.
    """

    module: str
    help: str
    suffix: str
    is_one: Callable[[bytes], bool]
    reads: bool = True
    writes: bool = True
    needs_times: bool = False
    picks: str = ""
    package: str = "stepmark.workloads.formats"
    first: str = ""
    takes: tuple[str, ...] = ()
    takes_samples: bool = False
    framework: str = ""

    def load(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.{self.module}")


def _json_with(*marks: bytes) -> Callable[[bytes], bool]:
    """Return a check that a file begins as JSON and has all of these in its head."""
    return lambda head: (
        head.lstrip()[:1] in (b"{", b"[") and all(mark in head for mark in marks)
    )


def _is_param(head: bytes) -> bool:
    """Return whether it is a list of comms and compute; one rank may have none of either."""
    begins = head.lstrip()[:1] == b"["
    return begins and (b'"comms"' in head or b'"compute"' in head or not head.strip(b"[] \r\n"))


def _is_chakra(head: bytes) -> bool:
    """Return whether it begins with a length and a GlobalMetadata of it: fields 1 and 2.

    Metadata, which may be empty, are followed by a node that begins with its number or name.
    """
    length, at = varint(head, 0)
    end = at + length
    while at < min(end, len(head)):
        if head[at] not in (0x0A, 0x12):
            return False
        size, begin = varint(head, at + 1)
        at = begin + size
    _, node = varint(head, end)
    if end > len(head) or node >= len(head):
        return len(head) == _HEAD_BYTES
    return at == end and head[node] in (0x08, 0x12)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf and where it ends: behind the data if it is cut off."""
    value = 0
    for shift, byte in enumerate(data[at : at + 5]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    return value, len(data) + 1


FORMATS: dict[str, Format] = {
    "native": Format(
        module="native",
        package="stepmark.step",
        help="stepmark's JSON: everything",
        suffix=".json",
        is_one=_json_with(b'"stepmark workload"'),
    ),
    "simai": Format(
        module="simai",
        help="SimAI's text of 12 columns",
        suffix=".txt",
        is_one=lambda head: head.startswith((b"HYBRID_TRANSFORMER", b"MICRO")),
        needs_times=True,
        picks="stage",
        first="stage*.txt",
        takes=("stage*.txt",),
    ),
    "aicb": Format(
        module="aicb",
        help="AICB's CSV of a step's operations",
        suffix=".csv",
        is_one=lambda head: all(
            mark in head.split(b"\n", 1)[0] for mark in (b"comm_type", b"comm_group")
        ),
        picks="stage",
        first="stage*.csv",
        takes=("stage*.csv",),
    ),
    "param": Format(
        module="param_trace",
        help="PARAM's trace of one rank, for commsTraceReplay",
        suffix=".json",
        is_one=_is_param,
        picks="rank",
        first="0.json",
        takes=("*.json",),
    ),
    "chakra": Format(
        module="chakra",
        help="Chakra execution trace of one rank, for ASTRA-sim",
        suffix=".et",
        is_one=_is_chakra,
        picks="rank",
        first="*.0.et",
        takes=("*.et", "0.json"),
    ),
    "aiob": Format(
        module="aiob",
        help="AIOB's profile: forward times of a model's parts",
        suffix=".txt",
        is_one=lambda head: False,
        reads=False,
        takes_samples=True,
    ),
    "csv": Format(
        module="op_csv",
        help="a line per operation, for people and spreadsheets",
        suffix=".csv",
        is_one=lambda head: False,
        reads=False,
    ),
    "megatron-args": Format(
        module="megatron_args",
        framework="megatron",
        help="a script with Megatron-LM's arguments, which --config reads",
        suffix=".sh",
        is_one=lambda head: False,
        reads=False,
    ),
    "torchtitan": Format(
        module="torchtitan",
        framework="pytorch",
        help="torchtitan's TOML, which --config reads",
        suffix=".toml",
        is_one=lambda head: False,
        reads=False,
    ),
    "deepspeed": Format(
        module="deepspeed_json",
        framework="deepspeed",
        help="DeepSpeed's JSON, which --config reads",
        suffix=".json",
        is_one=lambda head: False,
        reads=False,
    ),
}


def find_format(name: str, *, to: bool) -> str:
    """Return a name in FORMATS that can be written (to) or read. Raise ConfigError."""
    key = name.strip().lower()
    names = [key for key, form in FORMATS.items() if (form.writes if to else form.reads)]
    if key not in names:
        raise not_one_of("format", name, names)
    return key


# Files of other tools: marks in the head, what it is, and what to give instead.
_OTHERS = (
    ((b"train_iter:",), "AIOB's profile, which --compute-from takes"),
    ((b"inference_term:",), "AIOB's profile, which --compute-from takes"),
    (
        (b'"workload_graph"',),
        "Chakra's graph as JSON, which is not read: give the trace itself, PREFIX.RANK.et",
    ),
    (
        (b'"schema"', b'"nodes"'),
        "PyTorch's execution trace: chakra_trace_link and chakra_converter make PREFIX.RANK.et "
        "of it",
    ),
    (
        (b'"version"', b"}{"),
        "the text of chakra_jsonizer: give the trace itself, PREFIX.RANK.et",
    ),
)
_OF_TRACES = "`stepmark trace to-workload` makes a workload of traces"


def _is_trace(head: bytes) -> bool:
    if head.startswith(b"\x1f\x8b"):
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    return b'"traceEvents"' in head or b'"deviceProperties"' in head


def sniff(path: Path) -> str:
    """Return the name in FORMATS of a file, or of a folder of ranks or stages, by its content.

    Raise ConfigError.
    """
    for name, form in FORMATS.items():
        if form.first and path.is_dir() and any(path.glob(form.first)):
            return name
    if path.is_dir():
        names = " or ".join(name for name, form in FORMATS.items() if form.first)
        raise ConfigError("workload", path, f"a file or a folder of {names} ({_OF_TRACES})")
    head = read_head(path, _HEAD_BYTES, "workload").removeprefix(BOM_UTF8)
    readable = {name: form for name, form in FORMATS.items() if form.reads}
    for name, form in readable.items():
        if form.is_one(head):
            return name
    what = "an empty file" if not head.strip() else "a file of unknown kind"
    if path.suffix == ".json":
        what += " (a model's config.json has `model_type`)"
    known = [name for marks, name in _OTHERS if all(mark in head for mark in marks)]
    what = next(iter(known), what)
    if b'"hidden_size"' in head and b'"model_type"' not in head:
        what = "a model's config without `model_type`, which names its family"
    if _is_trace(head):
        what = f"a profiler trace ({_OF_TRACES})"
    elif not known and head.lstrip()[:1] in (b"{", b"["):
        read_json(path)  # which names the place where it is no JSON
    allowed = f"a workload in one of these: {', '.join(readable)}; this is {what}"
    raise ConfigError("workload", path, allowed)
