"""Tables, text and page of a workload: sums agree with a walk through the step."""

import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from stepmark.model.model_tables import find_model
from stepmark.model.ops import Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp, ComputeOp, Workload, pass_of
from stepmark.tables.columns import Row
from stepmark.tables.page import plotly_js
from stepmark.workloads import workload_tables as tables
from stepmark.workloads import workload_text
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron import rule as megatron
from stepmark.workloads.rules.megatron.settings import Megatron
from stepmark.workloads.workload_page import layers, page, sizes


def made(name: str = "deepseek-v3", pp: int = 2, num_layers: int = 8) -> Workload:
    """With experts in all but the leading layers, so that layers differ."""
    model = replace(find_model(name).tiny(), num_layers=num_layers)
    job = Job(model=model, parallel=ParallelConfig(tp=2, pp=pp, dp_shard=2), gbs=8)
    return megatron.workload(job, Megatron(sequence_parallel=True))


@pytest.fixture(scope="module", name="workload")
def _workload() -> Workload:
    return made()


def total(rows: list[Row], key: str) -> float:
    return sum(float(str(row[key] or 0)) for row in rows)


def test_tables_count_what_a_walk_counts(workload: Workload) -> None:
    for stage in range(len(workload.stages)):
        walked = list(workload.expand(stage))
        own = tables.stage_rows(workload)[stage]
        assert own["operations"] == len(walked)
        sent = [one for one in walked if isinstance(one, CommOp)]
        assert own["collectives"] == len(sent)
        num_bytes = sum(one.message_bytes(workload.groups[one.group]) for one in sent)
        assert own["comm_bytes"] == num_bytes
        rows = [
            row for row in tables.collective_rows(workload, stage) if row["pass"] != "setup"
        ]
        assert (total(rows, "calls"), total(rows, "bytes")) == (len(sent), num_bytes)
        worked = [one for one in walked if isinstance(one, ComputeOp)]
        flops = sum(one.op.flops or 0 for one in worked)
        assert total(tables.compute_rows(workload, stage), "flops") == flops
        by_size = tables.size_rows(workload, stage)
        assert (total(by_size, "calls"), total(by_size, "bytes")) == (len(sent), num_bytes)
        for row in by_size:
            assert row["bytes"] == row["calls"] * row["size_bytes"]  # type: ignore[operator]
        tallied = tables.histogram(workload, stage)
        assert sum(one.calls for one in tallied.values()) == len(sent)


def test_bins_of_sizes_are_said(workload: Workload) -> None:
    """Of more than 16 sizes; then the tables have each."""
    few = workload_text.lines(workload, 0)
    assert not any("in bins" in line for line in few)
    (name, block), *_ = [
        (name, block)
        for name, block in workload.blocks.items()
        if any(isinstance(one, CommOp) for one in block)
    ]
    sent = next(one for one in block if isinstance(one, CommOp))
    many = tuple(replace(sent, count=3**power) for power in range(17))
    held = replace(workload, blocks={**workload.blocks, name: (*block, *many)})
    sizes = {row["size_bytes"] for row in tables.size_rows(held, 0)}
    (said,) = [line for line in workload_text.lines(held, 0) if "in bins" in line]
    assert said.startswith(f"{len(sizes)} sizes in bins, powers of two")
    alone = replace(held, world_size=1, stages=held.stages[:1])
    assert workload_text.lines(alone, 0)[0].endswith(", 1 rank")


def test_layers_add_up_to_the_stage(workload: Workload) -> None:
    for stage in range(len(workload.stages)):
        walked: Counter[int | None] = Counter()
        for one in workload.expand(stage):
            if isinstance(one, ComputeOp) and pass_of(one) == "forward":
                walked[one.layer] += one.op.flops or 0
        found = tables.alike_layers(workload, stage)
        for held, sums in found:
            assert {walked[layer] for layer in held} == {sums["forward", "flops"]}
        every = [layer for held, _ in found for layer in held if layer is not None]
        assert sorted(every) == sorted(workload.stages[stage].layers)
        for row, (held, sums) in zip(tables.layer_rows(workload, stage), found, strict=True):
            assert row["forward_flops"] == sums["forward", "flops"]
            assert (row["number"] or 1) == len(held)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0], "0"), ([0, 1, 2, 3, 7], "0-3,7"), ([1, 3, 5], "1,3,5"), ([0, 1, 3, 4], "0-1,3-4")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert tables.ranges(numbers) == text


def test_only_settings_that_are_no_defaults_are_said(workload: Workload) -> None:
    settings = {"a": 1, "b": None, "c": True, "d": "x"}
    asked = replace(workload, settings=settings)

    def said(defaults: dict[str, str | int | float | bool | None]) -> list[str]:
        lines = workload_text.header(asked, defaults)
        return [line[9:] for line in lines if line.startswith("settings")]

    assert said({}) == ["a 1, b unset, c yes, d x"]
    assert said({"a": 1, "c": False}) == ["b unset, c yes, d x, 1 more are defaults"]
    assert said({"a": 1, "b": None, "c": True, "d": "x"}) == ["4 are defaults"]


def test_the_page_holds_all_and_needs_no_network(workload: Workload) -> None:
    text = page(workload, 1).html().replace(plotly_js(), "")
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        *("Workload", "Pipeline", "Computation by stage"),
        *("Calls by message size", "Bytes by message size"),
        *("Computation by layer", "Messages by layer", "Tables", "Settings"),
    ]
    assert "Stage 1." in text
    assert "megatron/core/tensor_parallel" in text  # the sources, whole
    for name in workload.settings:
        assert f"<dt>{name}</dt>" in text
    assert not re.search(r"(src|href)=.?https?://", text)
    text = re.sub("</?i>", "", text)  # of flags
    for line in workload_text.tables(workload, 1)[1:]:
        assert line.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;") in text


def test_figures_say_what_the_tables_say(workload: Workload) -> None:
    drawn = {figure.title: figure for figure in (*sizes(workload, 0), *layers(workload))}

    def values(title: str) -> float:
        return math.fsum(float(str(y)) for each in drawn[title].series for y in each.y)

    rows = [row for row in tables.collective_rows(workload, 0) if row["pass"] != "setup"]
    assert values("Calls by message size") == total(rows, "calls")
    assert values("Bytes by message size") * 2**30 == pytest.approx(total(rows, "bytes"))
    forward = drawn["Computation by layer"].series[0]
    assert list(forward.x) == list(range(8))  # both stages' layers
    flops = sum(
        one.op.flops or 0
        for stage in (0, 1)
        for one in workload.expand(stage)
        if isinstance(one, ComputeOp) and one.phase is Phase.FWD and one.layer is not None
    )
    assert sum(float(str(y)) for y in forward.y) * 1e12 == pytest.approx(flops)


def test_alike_layers_need_no_figure() -> None:
    assert list(layers(made("llama-3.1-8b", pp=1, num_layers=4))) == []
    text = page(made("llama-3.1-8b", pp=1, num_layers=4), 0).html()
    assert '<pre class="table">Stages' in text, "rows are not folded"
    assert "<h2>Pipeline</h2>" not in text


def test_what_only_stands_for_waiting_is_in_no_table() -> None:
    job = Job(
        model=replace(find_model("llama-3.1-8b").tiny(), num_layers=8),
        parallel=ParallelConfig(pp=2),
        gbs=8,
    )
    workload = megatron.workload(job, Megatron(virtual_pipeline_model_parallel_size=2))
    waits = [one for one in workload.expand(0) if isinstance(one, ComputeOp) and one.is_wait]
    assert waits
    assert all(row["shape"] != "wait" for row in tables.compute_rows(workload, 0))
