"""The page of a breakdown: bars of the timeline, and what the page shows."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from stepmark.cli.main import status
from stepmark.model.kernel_groups import COMMUNICATION, group_of
from stepmark.tables.page import Page
from stepmark.timeline.bars import Bar, Bars, bars
from stepmark.timeline.ledger import Work
from stepmark.timeline.timeline import LEFT_OUT, Span, Timeline
from stepmark.traces import trace_page
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.trace import _MOST_BARS, timeline
from stepmark.traces.trace_options import BreakdownOptions

DATA = Path(__file__).parents[1] / "data" / "traces"
OPTIONS = BreakdownOptions(files=("x",))


def check(each: Bars, events: list[tuple[str, int, int, str]]) -> None:
    """Bars of a stream do not overlap, hold all events of the window, and follow it."""
    assert len(each.bars) <= _MOST_BARS
    streams = {bar.stream for bar in each.bars}
    assert streams == {stream for stream, *_ in events}
    for stream in streams:
        of_stream = [bar for bar in each.bars if bar.stream == stream]
        own = [event for event in events if event[0] == stream]
        assert sum(bar.num_events for bar in of_stream) == len(own)
        assert sum(bar.busy for bar in of_stream) == sum(
            end - start for _, start, end, _ in own
        )
        for before, after in itertools.pairwise(of_stream):
            assert before.end <= after.start
        for bar in of_stream:
            inside = [e for e in own if e[1] < bar.end and e[2] > bar.start]
            assert len(inside) == bar.num_events
            assert bar.name in {name for *_, name in inside}
            assert each.start <= bar.start < bar.end <= each.end


@pytest.mark.parametrize("count", [3, 4000])
def test_bars_hold_all_events(count: int, tmp_path: Path) -> None:
    chance = random.Random(count)
    events, free = [], [0.0, 0.0]
    for number in range(count):
        stream = chance.randrange(2)
        start = free[stream] + chance.choice((0.001, 0.5, 3))
        free[stream] = start + chance.choice((0.5, 2, 30))
        name = chance.choice(("gemm", "nccl", "elementwise"))
        events.append((name, stream, start, free[stream], number))
    document = [
        {
            **{"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start},
            **{
                "dur": end - start,
                "args": {"correlation": number, "device": 0, "stream": stream},
            },
        }
        for name, stream, start, end, number in events
    ]
    file = tmp_path / "rank0.json"
    file.write_text(json.dumps({"traceEvents": document}))
    trace = read_trace(file)
    made = timeline(trace, OPTIONS)
    assert made is not None
    (each,) = bars(made, _MOST_BARS).values()
    gpu = trace.gpu
    check(
        each,
        [
            (
                f"GPU 0 stream {trace.streams[stream][1]}",
                *(int(start), int(end), trace.names[name]),
            )
            for stream, start, end, name in zip(
                gpu.stream, gpu.start, gpu.end, gpu.name, strict=True
            )
        ],
    )
    if count == 3:
        assert [bar.num_events for bar in each.bars] == [1, 1, 1]
        assert {bar.group for bar in each.bars} == {group_of(bar.name) for bar in each.bars}


def layers(num_layers: int) -> list[Span]:
    """Return a forward and a backward pass of a stage, kernels of 10 ns without pauses."""
    order = [("fwd", layer) for layer in range(num_layers)]
    order += [("dgrad", layer) for layer in reversed(range(num_layers))]
    return [
        Span(
            **{"rank": 0, "stream": "compute", "kind": Work.MATMUL, "name": f"kernel {number}"},
            **{"start_ns": 10 * (8 * place + number), "phase": phase, "layer": layer},
            **{"end_ns": 10 * (8 * place + number + 1), "microbatch": 0},
        )
        for place, (phase, layer) in enumerate(order)
        for number in range(8)
    ]


def test_streams_begin_at_one_block_whose_events_are_all_drawn() -> None:
    spans = layers(100)
    # Of another stage: it has no events but during the backward pass of layer 50.
    omitted = [
        Span(1, "compute", LEFT_OUT, "more", *e) for e in ((0, 11_920), (12_000, 16_000))
    ]
    each = bars(Timeline([*spans, *omitted], (0, 16_000)), 40)
    block = each[0].block
    assert block == ("the backward pass of layer 50", 11_910, 12_010)
    own = [s for s in spans if s.end_ns > block.start and s.start_ns < block.end]
    shown = [bar for bar in each[0].bars if bar.end > block.start and bar.start < block.end]
    assert [(bar.start, bar.end) for bar in shown] == [(s.start_ns, s.end_ns) for s in own]
    assert len(each[0].bars) <= 40
    (figure,) = trace_page.streams(each, "note", "stage")
    assert figure.x.limits == (11_910 / 1e6, 12_010 / 1e6)
    assert figure.x.whole == (0, 16_000 / 1e6)
    assert "is shown: the backward pass of layer 50, 0.62 % of the step." in figure.note
    html = Page(title="", sections=[figure]).html()
    assert 'data-ranges="[[0.01191, 0.01201], [0.0, 0.016]]"' in html


@pytest.mark.parametrize("spans", [layers(1), [layers(9)[0]._replace(layer=None)]])
def test_a_short_step_and_one_without_layers_are_shown_whole(spans: list[Span]) -> None:
    made = Timeline(spans, (0, spans[-1].end_ns))
    (figure,) = trace_page.streams(bars(made), "note")
    assert figure.x.limits == (0, spans[-1].end_ns / 1e6)
    assert figure.x.whole is None
    assert "data-ranges" not in Page(title="", sections=[figure]).html().split("<main>")[1]


def test_a_page_of_many_ranks_has_few_bars() -> None:
    """The ranks with least and most communication are among those that are drawn."""
    drawn = [
        Bar("GPU 0 stream 7", 10 * n, 10 * n + 9, COMMUNICATION, "nccl", 1, 9)
        for n in range(900)
    ]
    timelines = {
        rank: Bars(step=1, start=0, end=9000, joined_ns=0, bars=tuple(drawn[: 850 + rank % 37]))
        for rank in range(40)
    }
    tables: dict[str, list[dict[str, object]]] = {"steps": [], "communication": []}
    html = trace_page.page("many", tables, timelines, [], ["text <b>"]).html()
    assert "8 of 40 ranks" in html
    assert "rank 0, GPU" in html
    assert "rank 36, GPU" in html
    assert "text &lt;b&gt;" in html
    assert re.search(r"\d+ bars of together", html)


def test_breakdown_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    words = ["trace", "breakdown", str(DATA / "fsdp8"), "--ranks", "0,7", "--jobs", "1"]
    assert status([*words, "--html", str(file)]) == 0
    html = file.read_text()
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert titles == [
        *("Streams in step 6", "Parts of a step", "Communication beside compute"),
        *("Calls by message size", "Bytes by message size", "Report"),
    ]
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=", html)
    assert "idle: host-bound" in html
    answer = capsys.readouterr().out.splitlines()[0]
    assert answer.startswith("steps 5-6 of ranks 0, 7: ")
    assert answer in html.partition("<h2>")[0]
    assert "calls per rank and step" in html
    assert "MiB per rank and step" in html
    assert "8 calls per rank and step" in html
    # A host alone has no streams.
    words[2:5] = [str(DATA / "cpu-only"), "--jobs"]
    assert status([*words[:4], "1", "--html", str(file)]) == 0
    assert "Streams in step" not in file.read_text()
    capsys.readouterr()


def test_names_of_parts_are_not_those_of_other_figures() -> None:
    """Bars have exposed communication without waiting; the table has it with waiting."""
    row = {"exposed_comm_ns": 30, "exposed_waiting_ns": 10, "idle_ns": 5}
    times = {each["line"]: each["time_ns"] for each in trace_page.ledger([row])}
    assert times == {
        "exposed communication: waiting for other ranks": pytest.approx(10),
        "exposed communication: other": pytest.approx(20),
        "idle: cause not known": pytest.approx(5),
    }
