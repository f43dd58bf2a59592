"""Predicted steps of experts whose rows differ, and of DeepEP's two hops."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import status

STEP = (
    "predict deepseek-v2-lite --num-layers 4 --framework pytorch --world-size 8 --gbs 16 "
    "--device h100-sxm --ep 4 --seq-len 2048"
)
FLEX = (
    "predict deepseek-v2-lite --num-layers 4 --framework megatron --world-size 16 --gbs 32 "
    "--device h100-sxm --seq-len 2048 --ep 8 --moe-token-dispatcher-type flex"
)


def predicted(words: str, folder: Path) -> dict[str, Any]:
    out = folder / "step.json"
    assert status([*words.split(), "--json", str(out)]) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


@pytest.mark.parametrize("recompute", ["", " --recompute full"])
def test_executed_flops_are_those_of_all_ranks(recompute: str, tmp_path: Path) -> None:
    """All ranks together have as many rows, however they are spread."""
    even = predicted(STEP + recompute, tmp_path)
    fuller = predicted(f"{STEP}{recompute} --imbalance 1.5", tmp_path)
    assert fuller["step_s"] > even["step_s"]
    for name in ("flops_per_token", "executed_per_token"):
        assert fuller[name] == pytest.approx(even[name], rel=1e-3), name


def test_a_hop_within_a_host_stays_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([*FLEX.split(), "--gpus-per-host", "4"]) == 2
    assert "moe-deepep-gpus-per-host 8 is invalid" in capsys.readouterr().err
    words = f"{FLEX} --gpus-per-host 4 --moe-deepep-gpus-per-host 4"
    assert predicted(words, tmp_path)["step_s"] > 0
