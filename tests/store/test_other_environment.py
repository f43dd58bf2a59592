"""What a forced resume measured in another environment shows it, whatever shows it."""

from dataclasses import replace

import pytest
from tests.collectives.comm_records import comm_case, comm_measured, comm_run
from tests.comparison.test_case_fields import REPLAY
from tests.tables.records import gemm, measured, run_info
from tests.training.train_records import fsdp, train_measured, train_run

from stepmark.cases.record import Measured, RunInfo
from stepmark.store.view import columns, of_records
from stepmark.tables.columns import View

TREE = ("NCCL_ALGO: unset -> Tree",)
OP = measured(gemm(), 1e-3)
COMM = comm_measured(comm_case(num_ranks=4), [[1e-5] * 3] * 4)


@pytest.mark.parametrize(
    ("run", "record"),
    [
        (run_info(), OP),
        (comm_run(), COMM),
        (train_run(), train_measured(fsdp(), [[0.5, 0.6]] * 8)),
        (run_info(), replace(OP, case=REPLAY)),
    ],
)
def test_a_row_says_that_its_environment_was_another(run: RunInfo, record: Measured) -> None:
    (row, *_) = of_records(run, [record]).all_rows
    assert not row["message"]
    own = [row["case_id"] for row in of_records(run, [record]).all_rows]
    other = replace(record, differs=TREE, launch=2)
    marked = [row for row in of_records(run, [record, other]).all_rows if row["message"]]
    assert [row["case_id"] for row in marked] == own, "rows of their own, not one for both"
    assert {row["message"] for row in marked} == {f"in another environment: {TREE[0]}"}
    if record.case.kind != "replay":
        assert "another environment" in str(marked[0]["validity"])
        (validity,) = (c for c in columns(record.case.kind) if c.name == "validity")
        assert View.CONSOLE in validity.views
