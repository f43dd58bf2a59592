"""All jobs of export_cases.py in all formats; test_exports.py has a sample of them."""

from pathlib import Path

import pytest

from .export_cases import AXES, accepted, cases
from .test_exports import check_all


@pytest.mark.slow
@pytest.mark.parametrize("framework", AXES)
def test_all_exports_hold_what_they_do_not_deny(framework: str, tmp_path: Path) -> None:
    mine = (case for case in cases() if case.framework == framework)
    number = 0
    for number, (case, workload) in enumerate(accepted(mine), start=1):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_all(case, workload, folder)
    assert number > 4
