"""Laws of the reader of profiler traces, for every layout, cut and kind of damage."""

import gzip
import json
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.timeline.trace_columns import NONE, GpuKind, RankTrace
from stepmark.traces.kineto import intervals, links, stream
from stepmark.traces.kineto.reader import read_trace

Event = dict[str, Any]
_HEADER = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "warpSize": 32}],
    "distributedInfo": {
        "backend": "nccl",
        "rank": 3,
        "world_size": 8,
        "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": "[0, 1]"}],
    },
    "note": 'a string with "traceEvents": [ inside }, { and \\',
}
# Names with everything that looks like the border or the end of an event.
_NAMES = st.sampled_from(
    ["aten::mm", "}, {", '"},{"ph": "X"', "a]}", "\\", '\\"}\n,{', "é\u2028", "", "]\n}"]
)
_CATS = st.sampled_from(
    ["kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "cuda_runtime", "user_annotation", "x"]
)


@st.composite
def events(draw: st.DrawFn) -> Event:
    event: Event = {"ph": draw(st.sampled_from("XXXfsM"))}
    event |= {"cat": draw(_CATS), "name": draw(_NAMES), "pid": 0, "tid": draw(_NAMES)}
    micros = st.decimals("0", "8000000000000", places=3)
    event["ts"] = draw(micros)
    event["dur"] = draw(st.decimals("0", "1000000", places=3))
    args = {"correlation": draw(st.integers(0, 99)), "nested": [{"a": 1}, {"b": "},{"}]}
    event["args"] = args | {"Input Dims": [[1, 2], []]}
    return event


class _Exact(json.JSONEncoder):
    """Writes decimals with their digits, as Kineto writes times."""

    def default(self, o: Any) -> Any:
        return float(o) if isinstance(o, Decimal) else super().default(o)


def _one_line(items: list[Event], head: Event, tail: Event) -> str:
    return json.dumps(head | {"traceEvents": items} | tail, cls=_Exact)


def _compact(items: list[Event], head: Event, tail: Event) -> str:
    text = json.dumps(head | {"traceEvents": items} | tail, cls=_Exact, separators=(",", ":"))
    return text.replace(',{"ph"', ',\n{"ph"')


def _indented(items: list[Event], head: Event, tail: Event) -> str:
    return json.dumps(head | {"traceEvents": items} | tail, cls=_Exact, indent=4)


def _kineto(items: list[Event], head: Event, tail: Event) -> str:
    """Write an event as Kineto does, over several lines."""
    texts = []
    for event in items:
        args = json.dumps(event["args"], cls=_Exact)[1:-1]
        rest = {key: value for key, value in event.items() if key != "args"}
        body = json.dumps(rest, cls=_Exact)[1:-1]
        texts.append("  {\n    " + body + ',\n    "args": {\n      ' + args + "\n    }\n  }")
    end = "".join(f',\n  "{key}": {json.dumps(value)}' for key, value in tail.items())
    start = json.dumps(head, indent=2)[:-2]
    return start + ',\n  "traceEvents": [\n' + ",\n".join(texts) + "\n  ]" + end + "\n}"


def _bare(items: list[Event], head: Event, tail: Event) -> str:
    return json.dumps(items, cls=_Exact)


LAYOUTS = [_one_line, _compact, _indented, _kineto, _bare]


def write(path: Path, text: str, *, packed: bool = False) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def read_in_chunks(path: Path, chunk: int) -> RankTrace:
    with mock.patch.object(stream, "_CHUNK", chunk):
        return read_trace(path)


def _nanoseconds(value: Decimal) -> int:
    return int(value * 1000)


def _expected(items: list[Event], cats: set[str]) -> list[tuple[int, int, str, int]]:
    return sorted(
        (
            _nanoseconds(event["ts"]),
            _nanoseconds(event["ts"]) + _nanoseconds(event["dur"]),
            event["name"],
            event["args"]["correlation"],
        )
        for event in items
        if event["ph"] == "X" and event["cat"] in cats
    )


def _rows(trace: RankTrace, table: Any) -> list[tuple[int, int, str, int]]:
    names = [trace.names[name] for name in table.name]
    columns = (table.start.tolist(), table.end.tolist(), names, table.correlation.tolist())
    return sorted(zip(*columns, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(items=st.lists(events(), max_size=12), chunk=st.integers(16, 3000), packed=st.booleans())
def test_every_layout_reads_the_same(
    layout: Callable[..., str],
    items: list[Event],
    chunk: int,
    packed: bool,
    tmp_path_factory: Any,
) -> None:
    path = tmp_path_factory.mktemp("t") / "trace.json"
    write(path, layout(items, _HEADER, {"traceName": "t.json"}), packed=packed)
    if not items and layout is _bare:
        return
    trace = read_in_chunks(path, chunk)
    assert trace.info.num_events == len(items)
    assert trace.info.damage == ()
    gpu = {"kernel", "gpu_memcpy", "gpu_memset"}
    assert _rows(trace, trace.gpu) == _expected(items, gpu)
    assert _rows(trace, trace.calls) == _expected(items, {"cuda_runtime"})
    assert list(trace.gpu.start) == sorted(trace.gpu.start)
    if layout is not _bare:
        assert (trace.info.rank, trace.info.world_size) == (3, 8)
        assert trace.info.groups[0].ranks == (0, 1)


def _sample() -> list[Event]:
    return [
        {
            "ph": "X",
            "cat": "kernel",
            "name": f"kernel }},{{ {number}",
            "pid": 0,
            "tid": 7,
            "ts": Decimal(number * 10),
            "dur": Decimal(5),
            "args": {"correlation": number, "stream": 7, "device": 0},
        }
        for number in range(9)
    ]


@pytest.mark.parametrize("layout", [_kineto, _one_line])
def test_a_cut_file_is_read_as_far_as_its_events_go(
    layout: Callable[..., str], tmp_path: Path
) -> None:
    text = layout(_sample(), _HEADER, {"traceName": "t"})
    ends = [text.index("}", text.index(f"{{ {number}") + 6) for number in range(9)]
    ends = [text.index("}", end + 1) + 1 for end in ends]
    first = text.rindex("traceEvents", 0, text.index("kernel")) + 16
    for end in range(first, len(text) - 1, 7):
        trace = read_in_chunks(write(tmp_path / "cut.json", text[:end]), 200)
        whole = sum(place <= end for place in ends)
        assert trace.gpu.start.size == whole, text[:end]
        assert [damage.kind for damage in trace.info.damage] == ["cut"]


def test_a_cut_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    text = _kineto(_sample() * 500, _HEADER, {})
    packed = gzip.compress(text.encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    trace = read_trace(path)
    there = zlib.decompressobj(31).decompress(packed[: len(packed) // 2])
    assert 0 < trace.gpu.start.size <= there.count(b'"correlation"')
    assert trace.gpu.start.size >= there.count(b'"correlation"') - 1
    assert "compressed file is cut" in trace.info.damage[0].text


@pytest.mark.parametrize(
    "bad",
    ['{"ph": [NaN]}', '{"name": "un"escaped"}', '{"ph": 1e}', '{"a": [}', '{"x"}'],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_an_event_that_is_no_json_is_left_out_and_counted(
    bad: str, is_last: bool, tmp_path: Path
) -> None:
    for text in (_compact(_sample(), _HEADER, {}), json.dumps(_sample(), cls=_Exact)):
        place = text.index('{"ph"', text.index("kernel") + 300)
        inserted = f"{text[:place]}{bad},{text[place:]}"
        if is_last:
            place = text.rindex("]")
            inserted = f"{text[:place]},{bad}{text[place:]}"
        trace = read_in_chunks(write(tmp_path / "t.json", inserted), 64)
        assert trace.gpu.start.size == 9
        assert not trace.info.cut
        damage = [(damage.kind, damage.count) for damage in trace.info.damage]
        assert damage == [("undecodable", 1)]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"abc"', "null", "true", "1e999", "[1]"])
@pytest.mark.parametrize("name", ["ts", "dur"])
@pytest.mark.parametrize("number", [4, 8])
def test_an_event_whose_time_is_no_number_is_named(
    number: int, name: str, value: str, tmp_path: Path
) -> None:
    items = _sample()
    items[number] |= {name: "placeholder", "name": "odd"}
    text = _one_line(items, _HEADER, {}).replace('"placeholder"', value)
    trace = read_in_chunks(write(tmp_path / "t.json", text), 200)
    assert trace.gpu.start.size == 8
    assert not trace.info.cut
    (damage,) = trace.info.damage
    assert (damage.kind, damage.count) == ("no-time", 1)
    assert "kernel 'odd'" in damage.text


def test_an_argument_that_is_no_number_costs_no_event(tmp_path: Path) -> None:
    items = _sample()
    items[8]["args"] = {"correlation": 77, "loss": float("nan"), "text": "NaN, Infinity"}
    trace = read_trace(write(tmp_path / "t.json", _one_line(items, _HEADER, {})))
    assert 77 in trace.gpu.correlation
    assert not trace.info.damage


@pytest.mark.parametrize("is_tail", [False, True])
def test_a_header_that_is_no_json_is_not_called_cut(is_tail: bool, tmp_path: Path) -> None:
    odd = {"baseTimeNanoseconds": float("nan")}
    text = _one_line(_sample(), {} if is_tail else odd, odd if is_tail else {})
    trace = read_trace(write(tmp_path / "t.json", text))
    assert trace.gpu.start.size == 9
    assert [damage.kind for damage in trace.info.damage] == ["header"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"dur": -1}, "negative-duration"),
        ({"dur": None}, "no-time"),
        ({"ts": 1e300}, "time-out-of-range"),
        ({"name": "Marker"}, "marker"),
        ({"cat": "mtia_ccp_events"}, "other-device"),
    ],
)
def test_impossible_events_are_left_out_and_said(
    change: Event, kind: str, tmp_path: Path
) -> None:
    items = _sample()
    items[4] |= change
    trace = read_trace(write(tmp_path / "t.json", _one_line(items, _HEADER, {})))
    assert trace.gpu.start.size == 8
    assert [damage.kind for damage in trace.info.damage] == [kind]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "hello", "\x00\x01", '{"traceEvents": 5}', '{"a": ' * 100_000),
        *("[1, 2", "[" * 100_000),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line_or_empty(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", text)
    if text.startswith("["):
        assert [damage.kind for damage in read_trace(path).info.damage] == ["cut"]
        return
    with pytest.raises(ConfigError, match=r"must be [^\n]*$"):
        read_trace(path)


def test_deep_nesting_in_an_event_costs_that_event(tmp_path: Path) -> None:
    text = _compact(_sample(), _HEADER, {})
    place = text.index('{"ph"', text.index("kernel") + 300)
    deep = '{"args": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}"
    trace = read_trace(write(tmp_path / "t.json", f"{text[:place]}{deep},{text[place:]}"))
    assert trace.gpu.start.size == 9
    assert [damage.kind for damage in trace.info.damage] == ["undecodable"]


def test_distributed_info_after_the_events_is_read(tmp_path: Path) -> None:
    info = {"rank": 1, "world_size": 2, "pg_config": [{"pg_name": 0, "ranks": "[0, 1]"}]}
    text = _kineto(_sample(), {"schemaVersion": 1}, {"distributedInfo": info})
    trace = read_in_chunks(write(tmp_path / "t.json", text), 100)
    assert (trace.info.rank, trace.info.world_size) == (1, 2)
    assert trace.info.groups[0].ranks == (0, 1)


def test_times_are_relative_to_the_base(tmp_path: Path) -> None:
    base = 1_790_857_026_000_000_000
    items = _sample()[:1]
    items[0]["ts"] = Decimal("4351155082221.173")
    text = _kineto(items, _HEADER | {"baseTimeNanoseconds": base}, {})
    trace = read_trace(write(tmp_path / "t.json", text))
    assert trace.gpu.start[0] == base + 4351155082221173
    assert trace.gpu.kind[0] == GpuKind.KERNEL


_spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def _set(pairs: list[tuple[int, int]]) -> tuple[set[int], intervals.Intervals]:
    start = np.array([start for start, _ in pairs], np.int64)
    end = start + np.array([size for _, size in pairs], np.int64)
    members = {time for a, b in zip(start, end, strict=True) for time in range(a, b)}
    return members, intervals.union(start, end)


@given(a=_spans, b=_spans, low=st.integers(0, 60), size=st.integers(0, 20))
@settings(deadline=None)
def test_intervals_are_sets_of_integers(
    a: list[tuple[int, int]], b: list[tuple[int, int]], low: int, size: int
) -> None:
    set_a, times_a = _set(a)
    set_b, times_b = _set(b)

    def members(times: intervals.Intervals) -> set[int]:
        assert all(times.end > times.start)
        assert all(times.start[1:] > times.end[:-1])
        return {t for s, e in zip(times.start, times.end, strict=True) for t in range(s, e)}

    assert members(times_a) == set_a
    assert times_a.total == len(set_a)
    assert members(intervals.join(times_a, times_b)) == set_a | set_b
    assert members(intervals.without(times_a, times_b)) == set_a - set_b
    assert sum(e - s for s, e in zip(*intervals.common(times_a, times_b), strict=True)) == len(
        set_a & set_b
    )
    window = set(range(low, low + size))
    assert members(intervals.clip(times_a, low, low + size)) == set_a & window
    before = intervals.time_before(times_a, np.array([low, low + size]))
    assert list(before) == [sum(t < low for t in set_a), sum(t < low + size for t in set_a)]


@st.composite
def nested(draw: st.DrawFn, low: int = 0, high: int = 60, depth: int = 0) -> list[Any]:
    """Draw intervals of one thread, each inside or beside the others."""
    result: list[tuple[int, int]] = []
    place = low
    while place < high and depth < 4 and draw(st.booleans()):
        start = draw(st.integers(place, high - 1))
        end = draw(st.integers(start + 1, high))
        result += [(start, end), *draw(nested(start, end, depth + 1))]
        place = end
    return result


@given(spans=nested(), places=st.lists(st.integers(-2, 62), max_size=8))
@settings(deadline=None)
def test_the_innermost_interval_is_found(
    spans: list[tuple[int, int]], places: list[int]
) -> None:
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))
    start = np.array([span[0] for span in spans], np.int64)
    end = np.array([span[1] for span in spans], np.int64)
    thread = np.zeros(len(spans), np.int64)
    rows = links.innermost(
        start, end, thread, np.array(places, np.int64), np.zeros(len(places), np.int64)
    )
    for place, row in zip(places, rows, strict=True):
        around = [number for number, (a, b) in enumerate(spans) if a <= place < b]
        best = min(around, key=lambda n: (spans[n][1] - spans[n][0], -n), default=NONE)
        assert (row == NONE) == (best == NONE)
        if row != NONE:
            assert spans[row] == spans[best]
