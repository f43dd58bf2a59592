"""Measured memory by kind adds up, beside what is predicted."""

from dataclasses import replace

from tests.training.train_records import flat, single

from stepmark.step_memory.memory import estimate
from stepmark.training.training_memory import lines, rows

GIB = 2**30


def test_kinds_add_up_and_are_the_fullest_ranks() -> None:
    case = single()
    training = flat(case, 1.0).training
    assert training is not None
    assert rows(case, training) == []  # as of older records
    found = replace(
        training,
        allocated_bytes=(70 * GIB, 72 * GIB),
        reserved_bytes=(75 * GIB, 80 * GIB),
        resting_bytes=(60 * GIB, 61 * GIB),
        outside_bytes=(2 * GIB, 3 * GIB),
    )
    table = {str(row["kind"]): row for row in rows(case, found)}
    *kinds, total = table.values()
    assert [row["measured"] for row in kinds] == [61 * GIB, 11 * GIB, 8 * GIB, 3 * GIB]
    assert total["measured"] == 83 * GIB
    predicted = estimate(case)
    assert sum(row["predicted"] or 0 for row in kinds) == total["predicted"]
    assert total["predicted"] == predicted.reserved_bytes
    own = table["held between steps"]["predicted"]
    state = predicted.weights_bytes + predicted.optimizer_bytes
    assert state <= own < 1.1 * state  # type: ignore[operator]
    assert "context and NCCL" in "\n".join(lines(case, found))
    assert rows(case, replace(found, outside_bytes=(2 * GIB, None))) == []
