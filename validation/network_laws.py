"""Fit the constants of collectives in data/networks.toml, and score them on tables left out.

    python validation/network_laws.py fit      constants of each law over hosts, all tables
    python validation/network_laws.py score    InfiniBand and RoCE, each table left out [-v]
    python validation/network_laws.py plain    the same by a + b, without fitted constants
    python validation/network_laws.py inside   tables of one host, by the constants as they are

Tables are those of normal_ranges.py whose source calls them healthy.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "validation")]

from normal_ranges import Sample, samples  # noqa: E402

from stepmark.collectives.network_fit import Point, fit  # noqa: E402
from stepmark.model.device import find_device  # noqa: E402
from stepmark.model.network import Law, Network, Reduction, Tier  # noqa: E402
from stepmark.model.network_options import NetworkChoice  # noqa: E402
from stepmark.model.systems import law_of_links  # noqa: E402
from stepmark.model.systems import network_of as system_network  # noqa: E402
from stepmark.text_tables.printed_figures import itemsize_of  # noqa: E402

KINDS = {"rdma": "RDMA", "efa": "EFA", "tcpxo": "TCPXO"}
CLASSES = ((0, 2**16), (2**16 + 1, 2**22), (2**22 + 1, 2**27), (2**27 + 1, 2**60))
CLASS_NAMES = ("<= 64 KiB", "to 4 MiB", "to 128 MiB", "above")


def network_of(sample: Sample) -> Network:
    """Return the network of a table as its source states it."""
    table = sample.table
    assert sample.nics
    assert table.num_ranks
    assert table.num_hosts
    per_host = table.num_ranks // table.num_hosts
    device = find_device(table.device)
    inside = Tier(name="inside", num_gpus=per_host, bytes_per_s=1e15, law=Law())
    reduction = Reduction.NONE
    if device and device.link_bytes_per_s:
        law = law_of_links(device)
        rate = device.link_bytes_per_s
        inside = Tier(name="inside", num_gpus=per_host, bytes_per_s=rate, law=law)
        is_one_byte = itemsize_of(table.readings[0].dtype) == 1
        is_ring = "Ring" in sample.note or sample.name.endswith("ring")
        if "nvls" in law.shares and not is_one_byte and not is_ring:
            reduction = Reduction.NVLS
    nics, gbit = sample.nics
    rate = nics * gbit / 8 * 1e9 / per_host
    outside = Tier(name="network", num_gpus=None, bytes_per_s=rate, law=Law())
    return Network(
        name=sample.name,
        tiers=(inside, outside),
        gpus_per_host=per_host,
        reduction=reduction,
    )


def points(sample: Sample) -> Iterator[tuple[int, Point]]:
    """Yield the sizes of a table with their times and the terms of the law."""
    network = network_of(sample)
    placement = network.placement(range(sample.table.num_ranks or 0))
    collective = sample.table.collective
    latency_s = network.latency_s(collective, placement)
    for reading in sample.table.readings:
        if reading.time_s and reading.size_bytes:
            size = reading.size_bytes
            transfer_s = network.transfer_s(collective, size, placement)
            yield size, Point(latency_s, transfer_s, reading.time_s)


def class_of(size: int) -> int:
    return next(index for index, (low, high) in enumerate(CLASSES) if low <= size <= high)


def tables(kind: str) -> dict[str, list[tuple[int, Point]]]:
    """Return the points of the healthy tables over this kind of network, by name."""
    return {
        sample.name: list(points(sample))
        for sample in samples()
        if sample.healthy == "yes" and sample.network == kind and sample.nics
    }


def fitted(known: Iterable[tuple[int, Point]]) -> Law:
    """Return the law of all points; each class of sizes weighs the same."""
    known = list(known)
    counts = [sum(class_of(size) == each for size, _ in known) for each in range(4)]
    weighted = [point._replace(weight=1 / counts[class_of(size)]) for size, point in known]
    return fit(weighted, Law())


def errors(kind: str) -> Mapping[str, Sequence[tuple[int, float]]]:
    """Return the relative errors of each table by the law of the others, with the sizes."""
    known = tables(kind)
    result = {}
    for name, own in known.items():
        law = fitted(point for other, each in known.items() if other != name for point in each)
        result[name] = [(size, law.time_s(p[0], p[1]) / p.time_s - 1) for size, p in own]
    return result


def plain_errors(kind: str) -> Mapping[str, Sequence[tuple[int, float]]]:
    """Return the relative errors of latency and bytes over the rate, without a fit."""
    law = Law()
    return {
        name: [(size, law.time_s(p[0], p[1]) / p.time_s - 1) for size, p in own]
        for name, own in tables(kind).items()
    }


def rows(
    by_table: Mapping[str, Sequence[tuple[int, float]]],
) -> Iterator[tuple[str, int, float, float]]:
    """Yield class, points, and median and 90th percentile of the error, as shares."""
    all_errors = [each for own in by_table.values() for each in own]
    for index, name in enumerate(CLASS_NAMES):
        own = sorted(abs(error) for size, error in all_errors if class_of(size) == index)
        if own:
            yield name, len(own), median(own), own[int(0.9 * (len(own) - 1))]


def inside_errors() -> Mapping[str, Sequence[tuple[int, float]]]:
    """Return the relative errors of healthy tables of one host."""
    result: dict[str, list[tuple[int, float]]] = {}
    for sample in samples():
        device = find_device(sample.table.device)
        count = sample.table.num_ranks or 0
        if sample.healthy != "yes" or sample.table.num_hosts != 1 or not device:
            continue
        options = NetworkChoice(reduction=Reduction.NONE if sample.is_own else None)
        network = system_network(device, count, options)
        placement = network.placement(range(count))
        for each in sample.table.readings:
            if each.time_s and each.size_bytes:
                own_s = network.time_s(sample.table.collective, each.size_bytes, placement)
                error = each.size_bytes, own_s / each.time_s - 1
                result.setdefault(f"{sample.name} {sample.table.collective}", []).append(error)
    return result


def main() -> None:
    if sys.argv[1:2] == ["fit"]:
        for law, kind in KINDS.items():
            own = fitted(point for each in tables(kind).values() for point in each)
            factors = f"transfer {own.transfer:.3f} ramp {own.ramp:.2f}"
            print(f"{law}: latency {own.latency:.3f} {factors}")
    elif sys.argv[1:2] in (["score"], ["plain"], ["inside"]):
        scores = {
            "score": partial(errors, "RDMA"),
            "plain": partial(plain_errors, "RDMA"),
            "inside": inside_errors,
        }
        by_table = scores[sys.argv[1]]()
        for name, count, middle, most in rows(by_table):
            print(f"{name:12} {count:4} rows  median {middle:6.1%}  p90 {most:6.1%}")
        for name, own in by_table.items() if "-v" in sys.argv else ():
            classes = [[e for size, e in own if class_of(size) == i] for i in range(4)]
            print(name, *(f"{median(each):+.0%}" if each else "-" for each in classes))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
