"""stepmark trace messages: how often each message was sent, how fast, and what that costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stepmark.cases.message import RECV, SEND, Histogram, MessageKind, summed
from stepmark.cases.record import Measured
from stepmark.collectives.measured_curves import read_curves
from stepmark.findings import expected, histogram
from stepmark.findings.histogram import ranks_seen
from stepmark.findings.histogram_figures import section
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.read_text import read_head
from stepmark.ground.units import format_time
from stepmark.job_logs.log_sources import (
    FLIGHT,
    INSPECTOR,
    LOG,
    Inputs,
    Source,
    kinds_of,
    read_sources,
)
from stepmark.model.collectives import is_synchronizing
from stepmark.model.device import DeviceSpec, find_device
from stepmark.model.kernel_groups import short_name
from stepmark.model.network_options import NetworkChoice
from stepmark.model.systems import network_of
from stepmark.store.reader import find_run, read
from stepmark.tables.columns import Row
from stepmark.tables.page import Page
from stepmark.tables.table import Table
from stepmark.traces import trace_messages_text as report
from stepmark.traces.kineto.intervals import common, union
from stepmark.traces.kineto.matching import match
from stepmark.traces.kineto.messages import RankMessages, rank_messages
from stepmark.traces.kineto.stream import looks_like_trace
from stepmark.traces.kineto.windows import in_windows
from stepmark.traces.trace_files import (
    TraceSet,
    damage_notes,
    deliver,
    map_traces,
    without_pauses,
)
from stepmark.traces.trace_options import MessagesOptions

_MAX_NOTES = 40
_SPEEDUP = 2.0
_TIMES = ("step_s", "communication_s", "exposed_s", "exposed_waiting_s")


def messages(options: MessagesOptions) -> int:
    """Print and write the histogram, the ranks and what a faster network gains."""
    options.check_stdout()
    for field, value in (("other-curve", options.other_curve), ("force", options.force)):
        if value and not options.curve:
            raise ConfigError(field, value, "given with --curve")
    if options.network and options.network_speedup:
        allowed = "given without --network, which has its own rates"
        raise ConfigError("network-speedup", options.network_speedup, allowed)
    words, others = split_sources(options.files)
    options = without_pauses(replace(options, files=tuple(words)))
    traces = map_traces(options, rank_messages)
    if traces is None:
        return 0
    names = [Path(result.info.file).name for result in traces.results]
    notes = (*traces.notes, *_lost(traces))
    # Ranks whose GPU work is missing are left out, unless it is missing of all.
    whole = tuple(result for result in traces.results if not result.value.damage)
    traces = replace(traces, results=whole or traces.results, notes=notes)
    sources = [*read_sources(others, None), *recorded(words, options.runs, names)]
    view = _View(options, traces, sources)
    if options.html:
        page = Page(
            title="stepmark trace messages",
            lead=" ".join(filter(None, traces.lead.values())),
            sections=[section(f"messages of {traces.world_size} ranks", view.rows)],
        )
        write_text(options.html, page.html(), "html")
    tables = {
        "histogram": view.rows,
        "ranks": view.ranks,
        "copies": view.copies,
        "sources": view.compared,
    }
    deliver(options, "messages", view.document(), tables, view.text(), traces.lead)
    return 0


def _lost(traces: TraceSet[RankMessages]) -> Iterator[str]:
    """Yield which ranks have calls and no times, and why."""
    return damage_notes(
        (r.info.rank or 0, damage) for r in traces.results for damage in r.value.damage
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Times by a curve or a network, in seconds per rank and step; totals of all calls."""

    name: str
    times: Mapping[MessageKind, expected.Expected]
    totals: Mapping[str, float | int]
    all_s: float
    timed_s: float  # of the calls that are timed
    took_s: float  # what these took


class _View:
    """Everything that is shown, as rows, text and plain values."""

    def __init__(
        self, options: MessagesOptions, traces: TraceSet[RankMessages], sources: list[Source]
    ) -> None:
        self.options = options
        self.traces = traces
        self.sources = sources
        by_rank = {r.info.rank or 0: (r.info, r.value) for r in traces.results}
        options.check_steps(
            {number for result in traces.results for number in result.value.numbers},
            (result.info.file for result in traces.results if not result.value.is_marked),
        )
        self.matched = match(by_rank, options.has_step)
        self.selected = {
            rank: value.selected(options.has_step) for rank, (_, value) in by_rank.items()
        }
        self.curve = self._curve(options.curve)
        self.other = self._curve(options.other_curve)
        self.network = self._by_network(options.network)
        self.rows = report.rows(
            self.matched.histogram,
            self.matched.kernels,
            self.matched.partial,
            by=histogram.BY if options.by is None else histogram.parse_by(options.by),
            bins=histogram.parse_bins(options.bins) if options.bins else None,
            num_ranks=len(by_rank),
            num_rank_steps=self.matched.num_steps,
            expected=next((own.times for own in (self.curve, self.network) if own), None),
        )
        self.ranks = list(self._rank_rows())
        self.communicates = any(row["communication_s"] for row in self.ranks)
        copies = [
            copy[1:]
            for rank, (_, value) in by_rank.items()
            for copy in value.copies
            if copy[0] in self.selected[rank]
        ]
        self.copies = report.copy_rows(copies, self.matched.num_steps)
        self.compared = [
            row
            for source in sources
            for row in report.compared(
                self.matched.histogram,
                self.matched.num_steps,
                source.histogram,
                source.num_ranks_seen,
                source.kind,
            )
        ]

    def _curve(self, name: str | None) -> _Curve | None:
        if name is None:
            return None
        known: Histogram = {
            kind: tally
            for kind, tally in self.matched.histogram.items()
            if kind.message_bytes is not None
            and (kind.collective in (SEND, RECV) or (kind.num_ranks or 1) > 1)
        }
        if not known:
            allowed = "given for traces with messages of several ranks and known size"
            raise ConfigError("curve", name, allowed)
        curves = read_curves(name, self.options.runs)
        return self._taken(name, expected.expected(known, curves, force=self.options.force))

    def _by_network(self, name: str | None) -> _Curve | None:
        if name is None:
            return None
        ranks = {
            rank for groups in self.matched.groups.values() for own in groups for rank in own
        }
        num_ranks = max(self.traces.world_size or 0, max(ranks, default=0) + 1)
        network = network_of(self._device(), num_ranks, NetworkChoice(network=name))
        assert network is not None
        times = expected.by_network(self.matched.histogram, self.matched.groups, network)
        if not times:
            allowed = "given for traces that tell sizes and ranks of messages between ranks"
            raise ConfigError("network", name, allowed)
        return self._taken(network.name, times)

    def _device(self) -> DeviceSpec:
        """Return the device of the traces, whose links join a host. Raises ConfigError."""
        names = {name for r in self.traces.results for name in r.info.devices or ()}
        device = find_device(names.pop()) if len(names) == 1 else None
        if device is None:
            allowed = (
                f"given for traces of one known device, not of {', '.join(names) or 'none'}"
            )
            raise ConfigError("network", self.options.network, allowed)
        return device

    def _taken(self, name: str, times: Mapping[MessageKind, expected.Expected]) -> _Curve:
        """Return the times with what the timed calls took."""
        matched = self.matched
        steps = matched.num_steps
        totals = expected.totals(matched.histogram, times, 1)
        covered = [(matched.histogram[kind], time.seconds) for kind, time in times.items()]
        return _Curve(
            name=name,
            times=times,
            totals=totals,
            all_s=totals["seconds_per_rank"] / steps,
            timed_s=sum(tally.timed_calls * seconds for tally, seconds in covered) / steps,
            took_s=sum(tally.seconds for tally, _ in covered) / steps,
        )

    def _rank_rows(self) -> Iterator[Row]:
        for result in self.traces.results:
            rank = result.info.rank or 0
            value = result.value
            waits = self.matched.ranks[rank]
            selected = self.selected[rank]
            steps = max(len(selected), 1) * 1e9
            is_timed = waits.timed > 0
            per_step: dict[str, float | None] = dict.fromkeys(_TIMES)
            if times := value.times:
                start, end, _ = np.array(waits.waiting, np.int64).reshape(-1, 3).T
                waiting = common(union(start, end), times.exposed)
                intervals = (union(*times.windows), times.communication, times.exposed, waiting)
                per_step = {
                    name: int(in_windows(own, times.windows)[selected].sum()) / steps
                    for name, own in zip(_TIMES, intervals, strict=True)
                }
            has_calls = waits.calls > 0 or not per_step["communication_s"]
            is_compared = is_timed and self.matched.end_spread is not None
            agree = is_timed and self.matched.clocks_agree
            # Communication that no call explains may be transfer, too; on a host that knows all
            # its calls it is the host's own time in them.
            is_hosts = is_timed and times is not None and times.is_host
            is_hosts &= waits.timed == waits.calls and not self.matched.uncounted.total()
            unexplained = (per_step["communication_s"] or 0.0) - waits.kernels / steps
            yield {
                "rank": rank,
                "steps": len(selected),
                "calls_per_step": waits.calls / max(len(selected), 1) if has_calls else None,
                **per_step,
                "exposed_waiting_s": per_step["exposed_waiting_s"] if is_timed else None,
                "kernels_s": waits.kernels / steps if is_timed else None,
                "transfer_s": waits.transfer / steps if is_timed else None,
                "waiting_s": waits.waited / steps if is_timed else None,
                "other_kernels_s": max(
                    waits.other_kernels / steps, 0.0 if is_hosts else unexplained, 0.0
                ),
                "arrived_last": waits.last if is_compared else None,
                "early_s": waits.early / steps if agree else None,
                "early_per_call_s": waits.early / waits.timed / 1e9 if agree else None,
            }

    def _gains(self) -> Iterator[tuple[str, report.Gain]]:
        if not self.communicates:
            return
        tallies = self.matched.histogram
        total = sum(tally.seconds for tally in tallies.values())
        shares = []
        if self.network and total:
            saved = sum(
                tallies[kind].seconds - tallies[kind].timed_calls * own.seconds
                for kind, own in self.network.times.items()
            )
            shares.append((f"the network {self.network.name}", saved / total, 0.0))
        elif not self.network:
            speedup = self.options.network_speedup or _SPEEDUP
            faster = 1 - 1 / speedup
            shares.append((f"a network {speedup:g} times as fast", faster, faster))
        if self.curve and self.other and total:
            saved = sum(
                tallies[kind].seconds * (1 - other.seconds / self.curve.times[kind].seconds)
                for kind, other in self.other.times.items()
                if kind in self.curve.times
            )
            what = f"with {self.options.other_curve} instead of {self.options.curve}"
            shares.append((what, saved / total, 0.0))
        for what, share, unknown_share in shares:
            if result := report.gain(self.ranks, share, unknown_share):
                yield what, result

    def _verdict(self) -> Iterator[str]:
        lost = "; ".join(_lost(self.traces))
        reason = f"no step has times ({lost})" if lost else "no step with work is in the traces"
        sends = any(kind.num_ranks != 1 for kind in self.matched.histogram)
        if sends and self.ranks[0]["step_s"] and not self.communicates:
            return report.verdict([], "calls between ranks have no times in these steps")
        return report.verdict(self.ranks, reason)

    def text(self) -> Iterator[str]:
        """Yield lines for a terminal."""
        ranks = len(self.traces.results)
        counts = sorted(map(len, self.selected.values()))
        low = counts[0]
        high = counts[-1]
        each = f"{f'{low} to ' if low < high else ''}{high} step{'' if high == 1 else 's'} each"
        if not any(result.value.is_marked for result in self.traces.results):
            each = "without marks of steps: the whole trace is one"
        yield (
            f"# {ranks} of {self.traces.world_size} ranks, {each}; sizes as nccl-tests counts "
            "them; latency: shortest kernel of any rank; waiting: the rest"
        )
        if self.rows:
            yield from report.lines(self.rows)
        else:
            which = " of known size" if sum(self.matched.uncounted.values()) else ""
            yield f"no message{which} of torch.distributed is in these steps"
        yield from self._curve_text()
        yield ""
        yield from Table(self.ranks, report.RANK_COLUMNS).text()
        if self.copies:
            yield ""
            yield from Table(self.copies, report.COPY_COLUMNS).text()
        yield ""
        yield from self._verdict()
        for what, result in self._gains():
            yield report.gain_line(what, result)
        for source in self.sources:
            yield ""
            rows = [row for row in self.compared if row["source"] == source.kind]
            yield from report.compared_lines(source.kind, len(source.files), rows)
        notes = self.notes()
        if notes:
            yield ""
        yield from (f"note: {note}" for note in notes[:_MAX_NOTES])
        if len(notes) > _MAX_NOTES:
            yield f"note: and {len(notes) - _MAX_NOTES} more; --json has all"

    def _curve_text(self) -> Iterator[str]:
        for curve in filter(None, (self.curve, self.other, self.network)):
            line = f"# by {curve.name} these take {format_time(curve.all_s)} per rank and step"
            if curve.timed_s and curve is not self.other:
                took = "took at most" if self.matched.partial else "took"
                times = f"{curve.took_s / curve.timed_s:.2f} times that"
                line += f"; the timed ones take {format_time(curve.timed_s)} by it, and {took} "
                line += f"{format_time(curve.took_s)}, {times}"
            yield line
            yield from expected.beyond_curve(curve.totals)

    def notes(self) -> list[str]:
        """Return what is not known, and why."""
        matched = self.matched
        notes = list(self.traces.notes)
        notes += [
            f"{count} {reason} are not counted"
            for reason, count in matched.uncounted.items()
            if count
        ]
        notes += [
            f"untimed: {text} (calls: {count})" for text, count in matched.unmatched.items()
        ]
        unlinked: dict[str, list[int]] = {}
        for result in self.traces.results:
            for name, count, ns in result.value.calls.unlinked:
                sums = unlinked.setdefault(name, [0, 0])
                sums[0], sums[1] = sums[0] + count, sums[1] + ns
        notes += [
            f"{count} kernels {short_name(name)[:60]} ({format_time(ns / 1e9)}) are of no "
            "call in the traces (coalesced calls, replayed graphs, shared memory of GPUs): "
            "their sizes are not known"
            for name, (count, ns) in sorted(unlinked.items(), key=lambda item: -item[1][0])
        ]
        if other := [
            kind for kind in matched.histogram if not is_synchronizing(kind.collective)
        ]:
            names = ", ".join(sorted({kind.collective for kind in other}))
            notes.append(
                f"a rank may end before others begin in {names}: their shortest kernel may be "
                "less than the transfer, and is not counted as one by rank"
            )
        if matched.partial:
            calls = sum(matched.histogram[kind].calls for kind in matched.partial)
            notes.append(
                f"of {calls} calls some ranks have no trace: their latency, waiting and bus "
                "bandwidth are not known"
            )
        if matched.end_spread is not None and not matched.clocks_agree:
            notes.append(
                "how long before the last each rank arrived is not known: ends of a call are "
                f"{format_time(matched.end_spread / 1e9)} apart (median): clocks may differ"
            )
        return notes

    def document(self) -> dict[str, object]:
        """Return everything as plain values."""
        best = report.gain(self.ranks, 1.0, 1.0)
        return {
            "world_size": self.traces.world_size,
            "rank_steps": self.matched.num_steps,
            "histogram": self.rows,
            "ranks": self.ranks,
            "copies": self.copies,
            "curve": self.curve
            and {
                "name": self.curve.name,
                "expected_per_rank_step_s": self.curve.all_s,
                "expected_of_timed_per_rank_step_s": self.curve.timed_s,
                "took_per_rank_step_s": self.curve.took_s if self.curve.timed_s else None,
                "uncovered_calls": self.curve.totals["uncovered_calls"],
            },
            "network": {
                "step_s": best.step_s if best else None,
                "most_gain_s": best.seconds if best else None,
                "verdict": list(self._verdict()),
                "gains": [
                    {"network": what, "most_gain_s": result.seconds, "limited_by": result.rank}
                    for what, result in self._gains()
                ],
            },
            "end_spread_s": None
            if self.matched.end_spread is None
            else self.matched.end_spread / 1e9,
            "sources": self.compared,
            "notes": self.notes(),
        }


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
