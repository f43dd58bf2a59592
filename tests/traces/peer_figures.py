"""Write the figures of two other analysers of profiler traces to tests/data/traces/peers.json.

HolisticTraceAnalysis and TraceLens each need a Python of their own with the tool installed from
its repository (neither has this version in a package index):

    python tests/traces/peer_figures.py write HTA_PYTHON TRACELENS_PYTHON [FOLDER...]

FOLDER: more folders of traces than those of tests/data/traces, each "NAME=PATH".
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[1] / "data" / "traces"
TARGET = TRACES / "peers.json"
TOOLS = {
    "hta": {
        "repository": "facebookresearch/HolisticTraceAnalysis",
        "commit": "f4d0062c382f42bd8a74838bcdad1916c7d5d2da",
        "version": "0.6.1",
    },
    "tracelens": {
        "repository": "AMD-AGI/TraceLens",
        "commit": "171dd74721ca1ec45709e5805b68ae1f65e27811",
        "version": "0.1.0",
    },
}
LARGEST = 4  # kernels by name that are kept of a rank
Figures = dict[str, Any]


def attempt(function: Callable[[], Figures]) -> Figures:
    """Return the figures, or as the one figure the error that the tool raised."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}


def plain(table: Any) -> list[Figures]:
    rows: list[Figures] = json.loads(table.to_json(orient="records", double_precision=6))
    return rows


def hta(files: list[str]) -> list[Figures]:
    """Return the records of HolisticTraceAnalysis; rank n is the nth file."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files=dict(enumerate(files)), trace_dir="/")

    def by_rank(rows: list[Figures]) -> Figures:
        return {str(row.pop("rank")): row for row in rows}

    def kernels() -> Figures:
        options = {"num_kernels": 10**6, "duration_ratio": 1.0}
        _, table = analysis.get_gpu_kernel_breakdown(
            visualize=False, include_memory_kernels=True, **options
        )
        ranks: Figures = {}
        for row in sorted(plain(table), key=lambda row: -row["sum (us)"]):
            largest = ranks.setdefault(str(row["rank"]), {})
            if len(largest) < LARGEST:
                largest[row["name"]] = row["sum (us)"]
        return ranks

    return [
        {
            "call": "TraceAnalysis.get_temporal_breakdown",
            "unit": "us",
            "ranks": attempt(
                lambda: by_rank(plain(analysis.get_temporal_breakdown(visualize=False)))
            ),
        },
        {
            "call": "TraceAnalysis.get_comm_comp_overlap",
            "unit": "%",
            "ranks": attempt(
                lambda: by_rank(plain(analysis.get_comm_comp_overlap(visualize=False)))
            ),
        },
        {
            "call": "TraceAnalysis.get_gpu_kernel_breakdown",
            "unit": f"us, sums of the {LARGEST} largest kernels",
            "ranks": attempt(kernels),
        },
    ]


def tracelens(files: list[str]) -> list[Figures]:
    """Return the records of TraceLens; rank n is the nth file."""
    from TraceLens.NcclAnalyser.nccl_analyser import NcclAnalyser
    from TraceLens.TreePerf.tree_perf import TreePerfAnalyzer

    def timeline(file: str, unlinked: bool) -> Figures:
        analyzer = TreePerfAnalyzer.from_file(file, include_unlinked_kernels=unlinked)
        rows = plain(analyzer.get_df_gpu_timeline())
        return {row["type"]: row["time ms"] for row in rows}

    def timelines(unlinked: bool) -> Figures:
        ranks = {
            str(rank): attempt(lambda file=file: timeline(file, unlinked))
            for rank, file in enumerate(files)
        }
        return {
            "call": "TreePerfAnalyzer.get_df_gpu_timeline",
            "options": {"include_unlinked_kernels": unlinked},
            "unit": "ms",
            "ranks": ranks,
        }

    records = [timelines(unlinked) for unlinked in (False, True)]
    analyser = NcclAnalyser(files, len(files))
    analyser.build_df_long()
    tables = {"build_df_summary_long": analyser.build_df_summary_long}
    if len(files) > 1:
        tables["build_df_nccl_implicit_sync_cat"] = analyser.build_df_nccl_implicit_sync_cat
        tables["build_df_straggler_summary"] = analyser.build_df_straggler_summary
    for name, table in tables.items():
        rows = attempt(lambda table=table: {"rows": plain(table())})
        records.append({"call": f"NcclAnalyser.{name}", "unit": "us", **rows})
    return records


def records_of(tool: str, folders: dict[str, str]) -> list[Figures]:
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    records = []
    for name, folder in folders.items():
        files = sorted(str(file) for file in Path(folder).glob("*.json*"))
        with contextlib.redirect_stdout(sys.stderr):
            found = {"hta": hta, "tracelens": tracelens}[tool](files)
        records += [{"tool": tool, "traces": name, **record} for record in found]
    return records


def write(pythons: dict[str, str], folders: dict[str, str]) -> None:
    records = []
    for tool, rounding in (("hta", "0"), ("hta", "1"), ("tracelens", None)):
        setting = {} if rounding is None else {"HTA_DISABLE_NS_ROUNDING": rounding}
        command = [pythons[tool], __file__, tool, json.dumps(folders)]
        done = subprocess.run(
            command, env=os.environ | setting, stdout=subprocess.PIPE, check=True, timeout=900
        )
        for record in json.loads(done.stdout):
            records.append({"environment": setting, **record} if setting else record)
    lines = ",\n".join(json.dumps(record) for record in records)
    TARGET.write_text(f'{{"tools": {json.dumps(TOOLS)},\n"records": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    if sys.argv[1] == "write":
        here = {path.name: str(path) for path in sorted(TRACES.iterdir()) if path.is_dir()}
        more = dict(argument.split("=", 1) for argument in sys.argv[4:])
        write({"hta": sys.argv[2], "tracelens": sys.argv[3]}, here | more)
    else:
        json.dump(records_of(sys.argv[1], json.loads(sys.argv[2])), sys.stdout)
