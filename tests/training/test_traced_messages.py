"""Messages of a real job of two ranks: what its traces say is what the dispatcher saw."""

from collections import Counter
from itertools import chain
from pathlib import Path

from tests.ranks_pool import Pool
from tests.training.traced_on_ranks import STEPS, profiled

from stepmark.cases.message import Histogram, summed
from stepmark.traces.kineto.matching import match
from stepmark.traces.kineto.messages import rank_messages
from stepmark.traces.kineto.reader import read_trace

Sizes = Counter[tuple[str, str, int | None, int, int | None]]


def sizes(histogram: Histogram) -> Sizes:
    found: Sizes = Counter()
    for kind, tally in histogram.items():
        key = (kind.collective, kind.dtype, kind.num_ranks, kind.call_bytes, kind.message_bytes)
        found[key] += tally.calls
    return found


def test_traces_of_gloo_have_the_messages_that_the_dispatcher_saw(tmp_path: Path) -> None:
    with Pool(2) as pool:
        recorded = pool.run(profiled, str(tmp_path), timeout_s=120)
    traces = [read_trace(tmp_path / f"rank{rank}.json") for rank in range(2)]
    found = match(
        {rank: (trace.info, rank_messages(trace)) for rank, trace in enumerate(traces)},
        lambda _: True,
    )
    assert sizes(found.histogram) == sizes(summed(chain.from_iterable(recorded)))
    assert not found.uncounted.total()
    assert not found.unmatched
    assert found.num_steps == 2 * STEPS
    by_phase = Counter(
        kind.phase for kind in found.histogram if kind.collective == "all_reduce"
    )
    assert by_phase["backward"]  # of DDP
    for tally in found.histogram.values():
        assert tally.calls == tally.timed_calls
        assert tally.seconds > 0
