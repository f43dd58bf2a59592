"""What the flags of `workload generate` make of a model."""

from pathlib import Path

import pytest

from stepmark.step.workload import Workload
from stepmark.workloads.workload import convert, generate
from stepmark.workloads.workload_flags import options_class
from stepmark.workloads.workload_options import ConvertOptions


def deepseek(**flags: object) -> Workload:
    options = {"model": "deepseek-v3", "num_layers": 4, "world_size": 8, "ep": 8} | flags
    return generate(options_class("megatron")(framework="megatron", **options))


def test_a_q_lora_rank_of_0_is_none() -> None:
    """As in AICB: queries are projected directly."""
    modules = {op.module for op in deepseek().tally()}
    direct = deepseek(q_lora_rank=0)
    assert direct.model
    assert direct.model.mla
    assert direct.model.mla.q_lora_rank is None
    lost = modules - {op.module for op in direct.tally()}
    assert lost
    assert all(".q" in module for module in lost)


def test_a_size_that_is_read_otherwise_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.txt"
    head = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 all_gpus: 4 pp_comm: 0"
    rows = ["a\t-1\t5\tALLGATHER\t6\t6\tALLGATHER\t8\t7\tNONE\t0\t100\n"] * 3
    file.write_text(f"{head}\n3\n{''.join(rows)}")
    convert(ConvertOptions(file=str(file), out=str(tmp_path / "job.json")))
    said = "# all_gather of tp: 42 B of the file are read as 48 B, a multiple of the ranks\n"
    assert said in capsys.readouterr().err
