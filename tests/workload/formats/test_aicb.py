"""Real files come back byte for byte; what is written says what the workload does."""

import csv
import io
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.workload_job import generate
from stepmark.core.collectives import Collective
from stepmark.core.errors import ConfigError
from stepmark.core.ops import Gemm, Phase
from stepmark.core.workload import CommOp, ComputeOp, Group, Operation, Run, Workload
from stepmark.workload.formats import aicb, native
from stepmark.workload.rules import RULES

from ..mutations import only_config_errors
from .aicb_samples import DATA, MOCKED, broken, content, megatron, name_of
from .hand_made import passed_on, pipeline

HEADER = (
    "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,"
    "_elapsed_time,algbw,busbw,count"
)
SUM = "CommType.all_reduce,CommGroup.tp_group,2,64,forward.MoE,None,None,,None,None,None,1"
END = "CommType.epoch_end,None,None,0,,None,None,,None,None,None,1"
LOG = DATA / "a100_log.csv.gz"
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


def read(tmp_path: Path, text: str | bytes, **more: Any) -> Workload:
    path = tmp_path / "workload.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return aicb.read(path, **more)


@pytest.mark.parametrize("path", MOCKED, ids=name_of)
def test_a_file_comes_back_byte_for_byte(path: Path) -> None:
    workload = aicb.read(path)
    through = native.decode(native.encode(workload))
    assert through == workload
    assert text_of(through).encode() == content(path)
    assert aicb.lost(workload) == []


@pytest.mark.parametrize("path", MOCKED, ids=name_of)
def test_operations_say_what_the_lines_say(path: Path) -> None:
    workload = aicb.read(path)
    rows = list(csv.DictReader(io.StringIO(content(path).decode())))
    ops = [*workload.expand(setup=True), *workload.expand()]
    rows = [row for row in rows if row["comm_type"] != "CommType.epoch_end"]
    assert len(rows) == len(ops)
    for row, op in zip(rows, ops, strict=True):
        assert op.module == row["stage"]
        if isinstance(op, ComputeOp):
            assert isinstance(op.op, Gemm)
            assert op.op.flops == 2 * math.prod(_dimensions(row["msg_size"]))
            continue
        group, num_bytes = workload.groups[op.group], int(row["msg_size"])
        assert row["comm_type"].startswith(f"CommType.{op.collective}") or op.peer
        if op.peer is None:
            assert group.size == int(row["comm_group_size"])
        # A size that its ranks do not divide is rounded up to one that they do.
        assert 0 <= op.message_bytes(group) - num_bytes < group.size
        assert str(op.root) == (row["src"] if row["src"] != "None" else row["dst"])


def _dimensions(shapes: str) -> list[int]:
    """((2048 1 5120) (5120 7680)): the inner one once."""
    first, second = shapes[2:-2].split(") (")
    return [*map(int, first.split()), int(second.split()[1])]


@pytest.mark.parametrize("path", MOCKED, ids=name_of)
def test_repeats_are_found(path: Path) -> None:
    """As many blocks and operations as a micro-batch has kinds of lines."""
    workload = aicb.read(path)
    kinds = len(set(content(path).splitlines()))
    held = sum(len(block) for block in workload.blocks.values())
    assert held < 4 * kinds + 100
    expected = 96 if "gpt175b" in str(path) else {"13b_tp2": 4, "b_tp4": 8, "13b_tp8": 2}
    if isinstance(expected, dict):
        found = [many for part, many in expected.items() if part in path.parent.name]
        expected = found[0] if found else 1
    assert workload.num_microbatches == expected


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


def carried(workload: Workload, stage: int = 0) -> list[tuple[object, ...]]:
    """What of a generated workload has lines: products, and all but some small sums."""
    return [
        meaning(op, workload)
        for op in workload.expand(stage)
        if (isinstance(op, ComputeOp) and isinstance(op.op, Gemm))
        or (isinstance(op, CommOp) and op.group != "mp")
    ]


def test_what_is_written_is_read_back(generated: Workload, tmp_path: Path) -> None:
    for stage in range(len(generated.stages)):
        text = text_of(generated, stage=stage)
        again = read(tmp_path, text)
        found = [meaning(op, again) for op in again.expand()]
        if generated.groups["pp"].size > 1:
            assert found == carried(generated, stage)
        else:  # without a pipeline the model-parallel ranks are the tensor-parallel ones
            assert [one for one in found if one not in _small(generated)] == [
                one for one in carried(generated) if one not in _small(generated)
            ]
        assert text_of(again) == text
        assert again.world_size <= generated.world_size


def _small(workload: Workload) -> list[tuple[object, ...]]:
    group = workload.groups["mp"]
    return [("all_reduce", group.size, 4, None, None)]


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
    workload = generate({"framework": framework, "model": "llama-3-8b", **spread, **more})
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
    assert not [one for one in aicb.lost(workload) if one.startswith("left out: all_")]


def test_what_has_no_line_is_named() -> None:
    workload = megatron(**GENERATED["pipeline"])
    lost = "\n".join(aicb.lost(workload))
    assert "left out: all_reduce of mp" in lost
    assert "left out: attention (attention.core)" in lost
    assert "stages: one is written" in lost
    uneven = aicb.lost(megatron(**GENERATED["experts"]))
    assert any("all_to_all_v" in one for one in uneven)


def test_a_transfer_goes_to_a_neighbour() -> None:
    """3 stages, and the first one's gradients come from 1 ahead; 2 ahead is 1 before."""
    text = text_of(pipeline(stages=3), stage=1)
    ways = Counter(line.split(",")[7] for line in text.splitlines() if "pp_group" in line)
    assert ways == dict.fromkeys(("recv_prev", "send_next", "recv_next", "send_prev"), 3)
    far = passed_on("send", Phase.FWD, 2)
    workload = pipeline(stages=4)
    workload = replace(workload, blocks={**workload.blocks, "fwd 0": (far,)})
    assert "left out: send of pp" in aicb.lost(workload)
    assert "send_next" not in text_of(workload).partition("forward_step")[0]


def test_groups_of_one_name_and_two_sizes_stay_two(tmp_path: Path) -> None:
    workload = megatron(**GENERATED["instances"])
    assert workload.groups["instances"].size == 2
    again = read(tmp_path, text_of(workload))
    sizes = {name: group.size for name, group in again.groups.items()}
    assert (sizes["dp"], sizes["dp_4"], sizes["dp_2"]) == (8, 4, 2)


def test_a_log_is_one_step_of_median_times() -> None:
    rows = list(csv.DictReader(io.StringIO(content(LOG).decode())))
    ends = [index for index, row in enumerate(rows) if row["comm_type"].endswith("epoch_end")]
    first, second = rows[ends[0] + 1 : ends[1]], rows[ends[1] + 1 : ends[2]]
    workload = aicb.read(LOG, group_sizes={"ep": 4})
    for op, one, two in zip(workload.expand(), first, second, strict=True):
        wanted = (float(one["_elapsed_time"]) + float(two["_elapsed_time"])) / 2
        assert op.time_s is not None
        assert math.isclose(op.time_s, wanted * 1e-3)
    assert "medians of 2 iterations" in " ".join(workload.notes)
    assert aicb.lost(workload) == ["times: a workload of AICB has none, only its log of a run"]
    written = [line.split(",")[:8] for line in text_of(workload).splitlines()[1:]]
    kept = [list(row.values())[:8] for row in rows[: ends[1] + 1]]
    for ours, theirs in zip(written, kept, strict=True):
        # AICB's logs leave out the size of an expert group.
        assert ours[0:2] + ours[4:] == theirs[0:2] + theirs[4:]


def test_a_group_without_a_size_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"line 18, comm_group_size.*size of ep_group"):
        aicb.read(LOG)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "AICB workload: 'empty'|line 1"),
        (f"{HEADER}\n", "epoch_end at the end"),
        (f"{HEADER}\n{END}\n{SUM}\n", "line 3: .*epoch_end at the end"),
        (f"{HEADER},more\n{END}\n", "line 1: "),
        (f"{HEADER}\r\n{SUM}\r\n{END}\r\n", "line 1: 'CRLF'"),
        (
            f"{HEADER}\n{SUM}\n{SUM.replace('all_reduce', 'all_sum')}\n{END}\n",
            r"line 3, comm_type: 'CommType.all_sum': CommType. and one of all_reduce, isend",
        ),
        (f"{HEADER}\n{SUM.replace('CommType.', '')}\n{END}\n", "line 2, comm_type"),
        (
            f"{HEADER}\n{SUM.replace('tp_group', 'cp_group')}\n{END}\n",
            r"line 2, comm_group: 'CommGroup.cp_group': CommGroup. and one of tp_group",
        ),
        (f"{HEADER}\n{SUM.replace(',64,', ',6x4,')}\n{END}\n", "line 2, msg_size: '6x4'"),
        (f"{HEADER}\n{SUM.replace(',64,', ',nan,')}\n{END}\n", "line 2, msg_size: 'nan'"),
        (f"{HEADER}\n{SUM.replace(',64,', ',-64,')}\n{END}\n", "line 2, msg_size: '-64'"),
        (f"{HEADER}\n{SUM.replace(',2,', ',0,')}\n{END}\n", "line 2, comm_group_size: '0'"),
        (f"{HEADER}\n{SUM.replace(',None,', ',0x0,', 1)}\n{END}\n", "line 2, dst: '0x0'"),
        (f"{HEADER}\n{SUM},1\n{END}\n", "line 2: '13 columns': 12 columns"),
        (
            f"{HEADER}\n{SUM.replace('forward.MoE', chr(34) + 'a,b' + chr(34))}\n{END}\n",
            "line 2",
        ),
        (
            f"{HEADER}\n{SUM.replace('all_reduce', 'isend')}\n{END}\n",
            "line 2, additional: '': send_next, send_prev",
        ),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1


def test_any_broken_file_is_one_line_or_comes_back(tmp_path: Path) -> None:
    path = next(path for path in MOCKED if path.suffix == ".csv")
    data = b"\n".join(content(path).split(b"\n")[:30]) + b"\n" + END.encode() + b"\n"

    def there_and_back(path: Path) -> None:
        assert text_of(aicb.read(path)).encode() == path.read_bytes()

    target = tmp_path / "workload.csv"
    good, bad = only_config_errors(there_and_back, broken(data, 600, seed=5), target)
    assert good > 100
    assert bad > 100


def test_iterations_of_a_log_that_differ_are_refused(tmp_path: Path) -> None:
    timed = SUM.replace(",None,None,None,1", ",0.5,1.0,1.0,1")
    other = timed.replace(",64,", ",65,")
    text = "\n".join([HEADER, timed, END, timed, END, other, END, ""])
    with pytest.raises(ConfigError, match="iterations: '2': ones of the same operations"):
        read(tmp_path, text)


def test_iterations_that_differ_are_one_step(tmp_path: Path) -> None:
    other = SUM.replace(",64,", ",128,")
    text = "\n".join([HEADER, SUM, END, SUM, END, other, other, END, SUM, END, ""])
    workload = read(tmp_path, text)
    sizes = [op.message_bytes(Group(digits=((2, 1),))) for op in _sums(workload)]
    assert sizes == [64, 128, 128, 64]
    assert text_of(workload) == text
    assert "3 iterations of the file, which differ" in " ".join(workload.notes)


def _sums(workload: Workload, stage: int = 0) -> list[CommOp]:
    return [op for op in workload.expand(stage) if isinstance(op, CommOp)]


def test_stages_of_older_files_are_stages(tmp_path: Path) -> None:
    """Files of 2024 have a block for each stage under a line in brackets."""
    parts = [
        f"[ pp_stage{stage}: [rank{stage}] ]\n{HEADER}\n{SUM}\n{END}\n{SUM}\n"
        f"{SUM.replace('64', str(128 + stage))}\n{END}\n"
        for stage in range(2)
    ]
    workload = read(tmp_path, "".join(parts))
    assert len(workload.stages) == 2
    sizes = [
        [op.message_bytes(workload.groups["tp"]) for op in workload.expand(stage)]
        for stage in range(2)
    ]
    assert sizes == [[64, 128], [64, 129]]
    assert text_of(workload) == "".join(parts)


@pytest.mark.parametrize("origin", [3, {"end": 1}, {"end": "", "sections": [], "lines": []}])
def test_a_broken_origin_is_one_line(origin: object) -> None:
    workload = replace(aicb.read(MOCKED[0]), origin={"aicb": origin})
    with pytest.raises(ConfigError, match=r"origin\.aicb"):
        text_of(workload)
    lost = {"end": "", "lines": {}, "ends": {}}
    gone = {**lost, "sections": [{"before": "", "epochs": ["nowhere"]}]}
    with pytest.raises(ConfigError, match="one of the blocks"):
        text_of(replace(workload, origin={"aicb": gone}))


def test_every_collective_has_a_type_or_is_named() -> None:
    send = passed_on("send", Phase.FWD, 1)
    workload = pipeline(stages=1)
    for kind in Collective:
        op = replace(send, collective=str(kind), peer=None, group="tp")
        alone = replace(workload, blocks={**workload.blocks, "step 0": (op,)})
        rows = text_of(alone).splitlines()[3:-1]
        if kind in ("gather", "scatter", "multicast", "incast"):
            assert rows == []
            assert f"left out: {kind} of tp" in aicb.lost(alone)
        else:
            (row,) = rows
            assert row.startswith(f"CommType.{kind.removesuffix('_v')},CommGroup.tp_group,2,")
            assert row.split(",")[3] == str(op.message_bytes(workload.groups["tp"]))
