"""What one rank of `stepmark comm` measures."""

from typing import Any

from stepmark.cli import comm_output, rank_work
from stepmark.cli.options import Values
from stepmark.cli.rank_parent import Places
from stepmark.cli.rank_work import Verb
from stepmark.core.plan import CommHow, How
from stepmark.core.units import parse_duration


def work(places: Places, values: Values, device: str) -> int:
    """All positions from the guard's first. The exit code of this rank."""
    from stepmark.bench.context import make_context  # noqa: PLC0415

    verb = Verb(
        make_context=lambda: make_context(device),
        how=How(comm=how(values)),
        deliver=comm_output.deliver,
    )
    return rank_work.work(places, values, verb)


def how(values: Values) -> CommHow:
    """-n, -w, -c, --timeout and --budget."""
    given: dict[str, Any] = {
        "iterations": values.get("iters"),
        "graphs": values.get("cudagraph"),
        "warmups": values.get("warmup_iters"),
        "checks": values.get("check"),
    }
    for name, field in (("timeout", "timeout_s"), ("budget", "budget_s")):
        if values.get(name):
            given[field] = parse_duration(values[name], name)
    return CommHow(**{k: v for k, v in given.items() if v is not None})
