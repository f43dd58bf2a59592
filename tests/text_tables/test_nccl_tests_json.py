"""nccl-tests -J: all its versions and oddities, and nothing of its environment."""

import json

import pytest

from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Table
from stepmark.text_tables import tables_of
from stepmark.text_tables.validate import validate

SIZES = (1024, 2**20, 2**26)
SECRET = "s3cret-token"


def half(size: int, key: str = "time") -> dict[str, object]:
    micros = 10 + size / 1e5
    algbw = size / micros / 1e3
    return {
        key: round(micros, 6),
        "alg_bw": round(algbw, 6),
        "bus_bw": round(algbw * 1.75, 6),
        "nwrong": 0.0,
    }


def result(size: int, key: str = "time") -> dict[str, object]:
    return {
        "size": size,
        "count": size // 4,
        "type": "float",
        "redop": "sum",
        "root": "    -1",
        "out_of_place": half(size, key),
        "in_place": half(size, key),
        "actual_iterations": 20,
        "experiment_name": "",
    }


def document(version: int = 3, config: dict[str, object] | None = None) -> dict[str, object]:
    spelt = "average_bus_bandwidth" if version > 1 else "average_bus_bandwidith"
    devices = [
        {"rank": rank, "group": 0, "pid": 1, "hostname": "vm", "device": rank}
        for rank in (0, 4)
    ]
    return {
        "version": version,
        "start_time": "2025-11-21 03:04:05",
        "args": ["./build/all_reduce_perf", "-b", "1K", "-z", "3"],
        "env": [f"HF_TOKEN={SECRET}", "PATH=/usr/bin"],
        "nccl_version": 22809,
        "config": {
            "nthreads": 1,
            "ngpus": 4,
            "aggregated_iterations": 1,
            "graph": 0,
            "blocking_collectives": "false",
            "devices": devices,
        }
        | (config or {}),
        "results": [result(size) for size in SIZES],
        "out_of_bounds": {"count": 0, "okay": "true"},
        spelt: {"bandwidth" if version > 1 else "bandwidith": 12.3, "okay": "unchecked"},
        "errors": [f"an error of {SECRET}"],
    }


def one(text: str) -> Table:
    (table,) = tables_of(text, "x.json")
    return table


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_is_read_and_agrees_with_itself(version: int) -> None:
    table = one(json.dumps(document(version)))
    assert (table.tool, table.collective, table.num_ranks) == ("nccl-tests", "all_reduce", 8)
    assert table.num_ranks_from == "2 devices, 4 GPUs each"
    assert table.collective_from == "the first of its args"
    assert [(r.size_bytes, r.placement) for r in table.readings] == [
        (size, placement) for size in SIZES for placement in (OUT_OF_PLACE, IN_PLACE)
    ]
    assert {(r.dtype, r.redop, r.root, r.num_wrong) for r in table.readings} == {
        ("fp32", "sum", -1, 0)
    }
    assert table.readings[2].time_s == pytest.approx((10 + 2**20 / 1e5) * 1e-6, rel=1e-6)
    assert not validate(table)


def test_nothing_of_the_environment_or_of_errors_is_carried_on() -> None:
    assert SECRET in json.dumps(document())
    assert SECRET not in repr(one(json.dumps(document())))
    broken = json.dumps(document())[:-40]
    assert SECRET not in repr(one(broken))


def test_an_unclosed_file_keeps_its_complete_results() -> None:
    text = json.dumps(document())
    whole = one(text)
    ends = [text.index(f'"size": {size}') for size in SIZES]
    for number, end in enumerate(ends):
        tables = tables_of(text[: end + 60], "x.json")
        assert sum(len(table.readings) for table in tables) == 2 * number
        for table in tables:
            assert table.readings == whole.readings[: 2 * number]
            assert "never closed" in table.notes[0]


def test_infinity_nan_and_null_are_no_figures() -> None:
    text = json.dumps(document())
    value = json.dumps(half(1024)["bus_bw"])
    for odd in ("inf", "-inf", '"nan"', "nan", "null"):
        table = one(text.replace(f'"bus_bw": {value}', f'"bus_bw": {odd}'))
        assert table.readings[0].busbw_bytes_per_s is None
        assert table.readings[0].time_s is not None
        assert len(table.readings) == 2 * len(SIZES)
    plain = document()
    plain["results"] = [result(1024) | {"out_of_place": None}]
    assert [r.placement for r in one(json.dumps(plain)).readings] == [IN_PLACE]


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, "nccl-tests queued"),
        ({"graph": 5}, "nccl-tests graph"),
        ({"blocking_collectives": "true"}, "nccl-tests blocking 3"),
        ({"aggregated_iterations": 8}, "nccl-tests queued, 8 per group"),
    ],
)
def test_the_method_is_the_configurations(config: dict[str, object], method: str) -> None:
    assert one(json.dumps(document(config=config))).method == method


def test_single_iterations_become_samples_without_those_that_are_skipped() -> None:
    plain = document()
    per_iter = {"skipped_iterations": 1, "times_us": [900.0, 10.0, 11.0]}
    plain["results"] = [result(1024) | {"out_of_place_per_iter": per_iter}]
    first, second = one(json.dumps(plain)).readings
    assert first.samples_s == pytest.approx((10e-6, 11e-6))
    assert second.samples_s == ()


def test_the_time_to_enqueue_is_no_time_of_the_operation() -> None:
    plain = document()
    plain["results"] = [result(size, "cpu_time") for size in SIZES]
    table = one(json.dumps(plain))
    assert {reading.time_s for reading in table.readings} == {None}
    assert (table.unit, table.method) == ("busbw", "nccl-tests queued, time to enqueue")


def test_a_split_counts_the_devices_of_rank_zeros_group() -> None:
    plain = document()
    devices = [{"rank": rank, "group": rank % 2} for rank in range(4)]
    plain["config"] = {"nthreads": 1, "ngpus": 1, "graph": 0, "devices": devices}
    assert one(json.dumps(plain)).num_ranks == 2


def test_other_json_has_no_tables() -> None:
    for text in ('{"results": 3}', '{"results": [1, "a"]}', "[]", '{"traceEvents": []}', "{"):
        assert tables_of(text, "x") == []
