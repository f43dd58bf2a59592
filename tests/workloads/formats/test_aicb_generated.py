"""What is written of a generated workload says what it does, in words that AICB can read."""

import csv
import io
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.model.collectives import Collective
from stepmark.model.ops import Gemm, Phase
from stepmark.step.workload import CommOp, ComputeOp, Group, Operation, Workload
from stepmark.workloads.formats import aicb
from stepmark.workloads.formats.aicb_line import group_names
from stepmark.workloads.formats.loss import losses
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.settings import Granularity
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_flags import options_class

from .aicb_samples import megatron
from .hand_made import not_held, passed_on, pipeline

HEADER = (
    "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,"
    "_elapsed_time,algbw,busbw,count"
)
# Of aliyun/aicb, utils/utils.py: CommType and CommGroup.
TYPES = {
    *("all_reduce", "isend", "irecv", "broadcast", "all_gather", "reduce_scatter", "barrier"),
    *("reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "computation", "epoch_end"),
    "all_to_all",
}
GROUPS = {
    *("dp_group", "pp_group", "tp_group", "ep_group", "ep_dp_group", "ep_tp_group"),
    *("embedding_group", "all"),
}


def text_of(workload: Workload, **more: Any) -> str:
    return "".join(aicb.write(workload, **more))


def read(tmp_path: Path, text: str) -> Workload:
    path = tmp_path / "workload.csv"
    path.write_text(text)
    return aicb.read(path)


GENERATED: dict[str, dict[str, Any]] = {
    "plain": {"tp": 2, "dp_shard": 2, "gbs": 4},
    "pipeline": {
        **{"tp": 4, "dp_shard": 2, "pp": 4, "gbs": 8},
        "settings": {
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "virtual_pipeline_model_parallel_size": 5,
        },
    },
    "experts": {
        **{"model": "mixtral-8x7b", "tp": 2, "ep": 4, "dp_shard": 8, "gbs": 8},
        "settings": {"sequence_parallel": True, "overlap_grad_reduce": True},
    },
    "instances": {
        **{"tp": 2, "dp_shard": 4, "dp_replicate": 2, "gbs": 8},
        "settings": {"use_distributed_optimizer": True},
    },
}


@pytest.fixture(scope="module", params=GENERATED)
def generated(request: pytest.FixtureRequest) -> Workload:
    return megatron(**GENERATED[request.param])


def meaning(op: Operation, workload: Workload) -> tuple[object, ...]:
    """All that a line says of an operation."""
    if isinstance(op, ComputeOp):
        assert isinstance(op.op, Gemm)
        return op.op.m, op.op.n, op.op.k
    group = workload.groups[op.group]
    num_bytes = op.message_bytes(group)
    kind = op.collective.removesuffix("_v")
    way = None if op.peer is None else op.peer % group.size
    return kind, group.size, num_bytes, op.root, way


def carried(workload: Workload, stage: int) -> list[tuple[object, ...]]:
    """All matrix products, and all messages that are not said to be left out."""
    lost = losses(workload, aicb.kept, [stage])
    left = {line.partition(":")[0] for line in lost if "; in the file" not in line}
    return [
        meaning(op, workload)
        for op in workload.expand(stage)
        if (isinstance(op, ComputeOp) and isinstance(op.op, Gemm))
        or (isinstance(op, CommOp) and f"{op.collective} of {op.group}" not in left)
    ]


def test_what_is_written_is_read_back(generated: Workload, tmp_path: Path) -> None:
    for stage in {0, len(generated.stages) - 1}:
        text = text_of(generated, stage=stage)
        again = read(tmp_path, text)
        assert [meaning(op, again) for op in again.expand()] == carried(generated, stage)
        assert text_of(again) == text
        assert again.world_size <= generated.world_size


@pytest.mark.parametrize(("chunks", "wrapped"), [(1, 0), (2, 12), (4, 36)])
def test_transfers_of_two_stages_are_in_the_pipelines_group(
    chunks: int, wrapped: int, tmp_path: Path
) -> None:
    """Twelve micro-batches: each chunk but the last of a pass sends to the next stage.

    Interleaved, every other chunk's next stage is the first one again.
    """
    vpp = {"virtual_pipeline_model_parallel_size": chunks}
    workload = megatron(tp=2, dp_shard=2, pp=2, gbs=24, settings=vpp)
    for stage in (0, 1):
        text = text_of(workload, stage=stage)
        ways = Counter(row["additional"] for row in csv.DictReader(io.StringIO(text)))
        near, far = (("next", "prev"), ("prev", "next"))[stage]
        for kind in ("isend", "irecv"):
            words = kind[1:]
            assert ways[f"{words}_{near}"] == 12 * chunks
            assert ways[f"{words}_{far}"] == wrapped
        assert not any("send" in line for line in losses(workload, aicb.kept, [stage]))
        assert any("second group" in line for line in aicb.omissions(workload, [stage])) is (
            chunks > 1
        )
        notes = read(tmp_path, text).notes
        assert any("two interleaved stages" in note for note in notes) is (chunks > 1)


def test_forward_and_backward_are_told_apart(generated: Workload, tmp_path: Path) -> None:
    again = read(tmp_path, text_of(generated))
    for phase in (Phase.FWD, Phase.DGRAD, Phase.WGRAD):
        products = [
            [
                meaning(op, one)
                for op in one.expand()
                if isinstance(op, ComputeOp) and isinstance(op.op, Gemm) and op.phase is phase
            ]
            for one in (generated, again)
        ]
        assert products[0] == products[1] != []


def test_aicb_can_read_what_is_written(generated: Workload) -> None:
    """As visualize/generate.py of AICB does: csv, enumerations by name, one line dropped."""
    rows = list(csv.reader(io.StringIO(text_of(generated))))
    assert ",".join(rows[0]) == HEADER
    kinds = []
    for row in rows[2:]:
        assert len(row) == 12
        named = dict(zip(rows[0], row, strict=True))
        kinds.append(named["comm_type"].removeprefix("CommType."))
        assert kinds[-1] in TYPES
        if named["comm_group"] != "None":
            assert named["comm_group"].removeprefix("CommGroup.") in GROUPS
        for name in ("comm_group_size", "dst", "src"):
            assert named[name] == "None" or int(named[name]) >= 0
        assert float(named["count"]) == 1
        if kinds[-1] == "computation":
            assert "," not in named["msg_size"]
        else:
            assert float(named["msg_size"]) >= 0
    # AICB takes what is before the first of these for set-up, and needs one more behind.
    assert kinds.count("epoch_end") == 2
    assert kinds[-1] == "epoch_end"


def test_a_step_without_computation_has_the_same_messages(generated: Workload) -> None:
    lines = text_of(generated).splitlines()
    bare = text_of(generated, computation=False).splitlines()
    assert bare == [one for one in lines if not one.startswith("CommType.computation")]
    assert len(bare) < len(lines)


LARGE: dict[str, dict[str, Any]] = {
    "one stage": {"gbs": 512},
    "interleaved": {
        **{"pp": 8, "gbs": 2048},
        "settings": {"virtual_pipeline_model_parallel_size": 4},
    },
}


@pytest.mark.parametrize("job", LARGE)
def test_long_steps_are_written_fast_and_in_small_pieces(job: str) -> None:
    """GPT-175B, 96 layers: 20 times the 43,900 lines per second of AICB's generator."""
    asked = dict(LARGE[job])
    settings = {"sequence_parallel": True, **asked.pop("settings", {})}
    began = time.process_time()
    workload = megatron("gpt-175b", tp=8, settings=settings, **asked)
    lines = sum(piece.count("\n") for piece in aicb.write(workload))
    seconds = time.process_time() - began
    assert lines > 500_000
    assert lines / seconds > 20 * 43_900
    tracemalloc.start()
    try:
        for _ in aicb.write(workload):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20


FRAMEWORKS = {
    "fsdp": {"all_gather", "reduce_scatter"},
    "ddp": {"all_reduce"},
    "tp": {"all_gather", "reduce_scatter"},
    "deepspeed": {"all_gather", "reduce_scatter"},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_framework_loses_its_messages(framework: str) -> None:
    spread = {"tp": 4, "world_size": 4} if framework == "tp" else {"world_size": 8}
    more = {"stage": 3} if framework == "deepspeed" else {}
    workload = generate(
        options_class(framework)(
            **{"framework": framework, "model": "llama-3-8b", **spread, **more}
        )
    )
    assert framework in RULES
    text = text_of(workload)
    for collective in FRAMEWORKS[framework]:
        ours = sum(
            1
            for op in workload.expand()
            if isinstance(op, CommOp) and op.collective == collective
        )
        body = text.partition("epoch_end")[2]
        assert body.count(f"CommType.{collective},") == ours > 0
    assert not [one for one in losses(workload, aicb.kept, [0]) if one.startswith("all_")]


def test_what_has_no_line_is_named() -> None:
    workload = megatron(**GENERATED["pipeline"])
    lost = "\n".join(not_held(aicb, workload))
    assert "all_reduce of mp: " in lost
    assert " computations (attention.core): only matrix" in lost
    uneven = aicb.omissions(megatron(**GENERATED["experts"]))
    assert any("all_to_all_v" in one for one in uneven)


def test_a_transfer_goes_to_a_neighbour() -> None:
    """3 stages, and the first one's gradients come from 1 ahead; 2 ahead is 1 before."""
    text = text_of(pipeline(stages=3), stage=1)
    ways = Counter(line.split(",")[7] for line in text.splitlines() if "pp_group" in line)
    assert ways == dict.fromkeys(("recv_prev", "send_next", "recv_next", "send_prev"), 3)
    far = passed_on("send", Phase.FWD, 2)
    workload = pipeline(stages=4)
    workload = replace(workload, blocks={**workload.blocks, "fwd 0": (far,)})
    stated = "send of pp: 18 messages, 72 KiB; in the file 15 messages, 60 KiB"
    assert losses(workload, aicb.kept, range(4)) == [stated]
    assert "send_next" not in text_of(workload).partition("forward_step")[0]


def test_groups_of_one_name_and_two_sizes_stay_two(tmp_path: Path) -> None:
    workload = megatron(**GENERATED["instances"])
    assert workload.groups["instances"].size == 2
    again = read(tmp_path, text_of(workload))
    sizes = {name: group.size for name, group in again.groups.items()}
    assert (sizes["dp"], sizes["dp_4"], sizes["dp_2"]) == (8, 4, 2)


def test_groups_are_known_by_name_or_by_their_ranks() -> None:
    digits = {
        **{"tp": ((2, 1),), "dp": ((4, 2),), "cp": ((2, 4),)},
        **{"same as tp": ((1, 4), (2, 1)), "same as dp": ((2, 2), (2, 4))},
        **{"everybody": ((2, 1), (4, 2)), "dp in another order": ((2, 4), (2, 2))},
    }
    groups = {name: Group(digits=one) for name, one in digits.items()}
    assert group_names(replace(pipeline(), world_size=8, groups=groups)) == {
        **{"tp": "tp_group", "dp": "dp_group", "everybody": "all"},
        **{"same as tp": "tp_group", "same as dp": "dp_group"},
    }


def test_what_is_recomputed_is_backward() -> None:
    workload = megatron(tp=2, gbs=1, settings={"recompute_granularity": Granularity.FULL})
    rows = [line.split(",") for line in text_of(workload, computation=False).splitlines()]
    sums = Counter(row[4] for row in rows if row[0].endswith("all_reduce"))
    assert sums["forward.MegatronRowLinear"] == 2 * 40
    assert sums["backward.MegatronRowLinear"] == 2 * 40


def test_every_collective_has_a_type_or_is_named() -> None:
    send = passed_on("send", Phase.FWD, 1)
    workload = pipeline(stages=1)
    for kind in Collective:
        op = replace(send, collective=str(kind), peer=None, group="tp")
        alone = replace(workload, blocks={**workload.blocks, "step 0": (op,)})
        rows = text_of(alone).splitlines()[3:-1]
        if kind.removesuffix("_v") not in TYPES:
            assert rows == []
            assert losses(alone, aicb.kept, [0])[0].startswith(f"{kind} of tp: 1 message")
        else:
            (row,) = rows
            assert row.startswith(f"CommType.{kind.removesuffix('_v')},CommGroup.tp_group,2,")
            assert row.split(",")[3] == str(op.message_bytes(workload.groups["tp"]))
