"""Times of published runs that `% ref` compares with: derived from results/, and packaged."""

import dataclasses
from pathlib import Path

from validation import reference_times

from stepmark.store import view
from stepmark.store.reader import read_info

RESULTS = Path(__file__).parents[2] / "results"


def test_the_table_is_that_of_the_published_runs() -> None:
    derived = list(reference_times.rows())
    assert len(derived) >= 290
    assert view.published_times() == derived


def test_a_run_is_compared_with_other_runs_on_its_device() -> None:
    run = read_info(RESULTS / "h200-gemm-sustained-2")
    known = view.reference(run)
    times = view.published_times()
    own = {case_id for run_id, _, case_id, _ in times if run_id == run.run_id}
    assert len(own) == 16
    assert own <= known.keys()  # measured before by h200-gemm-sustained-1
    others = {row[2:] for row in times if row[1] == "NVIDIA H200" and row[0] != run.run_id}
    assert {*known.items()} <= others
    assert known.keys() == {case_id for case_id, _ in others}


def test_several_devices_have_no_reference() -> None:
    run = read_info(RESULTS / "h200-gemm-sustained-1")
    [device] = run.environment.devices
    other = dataclasses.replace(device, name="NVIDIA H100 80GB HBM3")
    environment = dataclasses.replace(run.environment, devices=(device, other))
    assert view.reference(dataclasses.replace(run, environment=environment)) == {}
