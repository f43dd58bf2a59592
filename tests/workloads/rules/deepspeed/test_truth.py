"""Every message of a step against those of a real DeepSpeed."""

import pytest
from tests.workloads.rules.deepspeed import recorded as real


@pytest.mark.parametrize("name", real.CASES)
def test_messages_of_a_step_are_deepspeeds(name: str) -> None:
    assert real.said(real.made(name)) == real.recorded(name).step


@pytest.mark.parametrize("name", real.CASES)
def test_messages_of_initialize_are_deepspeeds(name: str) -> None:
    assert real.said(real.made(name), setup=True) == real.recorded(name).setup


def test_all_stages_dtypes_and_numbers_of_ranks_were_run() -> None:
    cases = real.CASES.values()
    assert {case["zero"]["stage"] for case in cases} == {0, 1, 2, 3}
    assert {case["dtype"] for case in cases} == {"fp32", "bf16", "fp16"}
    assert {case["ranks"] for case in cases} == {2, 3, 4}
    assert {case["accumulation"] for case in cases} == {1, 2, 3, 4}
