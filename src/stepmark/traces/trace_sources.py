"""Traces of a job, and its logs and dumps beside them, among files and folders."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from stepmark.cases.message import summed
from stepmark.cases.record import Measured
from stepmark.findings.histogram import ranks_seen
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_head
from stepmark.job_logs.log_sources import FLIGHT, INSPECTOR, LOG, Inputs, Source, kinds_of
from stepmark.store.reader import find_run, read
from stepmark.traces.kineto.stream import looks_like_trace

_SOURCES = (LOG, FLIGHT, INSPECTOR)


def split_sources(words: Sequence[str]) -> tuple[list[str], Inputs]:
    """Return the words that name traces, and the other files of the job among them all."""
    traces = []
    inputs = Inputs()
    for word in words:
        path = Path(word)
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else []
        kinds = {file: _kind(file) for file in files or [path] if file.is_file()}
        for file, kind in kinds.items():
            if kind in _SOURCES:
                inputs.paths[kind].append(file)
        if "trace" in kinds.values() or not (path.is_dir() or kinds.get(path) in _SOURCES):
            traces.append(word)
    if not traces:
        raise ConfigError("trace", ", ".join(words), "a folder or file with profiler traces")
    return traces, inputs


def _kind(file: Path) -> str:
    try:
        if looks_like_trace(read_head(file)):
            return "trace"
        return next(iter(kinds_of(file) & set(_SOURCES)), "other")
    except ConfigError:
        return "trace" if ".json" in file.name else "other"


def recorded(words: Sequence[str], runs: Path, names: Sequence[str]) -> Iterator[Source]:
    """Yield messages that `train --messages` recorded of the cases of these trace files."""
    for word in words:
        try:
            run = read(find_run(runs, word))
        except ConfigError:
            continue
        for record in run.latest:
            training = record.training if isinstance(record, Measured) else None
            files = {Path(name).name for name in training.traces} if training else set()
            if training and training.messages and files & set(names):
                yield Source(
                    kind="record of the run",
                    files=(str(run.path),),
                    histogram=(messages := summed(training.messages)),
                    num_ranks_seen=ranks_seen(messages),
                    findings=(),
                    lines=(),
                )
