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


def test_shards_of_experts_are_padded_divided_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 experts of 768 rows: in whole rows, each in its own rows, or not at all."""
    words = "predict qwen3-30b-a3b --num-layers 4 --strategy fsdp --device h100-sxm --nproc"
    notes = predicted(f"{words} 48", tmp_path)["notes"]
    assert any("torch pads them to 144" in note for note in notes), notes
    even, apart = (predicted(f"{words} {count}", tmp_path) for count in (128, 256))
    assert not any("torch pads" in note for note in even["notes"] + apart["notes"])
    assert apart["step_s"] < 1.3 * even["step_s"], "padded messages were twice as large"
    assert status([*words.split(), "320"]) == 2
    assert "a divisor of an expert's 768 rows" in capsys.readouterr().err
