"""Derive the figures of healthy tables, and score the judgement of tables by them.

    python validation/normal_ranges.py write    src/stepmark/data/collectives.toml
    python validation/normal_ranges.py score    each table by ranges without it
    python validation/normal_ranges.py ranges   the table of docs/howto/check-nodes.md

Sources: data/collective-tables.csv (what a table is and where it stands, whether its source
calls it healthy) and data/collective-rows.csv (its rows), and our own runs of nccl-tests. A
table is scored two ways: without it, and without any table of its source; each with the NICs
that its source states, and without. `score -v` prints each table that is not called what its
source calls it.
"""

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from stepmark import text_tables  # noqa: E402
from stepmark.collectives import judgement, reference_ranges  # noqa: E402
from stepmark.collectives.reference_ranges import HealthyCurve  # noqa: E402
from stepmark.collectives.table_curve import curves_of  # noqa: E402
from stepmark.ground.dtypes import DTYPE_ALIASES  # noqa: E402
from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table  # noqa: E402
from stepmark.ground.units import GB  # noqa: E402
from stepmark.model.collectives import collective_named  # noqa: E402
from stepmark.model.device import find_device, load_devices  # noqa: E402

DATA = Path(__file__).parent / "data"
OUTPUT = ROOT / "src" / "stepmark" / "data" / "collectives.toml"
OWN = ("results/*/nccl-tests-*.txt", "tests/data/nccl-tests/*.txt")
PLACEMENT = {"out": OUT_OF_PLACE, "in": IN_PLACE}
# Its program of Python waits for each call.
BENCH = "https://github.com/stas00/ml-engineering"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A table with what its source states about it."""

    name: str
    source: str
    healthy: str  # "yes", "unknown", "no: ..."
    note: str
    table: Table
    network: str
    nics: tuple[int, float] | None
    is_own: bool = False


@cache
def samples() -> tuple[Sample, ...]:
    """Return all public tables, then our own."""
    rows: dict[str, list[dict[str, str]]] = {}
    for row in _rows("collective-rows.csv"):
        rows.setdefault(row["id"], []).append(row)
    public = [_public(facts, rows[facts["id"]]) for facts in _rows("collective-tables.csv")]
    return (*public, *_own())


@cache
def _by_name() -> dict[str, Sample]:
    return {sample.name: sample for sample in samples()}


def _rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((DATA / name).read_text(encoding="utf-8").splitlines()))


def _public(facts: dict[str, str], rows: Sequence[dict[str, str]]) -> Sample:
    dtype = str(DTYPE_ALIASES.get(facts["dtype"], facts["dtype"]))
    readings = tuple(
        Reading(
            line=line,
            size_bytes=int(row["bytes"]),
            dtype=dtype,
            placement=PLACEMENT[row["placement"]],
            time_s=float(row["time_us"]) * 1e-6 if row["time_us"] else None,
            busbw_bytes_per_s=float(row["busbw_GBps"]) * GB,
            printed=(row["time_us"], "", row["busbw_GBps"]),
        )
        for line, row in enumerate(rows, 1)
    )
    hosts = int(facts["hosts"])
    gpu = "" if facts["gpu"] == "not stated" else facts["gpu"]
    table = Table(
        file=facts["id"],
        first_line=1,
        last_line=len(rows),
        title="",
        tool="all_reduce_bench" if facts["source"].startswith(BENCH) else "nccl-tests",
        collective=collective_named(facts["collective"]),
        num_ranks=hosts * int(facts["gpus_per_host"]),
        num_hosts=hosts,
        device=load_devices()[facts["device"]].names[0] if facts["device"] else gpu,
        readings=readings,
    )
    return Sample(
        name=facts["id"],
        source=facts["source"],
        healthy=facts["healthy"],
        note=facts["note"],
        table=table,
        network=facts["network_kind"],
        nics=(int(facts["nics"]), float(facts["nic_gbit"])) if facts["nics"] else None,
    )


def _own() -> Iterator[Sample]:
    for pattern in OWN:
        for path in sorted(ROOT.glob(pattern)):
            for table in text_tables.find(path):
                name = path.relative_to(ROOT).as_posix()
                yield Sample(
                    name=name,
                    source=f"own run, {path.parent.relative_to(ROOT).as_posix()}",
                    healthy="yes",
                    note="",
                    table=table,
                    network="",
                    nics=None,
                    is_own=True,
                )


@cache
def _curves(name: str) -> list[HealthyCurve]:
    """Return the figures of each curve of a healthy sample, with what they hold for."""
    sample = _by_name()[name]
    hardware = reference_ranges.hardware_of(sample.table, sample.nics)
    is_known = hardware.num_hosts == 1 or (hardware.num_hosts and hardware.nic_gbit)
    if sample.healthy != "yes" or not is_known:
        return []
    result = []
    for curve in curves_of(sample.table):
        share = latency = None
        family = reference_ranges.family_of(sample.table.collective, curve.dtype)
        unit = reference_ranges.rate(hardware, family, hardware.nic_gbit)
        if unit and curve.is_large:
            share = round(curve.peak.busbw / unit, 4)
        if curve.smallest and reference_ranges.has_latency(sample.table):
            estimate = reference_ranges.tuner_latency_s(family, hardware)
            latency = round(curve.smallest.time_s / estimate, 2)
        if share or latency:
            healthy = HealthyCurve(
                link=(hardware.device and hardware.device.link_kind) or "",
                hosts=hardware.hosts,
                network=sample.network,
                nic_gbit=hardware.nic_gbit,
                family=family,
                share=share,
                latency=latency,
                source=sample.source,
                fingerprint=curve.fingerprint,
            )
            result.append(healthy)
    return result


def derive(chosen: Sequence[Sample]) -> list[HealthyCurve]:
    """Return the curves of these samples' healthy tables, those of one hardware together."""
    curves = [curve for sample in chosen for curve in _curves(sample.name)]
    return sorted(
        curves, key=attrgetter("link", "hosts", "network", "nic_gbit", "family", "source")
    )


HEADER = """# Figures of each curve of healthy tables of collectives. Do not edit: they are
# derived by `python validation/normal_ranges.py write` from validation/data and our runs.
# share: peak busbw / rate of the link or NICs (reference_ranges.rate). latency: shortest time
# up to 64 KiB / NCCL's own estimate (tuner_latency_s). nic_gbit: for each rank. fingerprint:
# of sizes and times, so that a table is no reference for itself.
"""


def toml(curves: Sequence[HealthyCurve]) -> str:
    blocks = [HEADER]
    for each in curves:
        lines = ["[[curve]]"]
        for name in HealthyCurve.__dataclass_fields__:
            value = getattr(each, name)
            if isinstance(value, str):
                lines.append(f"{name} = '{value}'")
            elif value is not None:
                lines.append(f"{name} = {value!r}")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def verdict(
    sample: Sample, healthy: Sequence[HealthyCurve], *, with_nics: bool
) -> judgement.Judgement:
    nics = sample.nics if with_nics else None
    return judgement.judge(sample.table, nics=nics, healthy=healthy)[0]


def scores(
    chosen: Sequence[Sample], left_out: str, *, with_nics: bool
) -> dict[str, judgement.Judgement]:
    """Return a judgement of each table. left_out: "table" (itself) or its whole "source"."""
    result = {}
    for sample in chosen:
        others = [
            other for other in chosen if left_out == "table" or other.source != sample.source
        ]
        result[sample.name] = verdict(sample, derive(others), with_nics=with_nics)
    return result


GPUS = ("H100, H200", "A100 SXM", "B200", "MI300X")
NAMES = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "AMD Instinct MI300X")
PLACES = ((8, 1, 0.0), (16, 2, 200.0), (16, 2, 400.0), (256, 32, 200.0), (256, 32, 400.0))
FAMILIES = ("all_reduce", "gather", "all_to_all")


def ranges_table() -> list[str]:
    """Return what healthy tables reach, as Markdown; hardware without a peak has no row."""
    lines = [
        "| GPUs | hosts | NICs | all-reduce, GB/s | gathers, GB/s | all-to-all, GB/s "
        "| shortest all-reduce | tables |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpu, name in zip(GPUS, NAMES, strict=True):
        for ranks, hosts, gbit in PLACES:
            hardware = reference_ranges.Hardware(
                device=find_device(name), num_ranks=ranks, num_hosts=hosts, nic_gbit=gbit
            )
            healthy = reference_ranges.load_healthy()
            ranges = [
                reference_ranges.reference_range(healthy, hardware, family, "")
                for family in FAMILIES
            ]
            if not any(each.link and each.share for each in ranges):
                continue
            cells = [
                _span(each.share, reference_ranges.rate(hardware, each.family, gbit) / GB, "")
                if each.link
                else "-"
                for each in ranges
            ]
            latency_us = reference_ranges.tuner_latency_s("all_reduce", hardware) * 1e6
            cells += [_span(ranges[0].latency if ranges[0].link else None, latency_us, " us")]
            cells += [" + ".join(str(each.num_tables if each.link else 0) for each in ranges)]
            where = (
                f"{gpu} | {'3 and more' if hosts > 2 else hosts} | "
                f"{f'8x{gbit:.0f}G' if hosts > 1 else '-'}"
            )
            lines.append(f"| {where} | {' | '.join(cells)} |")
    return lines


def _span(span: tuple[float, float] | None, unit: float, name: str) -> str:
    if not span:
        return "-"
    low, high = (f"{each * unit:.3g}" for each in span)
    return f"{low}{name}" if low == high else f"{low} to {high}{name}"


def main() -> None:
    chosen = samples()
    if sys.argv[1:] == ["ranges"]:
        print("\n".join(ranges_table()))
        return
    if sys.argv[1:] == ["write"]:
        OUTPUT.write_text(toml(derive(chosen)))
        return
    is_verbose = "-v" in sys.argv
    for with_nics in (True, False):
        for left_out in ("table", "source"):
            judged = scores(chosen, left_out, with_nics=with_nics)
            print(f"NICs {'stated' if with_nics else 'not stated'}, left out: {left_out}")
            for kind in ("yes", "unknown", "no", "own"):
                group = [
                    s
                    for s in chosen
                    if (
                        s.is_own
                        if kind == "own"
                        else not s.is_own and s.healthy.startswith(kind)
                    )
                ]
                counts = Counter(judged[s.name].value for s in group)
                print(f"  healthy {kind:8} {dict(counts)}")
                for s in group:
                    value = judged[s.name].value
                    if is_verbose and (kind in ("unknown", "no") or value != "normal"):
                        print(f"    {s.name}: {value}: {judged[s.name].text}")


if __name__ == "__main__":
    main()
