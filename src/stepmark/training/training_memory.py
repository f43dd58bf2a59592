"""Memory of a training step by kind, measured beside predicted."""

from collections.abc import Iterator

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Training
from stepmark.step_memory.memory import estimate
from stepmark.tables.columns import BYTES, TEXT, Row, given
from stepmark.tables.table import Table

_COLUMNS = (
    given("kind", TEXT, "memory of the fullest rank"),
    given("measured", BYTES),
    given("predicted", BYTES),
)


def rows(case: TrainCase, training: Training) -> list[Row]:
    """Return rows that add up to the last one; none where memory was not measured by kind.

    held: weights, optimizer and what else is allocated between steps. passes: more when most
    is allocated. cached: reserved by torch's allocator without being allocated. outside:
    context, kernels and NCCL's buffers, which are not predicted.
    """
    by_rank = (
        training.allocated_bytes,
        training.reserved_bytes,
        training.resting_bytes,
        training.outside_bytes,
    )
    if not training.resting_bytes or any(None in sizes for sizes in by_rank):
        return []
    known = zip(*(tuple(size or 0 for size in sizes) for sizes in by_rank), strict=True)
    allocated, reserved, held, outside = max(known)
    predicted = estimate(case)
    own = predicted.resting_bytes
    return [
        {"kind": "held between steps", "measured": held, "predicted": own},
        {
            "kind": "of the passes",
            "measured": allocated - held,
            "predicted": predicted.allocated_bytes - own,
        },
        {
            "kind": "cached",
            "measured": reserved - allocated,
            "predicted": predicted.reserved_bytes - predicted.allocated_bytes,
        },
        {"kind": "context and NCCL", "measured": outside, "predicted": None},
        {
            "kind": "in all",
            "measured": reserved + outside,
            "predicted": predicted.reserved_bytes,
        },
    ]


def lines(case: TrainCase, training: Training) -> Iterator[str]:
    """Yield the rows as a table."""
    if found := rows(case, training):
        yield ""
        yield from Table(found, _COLUMNS).text()
