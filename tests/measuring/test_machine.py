"""What devices are here, where the answer does not come."""

import sys

import pytest

from stepmark.ground.errors import StepmarkError
from stepmark.measuring import machine


@pytest.mark.ranks
def test_torch_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ASK_TORCH", "import time; time.sleep(60)")
    monkeypatch.setattr(machine, "_TORCH_LIMIT_S", 0.2)
    with pytest.raises(
        StepmarkError, match=r"did not list the devices .* --device cpu"
    ) as caught:
        machine._asked_of_torch()
    assert "\n" not in str(caught.value)


def test_without_nvml_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert machine._nvidia_cards() is None
