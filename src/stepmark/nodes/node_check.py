"""Results of a node check: rates by place, failures, and what was not tested.

A place is a host ("node1") or one of its devices ("node1/0"). On disk they are a file per host
in a folder that all hosts share.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import written
from stepmark.ground.read_text import read_whole
from stepmark.ground.units import GB, TFLOP
from stepmark.store.codec import json_object, to_plain

NODE_CHECK_SCHEMA = 1
FOLDER = "nodes"
UNITS = {"FLOP/s": (TFLOP, "TFLOP/s"), "B/s": (GB, "GB/s")}  # and how they are printed


def host_of(place: str) -> str:
    return place.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One rate, by launch. Figures of equal name, unit and device are comparable.

    `where` is the place that has the rate, or the two places of a pair: source, destination.
    """

    name: str  # e.g. "gemm 8192x8192x8192 bf16"; its first word is the family
    unit: str  # "FLOP/s" or "B/s"
    values: tuple[float, ...]
    where: tuple[str, ...]
    device: str  # exact name
    peak: float | None = None  # of the data sheet

    @property
    def value(self) -> float | None:
        """Return the geometric mean over launches; None without a finite rate in each."""
        if not self.values or not all(math.isfinite(v) and v > 0 for v in self.values):
            return None
        return math.exp(fmean(map(math.log, self.values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A sentence about a place."""

    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A property of a place that should be equal on all hosts, such as a link's width."""

    where: str
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """The check of one host, or of one of its devices until they are merged.

    nodename: by which the host knows itself, where the job has another name for it.
    port_bytes_per_s: rate of its fastest network port that is up.
    num_devices: accelerators of the host. failures: wrong data, hangs, new errors. unclear:
    tests that were tried and have no result. not_tested: tests that do not apply here, with
    the reason. stage: the test in progress; "" at the end.
    """

    host: str
    checked_at: str  # ISO 8601, UTC
    num_devices: int = 0
    figures: tuple[Figure, ...] = ()
    failures: tuple[Remark, ...] = ()
    unclear: tuple[Remark, ...] = ()
    not_tested: tuple[Remark, ...] = ()
    notes: tuple[Remark, ...] = ()
    facts: tuple[Fact, ...] = ()
    nodename: str = ""
    port_bytes_per_s: float | None = None
    stage: str = ""
    schema: int = NODE_CHECK_SCHEMA


def merged(first: NodeCheck, others: Iterable[NodeCheck]) -> NodeCheck:
    """Return the first check with the results of the others added."""
    for other in others:
        first = replace(
            first,
            num_devices=first.num_devices + other.num_devices,
            figures=first.figures + other.figures,
            failures=first.failures + other.failures,
            unclear=first.unclear + other.unclear,
            not_tested=first.not_tested + other.not_tested,
            notes=first.notes + other.notes,
            facts=first.facts + other.facts,
        )
    return first


def write(check: NodeCheck, file: Path) -> None:
    """Write a check; the file appears whole or not at all."""
    text = msgspec.json.encode(to_plain(check))
    with written(file, "out") as stream:
        stream.write(msgspec.json.format(text, indent=2) + b"\n")


def read(file: Path, field: str = "from") -> NodeCheck:
    """Read a check. Raises ConfigError."""
    name = f"{field} {file}"
    plain = json_object(read_whole(file, "run"), name)
    if plain.get("schema") != NODE_CHECK_SCHEMA:
        schema = plain.get("schema", "no schema")
        raise ConfigError(name, schema, f"a node check of schema {NODE_CHECK_SCHEMA}")
    try:
        check = msgspec.convert(plain, NodeCheck, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            name, plain.get("host", "no host"), f"a node check ({error})"
        ) from None
    for figure in check.figures:
        if len(figure.where) not in (1, 2) or figure.unit not in UNITS:
            allowed = f"figures of one place or two, in {' or '.join(UNITS)}"
            raise ConfigError(name, figure.name, allowed)
    return check


def read_all(folder: Path, expected: Collection[str] = ()) -> list[NodeCheck]:
    """Read the checks of all hosts in a folder, by name. Raises ConfigError.

    A file that cannot be read is a failure of its host. A figure of a host that has no file is
    refused, unless the host is expected.
    """
    files = sorted((folder / FOLDER).glob("*.json"))
    if not files:
        raise ConfigError("from", folder, f"a folder with {FOLDER}/HOST.json of some host")
    checks = {file: _read_or_failure(file) for file in files}
    hosts = {check.host for check in checks.values()}.union(expected)
    for file, check in checks.items():
        for figure in check.figures:
            for host in map(host_of, figure.where):
                if host not in hosts:
                    allowed = f"of hosts that have a file; {host} has none"
                    raise ConfigError(f"from {file}", "-".join(figure.where), allowed)
    return list(checks.values())


def _read_or_failure(file: Path) -> NodeCheck:
    try:
        return read(file)
    except ConfigError as error:
        text = f"its result cannot be read: {error}"
    return NodeCheck(
        host=file.stem, checked_at="", failures=(Remark(where=file.stem, text=text),)
    )
