"""stepmark trace convert: traces for other tools."""

import gzip
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import config_errors, written
from stepmark.tables.export import write_pieces
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces import trace_workload
from stepmark.traces.kineto import export
from stepmark.traces.trace_files import map_traces, rank_of
from stepmark.traces.trace_options import ConvertOptions
from stepmark.workloads import workload_files


def convert(options: ConvertOptions) -> int:
    """Write the files; they appear together, when all are written."""
    folder = options.out
    if str(folder) == "-":
        raise ConfigError("out", folder, "a folder: a file is written for each rank")
    if options.to == "chakra":
        if workload := trace_workload.read(options):
            target = workload_files.Target(to="chakra", out=f"{folder}/")
            workload_files.deliver(workload, target)
        return 0
    is_new = not folder.exists()
    with config_errors(folder, "out"):
        if not is_new and any(not each.name.startswith(".") for each in folder.iterdir()):
            raise ConfigError("out", folder, "a new or empty folder")
        unfinished = folder / ".unfinished"
        unfinished.mkdir(parents=True, exist_ok=True)
    try:
        traces = map_traces(options, partial(_write, options, unfinished))
        if traces is None:
            return 0
        with config_errors(folder, "out"):
            for file in sorted(unfinished.iterdir()):
                os.replace(file, folder / file.name)
    except ConfigError:
        shutil.rmtree(folder if is_new else unfinished, ignore_errors=True)
        raise
    unfinished.rmdir()
    if traces.cut:
        sys.stdout.write(f"{traces.cut}\n")
    sys.stderr.writelines(f"note: {note}\n" for note in traces.notes)
    for result in traces.results:
        for name, amount in result.value:
            sys.stdout.write(f"{folder / name}: {amount}\n")
    return 0


def _write(
    options: ConvertOptions, folder: Path, trace: RankTrace
) -> tuple[tuple[str, str], ...]:
    """Write the files of one rank. Return their names, and what they hold."""
    rank = rank_of(trace.info) or 0
    if options.ranks is not None and rank not in options.ranks:
        return ()
    if options.to == "trimmed":
        file = folder / f"rank{rank}.json.gz"
        selection = export.select(trace, options)
        with written(file, "out") as stream, gzip.GzipFile("", "wb", 4, stream, 0) as packed:
            packed.writelines(export.trimmed(Path(trace.info.file), selection))
        return ((file.name, f"{file.stat().st_size:,} bytes"),)
    files = []
    for table in export.tables(trace, rank, options):
        file = folder / f"{table.name}.rank{rank}.{options.to}"
        files.append((file.name, f"{write_pieces(table.types, table.pieces, file):,} rows"))
    return tuple(files)
