"""What a replay measured, as an object: arrays and tables, and as text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stepmark.cases.comm_curve import Curve
from stepmark.ground.units import format_bytes, format_time
from stepmark.replays import replay_rows
from stepmark.replays.replay_rows import Row
from stepmark.step.workload import Workload
from stepmark.tables.columns import (
    BYTES,
    COUNT,
    GB_S,
    NO_HEADING,
    SECONDS,
    WHOLE_SHARE,
    given,
)
from stepmark.tables.table import Table
from stepmark.timeline.timeline import Timeline

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_SHOWN = 3  # messages beside a real step, those that take longest
_PHASE_COLUMNS = (
    given("pass", heading=NO_HEADING, words=lambda row: f"  {row['pass'] or 'step'}"),
    given("computing_s", SECONDS, "computing"),
    given("messages_s", SECONDS, "messages"),
    given("exposed_comm_s", SECONDS, "exposed"),
)
_MESSAGE_COLUMNS = (
    given("pass"),
    given("collective"),
    given("group"),
    given("group_size", COUNT, "ranks"),
    given("dtype", heading="type"),
    given("message_bytes", BYTES, "size"),
    given("operations", COUNT, "number"),
    given("mean_s", SECONDS, "mean"),
    given("p50_s", SECONDS, "p50"),
    given("p99_s", SECONDS, "p99"),
    given("max_s", SECONDS, "max"),
    given("time_min_s", SECONDS, "shortest"),
    given("busbw_bytes_per_s", GB_S, "busbw GB/s"),
    given("alone_pct", WHOLE_SHARE, "of alone"),
)


@dataclass(frozen=True, kw_only=True)
class ReplayLog:
    """One replay. Times are in seconds, not a number where nothing was timed.

    seconds: [rank][iteration], without warm-up. spans: [rank][pass][operation] and then start
    and duration, of passes of their own; operations are those of `core.rank_program.program`.
    blocked_s: [rank][iteration] of waiting for messages, empty on a GPU. wrong: wrong and
    compared elements; None: not verified. event_s: what two events add to an operation.
    curves: of collectives alone. step_of_trace_s: the step of whose trace the workload is;
    None: of none, or not all of it is replayed.
    """

    workload: Workload
    seconds: "Floats"
    spans: "Floats"
    blocked_s: Sequence[Sequence[float]] = ()
    event_s: float = 0.0
    num_warmups: int = 0
    wrong: tuple[int, int] | None = None
    curves: Sequence[Curve] = ()
    step_of_trace_s: float | None = None

    @property
    def epoch_times(self) -> "Floats":
        """Return the iterations by their slowest rank."""
        longest: Floats = self.seconds.max(axis=0)
        return longest

    @cached_property
    def comm_logs(self) -> list[Row]:
        """Return a row per message of a step, medians over the passes."""
        return replay_rows.operation_rows(self.workload, self.spans[..., 1])

    @property
    def comm_log_each_epoch(self) -> "Floats":
        """Return [pass][message], the longest time of its stage's ranks, as in comm_logs."""
        per_stage = self.workload.world_size // len(self.workload.stages)
        columns = []
        for row in self.comm_logs:
            first = row["stage"] * per_stage
            own = self.spans[first : first + per_stage, :, row["operation"], 1]
            longest = np.where(np.isnan(own), -np.inf, own).max(axis=0)
            columns.append(np.where(np.isinf(longest), np.nan, longest))
        table = np.array(columns, dtype=np.float64)
        return table.reshape(len(columns), self.spans.shape[1]).T

    @cached_property
    def iterations(self) -> Row:
        """Return the iterations with median, jitter and outliers."""
        return {
            "warmups": self.num_warmups,
            **replay_rows.iterations(self.seconds.tolist(), self.blocked_s),
            "step_of_trace_s": self.step_of_trace_s,
        }

    @cached_property
    def messages(self) -> list[Row]:
        """Return a row per pass, collective, group, type and size."""
        return replay_rows.summary_rows(self.workload, self.spans[..., 1], self.curves)

    @cached_property
    def phases(self) -> list[Row]:
        """Return computation and messages of each rank in each pass of the step."""
        return replay_rows.phase_rows(self.workload, self.spans, self.event_s)

    @cached_property
    def arrivals(self) -> list[Row]:
        """Return how often each rank was the last to come to a collective."""
        return replay_rows.arrival_rows(self.workload, self.spans[..., 1])

    @property
    def _slowest_rank(self) -> Row:
        """Return the step, as `phases` has it, of the rank that is busy longest."""
        steps = [row for row in self.phases if not row["pass"]]
        return max(steps, key=lambda r: r["computing_s"] + (r["exposed_comm_s"] or 0.0))

    def beside(self, step_s: float) -> Iterator[str]:
        """Yield what of a real step of the same workload its operators and messages are."""
        own_s = self.iterations["median_s"]
        slowest = self._slowest_rank
        parts = [f"computation {format_time(slowest['computing_s'])}"]
        if self.messages:
            exposed = slowest["exposed_comm_s"]
            text = "of unknown time" if exposed is None else format_time(exposed)
            parts.append(f"exposed communication {text}")
        more = "more" if step_s >= own_s else "less"
        rest = f"{format_time(abs(step_s - own_s))} ({abs(step_s / own_s - 1):.0%}) {more}"
        yield (
            f"replayed: operators and messages of the step by themselves take "
            f"{format_time(own_s)} ({', '.join(parts)}); the step took {rest}"
        )
        compared = [row for row in self.messages if row["alone_pct"] is not None]
        for row in compared[:_SHOWN]:
            size = f"{format_bytes(row['message_bytes'])} over {row['group_size']} ranks"
            share = f"{row['alone_pct']:.0f} % of its bandwidth alone"
            yield f"replayed: {row['collective']} of {size}, {row['pass']}: {share}"

    def timeline(self) -> Timeline:
        """Return the timed operations of the last pass."""
        spans = list(replay_rows.spans_of(self.workload, self.spans))
        return Timeline(spans, (0, max((span.end_ns for span in spans), default=0)))

    def document(self) -> Row:
        """Return all of it as JSON."""
        return {
            "iterations": self.iterations,
            "phases": self.phases,
            "ranks": self.arrivals,
            "messages": self.messages,
            "operations": self.comm_logs,
        }

    def lines(self) -> Iterator[str]:
        """Yield what is printed."""
        yield from self._iteration_lines()
        yield from self._phase_lines()
        if self.wrong is not None:
            yield f"verified    {self.wrong[1]:,} elements, {self.wrong[0]:,} wrong"
        yield from Table(self.messages, _MESSAGE_COLUMNS).text()
        yield f"{self.workload.name}: {self.workload.rules}, {self.workload.world_size} ranks"

    def _iteration_lines(self) -> Iterator[str]:
        own = self.iterations
        spread = f"{format_time(own['min_s'])} to {format_time(own['max_s'])}"
        jitter = "" if own["jitter_pct"] is None else f", jitter {own['jitter_pct']:.2g} %"
        count = f"{len(own['seconds'])} after {self.num_warmups} to warm up"
        yield f"iterations  median {format_time(own['median_s'])} ({spread}{jitter}; {count})"
        for index in own["outliers"]:
            more = own["seconds"][index] / own["median_s"] - 1
            yield f"outlier     iteration {index} takes {more:.0%} longer than the median"
        if step_s := self.step_of_trace_s:
            rest_s = step_s - own["median_s"]
            what = "of the host, the profiler, and gaps between kernels, not in a replay"
            if rest_s < 0:
                what = "that the replay takes longer"
            text = f"{format_time(abs(rest_s))} ({abs(rest_s) / step_s:.1%}) {what}"
            yield f"trace       its profiled step took {format_time(step_s)}: {text}"
        if blocked := own["blocked_s_by_rank"]:
            shares = (time_s / own["median_s"] for time_s in blocked)
            texts = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(shares))
            yield f"waiting     share of the median iteration in messages: {texts}"

    def _phase_lines(self) -> Iterator[str]:
        slowest = self._slowest_rank
        yield f"passes      of rank {slowest['rank']}, from the passes that time operations:"
        own = [
            {key: "unknown" if value is None else value for key, value in row.items()}
            for row in self.phases
            if row["rank"] == slowest["rank"]
        ]
        yield from Table(own, _PHASE_COLUMNS).text()
        if sentence := replay_rows.slow_rank(self.arrivals):
            yield f"slow rank   {sentence}"
