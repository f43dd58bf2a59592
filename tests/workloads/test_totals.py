"""Totals of a workload: those of its ranks, one by one."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepmark.cli.main import status
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.tables.columns import Row
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_flags import options_class
from stepmark.workloads.workload_tables import stage_rows, total_rows

SMALL = {"model": "llama-3.1-8b", "num_layers": 4, "seq_len": 256}
MOE = {"model": "mixtral-8x7b", "num_layers": 2, "seq_len": 256}
JOBS: list[tuple[str, dict[str, object]]] = [
    ("megatron", {**SMALL, "world_size": 16, "tp": 2, "pp": 4, "gbs": 8}),
    ("megatron", {**MOE, "world_size": 8, "ep": 4}),
    ("fsdp", {**SMALL, "world_size": 8, "pp": 2, "gbs": 16}),
    ("fsdp", {**SMALL, "world_size": 8}),
    ("ddp", {**SMALL, "world_size": 3}),
    ("deepspeed", {**SMALL, "world_size": 4}),
]
QUANTITIES = ("operations", "collectives", "flops", "comm_bytes", "bus_bytes")


def generated(framework: str, options: dict[str, object]) -> Workload:
    return generate(options_class(framework)(framework=framework, **options))


def of_rank(workload: Workload, rank: int) -> dict[str, float]:
    """Return the sums over a rank's step, operation by operation."""
    ops = list(workload.expand(workload.stage_of(rank)))
    comm = [(op, workload.groups[op.group]) for op in ops if isinstance(op, CommOp)]
    return {
        "operations": len(ops),
        "collectives": len(comm),
        "flops": sum(op.op.flops or 0 for op in ops if isinstance(op, ComputeOp)),
        "comm_bytes": sum(op.message_bytes(group) for op, group in comm),
        "bus_bytes": sum(op.bus_bytes(group) for op, group in comm),
    }


def check(total: Row, ranks: list[dict[str, float]]) -> None:
    assert total["num_ranks"] == len(ranks)
    for name in QUANTITIES:
        expected = sum(rank[name] for rank in ranks)
        assert expected > 0
        assert total[name] == pytest.approx(expected, rel=1e-6 if name == "bus_bytes" else 0)


@pytest.mark.parametrize(("framework", "options"), JOBS)
def test_totals_are_those_of_the_ranks(framework: str, options: dict[str, object]) -> None:
    workload = generated(framework, options)
    per_stage = workload.world_size // len(workload.stages)
    stages, job = total_rows(workload)
    assert (stages["of"], job["of"]) == ("stages", "job")
    ranks = [of_rank(workload, rank) for rank in range(workload.world_size)]
    check(job, ranks)
    check(stages, ranks[::per_stage])
    for name in ("operations", "collectives", "comm_bytes", "bus_bytes"):
        rows = stage_rows(workload)
        assert stages[name] == sum(row[name] for row in rows)  # type: ignore[misc]
        assert job[name] == per_stage * stages[name]  # type: ignore[operator]


def test_unknown_flops_and_stages_make_a_sum_unknown() -> None:
    workload = generated("megatron", {**SMALL, "world_size": 4, "pp": 2, "gbs": 4})
    bare = {
        name: tuple(
            ComputeOp(op=Kernel(name="secret"), phase=op.phase, module=op.module)
            if isinstance(op, ComputeOp) and op.module == "head"
            else op
            for op in block
        )
        for name, block in workload.blocks.items()
    }
    stages, job = total_rows(replace(workload, blocks=bare))
    assert stages["flops"] is job["flops"] is None
    assert stages["comm_bytes"] == total_rows(workload)[0]["comm_bytes"]
    one = replace(workload, stages=workload.stages[:1], world_size=2)
    stages, job = total_rows(one)
    assert stages["flops"]
    assert [job[name] for name in QUANTITIES] == [None] * 5


def test_text_json_csv_and_page_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "w.json", tmp_path / "w.html"
    words = "--model llama-3.1-8b --framework megatron --tp 2 --pp 2 --world-size 8 --gbs 4"
    assert status(["workload", "generate", *words.split(), "-o", str(file)]) == 0
    capsys.readouterr()
    show = ["workload", "show", str(file), "--html", str(page), "--csv", f"{tmp_path}/csv/"]
    assert status(show) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("Totals"))
    words_of = [line.split()[:2] for line in lines[at + 2 : at + 4]]
    assert words_of == [["stages", "2"], ["job", "8"]]
    assert lines[at] in page.read_text()
    assert status([*show[:3], "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["totals"]
    assert [row["of"] for row in rows] == ["stages", "job"]
    table = list(csv.DictReader((tmp_path / "csv" / "totals.csv").read_text().splitlines()))
    assert [int(row["flops"]) for row in table] == [row["flops"] for row in rows]
