"""What forty commands plan: the same cases, in the same order, as when runs were published."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import status

REPOSITORY = Path(__file__).parents[2]
# By command: the number of its cases, and a digest of their case_ids, line by line.
PLANNED = json.loads((REPOSITORY / "tests/data/planned-case-ids.json").read_text())


def planned(command: str, target: Path) -> list[dict[str, Any]]:
    """Rows of --dry-run --json; an operator has one for each label."""
    assert status([*shlex.split(command), "--dry-run", "--json", str(target)]) == 0
    rows: list[dict[str, Any]] = json.loads(target.read_text())
    return rows


@pytest.mark.parametrize("command", PLANNED)
def test_a_command_plans_the_cases_that_it_did(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    for name in ("examples", "results", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    rows = planned(command, tmp_path / "plan.json")
    case_ids = list(dict.fromkeys(row["case_id"] for row in rows))
    digest = hashlib.sha256("\n".join(case_ids).encode()).hexdigest()
    assert (len(case_ids), digest) == (
        PLANNED[command]["cases"],
        PLANNED[command]["case_ids"],
    )


def test_a_step_says_what_it_sends(tmp_path: Path) -> None:
    """FSDP of Llama-3.1-8B gathers the weights twice in bf16 and reduces them once in fp32."""
    command = "train llama-3.1-8b --strategy fsdp --nproc 8 --device h200"
    (row,) = planned(command, tmp_path / "plan.json")
    weights_bytes = 2 * 8_030_261_248
    assert row["message_bytes"] == pytest.approx(4 * weights_bytes, rel=0.05)
    assert row["flops"] > 6 * 7.5e9 * 8 * 8192
    assert row["memory_bytes"] > 16 * 8_030_261_248 / 8


def test_what_is_not_derived_is_unknown(tmp_path: Path) -> None:
    command = "train llama-3.1-8b --device h100 --loss-chunks 2 --nproc 1 --fp8 --fp8-head"
    (row,) = planned(command, tmp_path / "plan.json")
    assert row["message_bytes"] is None
    assert "1 with a head in fp8" in row["messages_unknown"]


def test_flops_and_messages_are_of_one_optimizer_step(tmp_path: Path) -> None:
    """Also with --schedule micro, where a sample is a part of it."""
    command = (
        "train gpt2-125m --strategy ddp --nproc 2 --device cpu --scale tiny --grad-accum 4"
    )
    (whole,) = planned(f"{command} --schedule step", tmp_path / "step.json")
    (parts,) = planned(f"{command} --schedule micro", tmp_path / "micro.json")
    (one,) = planned(command.replace("accum 4", "accum 1"), tmp_path / "one.json")
    assert parts["flops"] == whole["flops"] == 4 * one["flops"]
    assert parts["message_bytes"] == whole["message_bytes"]
