"""Columns of the rows of replays: one row per record."""

from collections.abc import Iterable
from statistics import median

from stepmark.cases.record import Measured, Record, RunInfo
from stepmark.cases.replay_case import ReplayCase
from stepmark.ground.stats import slowest_per_sample
from stepmark.model.device import DeviceSpec
from stepmark.store.commands import command_of
from stepmark.tables.columns import COUNT, FLAG, SECONDS, SHOWN, TEXT, Column, Row, rows_of
from stepmark.tables.launches import message_of

_Outcome = tuple[Record, ReplayCase, tuple[float, ...]]  # iterations by the slowest rank


def _message(record: Record) -> str:
    why_not: str = getattr(record, "message", getattr(record, "reason", ""))
    return message_of(record) if record.differs else why_not


REPLAY_COLUMNS: tuple[Column[_Outcome], ...] = (
    Column("family", lambda o: o[1].family),
    Column("model", lambda o: o[1].file, TEXT, "workload", SHOWN),
    Column("num_ranks", lambda o: o[1].num_ranks, COUNT, "ranks", SHOWN),
    Column("shrunk_from", lambda o: o[1].shrunk_from or None, COUNT, "", SHOWN),
    Column("compute", lambda o: o[1].compute.value, views=SHOWN),
    Column("compute_from", lambda o: o[1].compute_from),
    Column("blocking", lambda o: o[1].blocking, FLAG, "", SHOWN),
    Column("iteration_s", lambda o: median(o[2]) if o[2] else None, SECONDS, "", SHOWN),
    Column("min_s", lambda o: min(o[2], default=None), SECONDS, "", SHOWN),
    Column("max_s", lambda o: max(o[2], default=None), SECONDS, "", SHOWN),
    Column("iterations", lambda o: len(o[2]), COUNT, "n", SHOWN),
    Column("method", lambda o: o[0].samples.method if isinstance(o[0], Measured) else ""),
    Column("status", lambda o: o[0].kind),
    Column("message", lambda o: _message(o[0])),
    Column("launch", lambda o: o[0].launch, COUNT),
    Column("run_id", lambda o: o[0].run_id),
    Column("case_id", lambda o: o[1].case_id),
    Column("command", lambda o: command_of(o[1])),
)


def rows(
    records: Iterable[Record], run: RunInfo, device: DeviceSpec | None = None
) -> list[Row]:
    """Return a row per replay."""
    outcomes: list[_Outcome] = []
    for record in records:
        if isinstance(record.case, ReplayCase):
            seconds = record.samples.seconds if isinstance(record, Measured) else ()
            outcomes.append((record, record.case, tuple(slowest_per_sample(seconds))))
    return rows_of(REPLAY_COLUMNS, outcomes)
