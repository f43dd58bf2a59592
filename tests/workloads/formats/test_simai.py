"""Real files come back byte for byte; what is generated sends what the workload sends."""

import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.workloads.mutations import only_config_errors

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Phase
from stepmark.step import native
from stepmark.step.workload import Block, CommOp, ComputeOp, Group, Workload
from stepmark.workloads.formats import aicb, simai, simai_rows
from stepmark.workloads.formats.loss import losses
from stepmark.workloads.formats.simai_rows import TYPE_OF, Cell, Row, blocks_of, row_of
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_flags import options_class

from .aicb_samples import DATA, SIMAI, broken, content, megatron, name_of
from .hand_made import not_held

HEADER = (
    "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 2 pp: 1 vpp: 1 ga: 1 "
    "all_gpus: 8 checkpoints: 0 checkpoint_initiates: 0 pp_comm: 0"
)
ROW = "attention_layer\t-1\t5\tALLREDUCE\t64\t6\tALLREDUCE\t64\t7\tREDUCESCATTER\t80\t100"
Rows = list[list[str]]


def text_of(workload: Workload) -> str:
    return "".join(simai.write(workload))


def rows_of(text: str) -> Rows:
    lines = text.splitlines()
    assert int(lines[1]) == len(lines) - 2
    return [line.split() for line in lines[2:]]


def sums_of(rows: Rows) -> Counter[tuple[str, str]]:
    """Bytes by type with suffix, those of the third column with DP in front."""
    found: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for first in (2, 5, 8):
            if row[first + 1] != "NONE":
                place = "DP" if first == 8 and "_" not in row[first + 1] else ""
                found[place, row[first + 1]] += int(row[first + 2])
    return found


def read(tmp_path: Path, text: str | bytes) -> Workload:
    path = tmp_path / "workload.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return simai.read(path)


@pytest.mark.parametrize("path", SIMAI, ids=name_of)
def test_a_file_comes_back_byte_for_byte(path: Path) -> None:
    workload = simai.read(path)
    workload.check()
    through = native.decode(native.encode(workload))
    assert through == workload
    assert text_of(through).encode() == content(path)
    assert simai.omissions(workload) == []


@pytest.mark.parametrize("path", SIMAI, ids=name_of)
def test_operations_send_and_compute_what_the_rows_say(path: Path) -> None:
    workload = simai.read(path)
    rows = rows_of(content(path).decode())
    sent: Counter[tuple[str, str]] = Counter()
    computed = 0
    for op in workload.expand():
        if isinstance(op, ComputeOp):
            assert op.time_s is not None
            computed += round(op.time_s * 1e9)
            continue
        suffix = {"tp": "", "dp": "", "ep": "_EP", "dp_ep": "_DP_EP"}[op.group]
        key = ("DP" if op.group == "dp" else "", TYPE_OF[op.collective] + suffix)
        sent[key] += op.message_bytes(workload.groups[op.group])
    assert computed == sum(int(row[place]) for row in rows for place in (2, 5, 8))
    # A size that its ranks do not divide is rounded up to one that they do.
    written = sums_of(rows)
    assert sent.keys() == written.keys()
    for key, num_bytes in written.items():
        assert 0 <= sent[key] - num_bytes < workload.world_size * len(rows)


@pytest.mark.parametrize("path", SIMAI, ids=name_of)
def test_what_aicb_leaves_out_of_the_backward_pass_is_told(path: Path) -> None:
    """AICB's own files of the same job without AIOB have these all-reduces."""
    is_lacking = "aiob_example" in path.name and "_sp" not in path.parent.name
    notes = " ".join(simai.read(path).notes)
    assert ("no row has an all-reduce of input gradients" in notes) == is_lacking


def test_micro_batches_and_layers_are_found(tmp_path: Path) -> None:
    """96 micro-batches of 12 layers, forward and then back from the last."""
    (path,) = (one for one in SIMAI if "gpt175b" in str(one) and "aiob_ex" in str(one))
    workload = simai.read(path)
    assert workload.num_microbatches == 96
    ops = [op for op in workload.expand() if op.module == "attention_row"]
    places = [
        (op.microbatch, op.layer)
        for op in ops
        if isinstance(op, ComputeOp) and op.phase in ("fwd", "dgrad")
    ]
    forward = [(microbatch, layer) for microbatch in range(96) for layer in range(12)]
    assert places == forward + forward[::-1]


def test_a_file_of_many_micro_batches_is_small(tmp_path: Path) -> None:
    (path,) = (one for one in SIMAI if "13b_tp8" in str(one) and "aiob_ex" in str(one))
    header, _, *rows = content(path).decode().splitlines()
    cut = [index for index, row in enumerate(rows) if row.startswith("embedding_layer")]
    body = rows[cut[0] : cut[1]]
    sizes = []
    for times in (2, 512):
        many = rows[: cut[0]] + body * times + rows[cut[1] + len(body) :]
        text = "\n".join([header, str(len(many)), *many]) + "\n"
        began = time.process_time()
        workload = read(tmp_path, text)
        assert time.process_time() - began < 2
        assert workload.num_microbatches == times
        assert text_of(workload) == text
        sizes.append(len(native.encode(workload)))
    assert sizes[1] - sizes[0] < 100


def test_what_changed_since_is_written_and_the_rest_as_it_was(tmp_path: Path) -> None:
    row = ROW.replace("100", "7").replace("\t64\t6", "\t63\t6")
    workload = read(tmp_path, f"{HEADER}\n2\n{row}\n{ROW}\n")
    blocks = {
        name: tuple(
            replace(op, time_s=9e-9) if isinstance(op, ComputeOp) and op.phase == "fwd" else op
            for op in block
        )
        for name, block in workload.blocks.items()
    }
    again = rows_of(text_of(replace(workload, blocks=blocks)))
    assert again == [row.replace("5", "9", 1).split(), ROW.replace("5", "9", 1).split()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lines 0 is invalid"),
        (
            f"{HEADER}\n2\n{ROW}\n",
            "line 2: '2' is invalid: it must be the number of rows that follow, 1",
        ),
        (f"{HEADER}\nx\n{ROW}\n", "line 2: 'x'"),
        (f"{HEADER}\n1\n{ROW}\n\n", "line 2"),
        (f"{HEADER}\n1\n{ROW}\t1\n", "line 3: '13 fields' is invalid: it must be 12 fields"),
        (
            f"{HEADER}\n1\n{ROW.replace('ALLREDUCE', 'ALLSUM', 1)}\n",
            "line 3, field 4: 'ALLSUM'",
        ),
        (
            f"{HEADER}\n1\n{ROW.replace('ALLREDUCE', 'ALLREDUCE_PP', 1)}\n",
            "field 4: 'ALLREDUCE_",
        ),
        (f"{HEADER}\n1\n{ROW.replace('5', 'five', 1)}\n", "line 3, field 3: 'five'"),
        (f"{HEADER}\n1\n{ROW.replace('5', '-5', 1)}\n", "0 or more"),
        (f"{HEADER}\n1\n{ROW.replace('5', '1e3', 1)}\n", "whole number"),
        (
            f"{HEADER.replace('8', '7')}\n1\n{ROW}\n",
            "all_gpus: '7' is invalid: it must be a multiple of 2",
        ),
        (f"{HEADER.replace('all_gpus: 8', '')}\n1\n{ROW}\n", "all_gpus is missing"),
        (f"{HEADER.replace('2', 'two')}\n1\n{ROW}\n", "model_parallel_NPU_group"),
        (f"{HEADER.replace('FWD_IN', 'BWD_IN')}\n1\n{ROW}\n", "one of HYBRID_TRANSFORMER_FWD"),
        (
            f"{HEADER.replace('ep: 2', 'ep: 3')}\n1\n"
            f"{ROW.replace('ALLREDUCE', 'ALLTOALL_EP', 1)}\n",
            "line 3: 'ALLTOALL_EP'",
        ),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(str(tmp_path))


def test_any_broken_file_is_one_line_or_comes_back(tmp_path: Path) -> None:
    lines = content(SIMAI[0]).split(b"\n")[:50]
    data = b"\n".join([lines[0], b"48", *lines[2:]])

    def there_and_back(path: Path) -> None:
        assert text_of(simai.read(path)).encode() == path.read_bytes()

    path = tmp_path / "workload.txt"
    good, bad = only_config_errors(there_and_back, broken(data, 250, seed=3), path)
    assert good > 20
    assert bad > 60


@pytest.mark.parametrize("origin", [3, {"header": 1}, {**dict.fromkeys("abc", "")}])
def test_a_broken_origin_is_one_line(origin: object) -> None:
    workload = replace(simai.read(SIMAI[0]), origin={"simai": origin})
    with pytest.raises(ConfigError, match=r"origin\.simai"):
        text_of(workload)


JOBS: dict[str, dict[str, Any]] = {
    "plain": {"tp": 2, "dp_shard": 2, "gbs": 8},
    "sequence": {
        **{"tp": 8, "dp_shard": 2, "pp": 4, "gbs": 16},
        "settings": {"sequence_parallel": True, "use_distributed_optimizer": True},
    },
    "experts": {
        **{"model": "mixtral-8x7b", "tp": 2, "ep": 4, "dp_shard": 8, "gbs": 16},
        "settings": {"sequence_parallel": True, "use_distributed_optimizer": True},
    },
}


def suffix_of(name: str, workload: Workload) -> tuple[str, str] | None:
    """By name, or by being the same ranks; with DP in front of data-parallel ones."""
    suffixes = {
        **{"tp": ("", ""), "ep": ("", "_EP")},
        **dict.fromkeys(("dp_cp", "intra_dp_cp"), ("DP", "")),
        **dict.fromkeys(("expt_dp", "intra_expt_dp"), ("", "_DP_EP")),
    }
    if name in suffixes:
        return suffixes[name]
    members = workload.groups[name].members(0)
    same = [one for one in suffixes if one in workload.groups]
    found = [one for one in same if workload.groups[one].members(0) == members]
    return suffixes[found[0]] if found else None


@pytest.mark.parametrize("job", JOBS)
def test_a_generated_file_sends_what_the_workload_sends(job: str) -> None:
    workload = megatron(**JOBS[job])
    rows = rows_of(text_of(workload))
    sent: Counter[tuple[str, str]] = Counter()
    computed = 0
    for op, times in workload.tally().items():
        if isinstance(op, ComputeOp):
            assert op.time_s is not None
            computed += times * round(op.time_s * 1e9)
    for op in workload.expand():
        if not isinstance(op, CommOp) or op.collective in ("broadcast", "send", "recv"):
            continue
        key = suffix_of(op.group, workload)
        if key is not None:
            sent[key[0], TYPE_OF[op.collective] + key[1]] += op.message_bytes(
                workload.groups[op.group]
            )
    assert sums_of(rows) == sent
    assert sum(int(row[place]) for row in rows for place in (2, 5, 8)) == computed


def test_a_generated_file_has_the_rows_of_aicb(tmp_path: Path) -> None:
    """GPT-13B of AICB's sample: names, order and sizes of a micro-batch where AICB is right."""
    (path,) = (one for one in SIMAI if "gpt13b_tp2" in str(one) and "no_aiob" in str(one))
    theirs = rows_of(content(path).decode())
    ours = rows_of(text_of(megatron(tp=2, dp_shard=1024, gbs=4096)))
    both = []
    for rows in (theirs, ours):
        start = [row[0] for row in rows].index("embedding_layer")
        both.append(rows[start : start + 81])
    assert [row[0] for row in both[0]] == [row[0] for row in both[1]]
    for there, here in zip(both[0][1:], both[1][1:], strict=True):
        assert [there[place] for place in (3, 4, 6, 7)] == [
            here[place] for place in (3, 4, 6, 7)
        ]
    assert [row[3:5] for row in theirs if row[0] == "cross_entropy1"] == [["ALLREDUCE", "8192"]]
    assert [row[3:5] for row in ours if row[0] == "cross_entropy1"] == [
        ["ALLREDUCE", "8192"]
    ] * 4


@pytest.mark.parametrize("framework", ["fsdp", "ddp", "deepspeed"])
def test_no_framework_loses_its_messages(framework: str) -> None:
    workload = generate(
        options_class(framework)(framework=framework, model="llama-3-8b", world_size=8)
    )
    workload = replace(workload, blocks=timed(workload))
    sent: Counter[tuple[str, str]] = Counter()
    for op, times in workload.tally().items():
        if isinstance(op, CommOp) and op.collective in TYPE_OF:
            size = op.message_bytes(workload.groups[op.group])
            sent["DP", TYPE_OF[op.collective]] += times * size
    rows = rows_of(text_of(workload))
    assert sums_of(rows) == sent
    assert sent
    for line in losses(workload, simai.kept, [0]):  # summed over buckets, of the same bytes
        size = re.fullmatch(r".*: \d+ messages, (.*); in the file \d messages?, (.*)", line)
        assert size or " before the first step: " in line
        assert not size or size[1] == size[2]


def timed(workload: Workload) -> dict[str, Block]:
    return {
        name: tuple(
            replace(item, time_s=1e-6) if isinstance(item, ComputeOp) else item
            for item in block
        )
        for name, block in workload.blocks.items()
    }


def test_a_generated_file_is_read_back_with_its_places(tmp_path: Path) -> None:
    workload = megatron(**JOBS["sequence"])
    again = read(tmp_path, text_of(workload))
    assert again.num_microbatches == workload.num_microbatches == 8
    layers = {op.layer for op in again.expand() if op.module == "attention_row"}
    assert layers == set(range(10))
    assert text_of(again) == text_of(workload)
    lost = "\n".join(not_held(simai, workload))
    assert "pipeline" in lost
    assert "all_reduce of mp" in lost


def test_a_message_before_computation_keeps_its_bytes() -> None:
    groups = {"tp": Group(digits=((4, 1),))}
    row = Row(name="mlp", fwd=Cell(compute_ns=5, comm="ALLREDUCE", num_bytes=64))
    fwd, bwd = blocks_of(row, groups, "line 1", layers=False, microbatches=False)
    assert row_of("mlp", fwd, bwd, groups) == row_of("mlp", fwd[::-1], bwd, groups) == row


def test_an_unknown_time_is_not_zero() -> None:
    workload = megatron(tp=2, gbs=1, time_s=None)
    with pytest.raises(ConfigError, match=r"attention\.core bwd"):
        text_of(workload)


def test_a_csv_of_one_stage_is_refused() -> None:
    """Line 1 would say pp 1 and count the ranks of all stages as data-parallel."""
    stage = aicb.read(next(DATA.glob("gpt175b_tp8*/mocked_comp.csv.gz")))
    with pytest.raises(ConfigError, match="one of 8 stages"):
        simai.check(stage)
    simai.check(aicb.read(next(DATA.glob("tutorial_gpt13b*/mocked.csv"))))


def test_backward_messages_of_a_csv_stand_in_backward_columns() -> None:
    """Its operations have no micro-batch, so that all are rows of the step."""
    source = aicb.read(next(DATA.glob("tutorial_gpt13b*/mocked.csv")))
    wanted = Counter(
        "backward" if op.phase is Phase.BWD else "forward"
        for op in source.expand(0)
        if isinstance(op, CommOp) and op.group == "tp" and op.collective == "all_reduce"
    )
    _, _, rows = simai_rows.rows(source, 0)
    columns: Counter[str] = Counter()
    for row in rows:
        columns["forward"] += row.fwd.comm == "ALLREDUCE"
        columns["backward"] += row.dgrad.comm == "ALLREDUCE"
    assert columns == wanted
    assert columns["backward"] > 100
    assert "the order of layers" in " ".join(simai.omissions(source))


@pytest.mark.parametrize(
    ("framework", "model", "axes"),
    [
        ("megatron", "deepseek-v2-lite", {"tp": 2, "sequence_parallel": True}),
        ("fsdp", "qwen3-8b", {"tp": 2, "pp": 2, "reshard_after_forward": "yes"}),
        ("megatron", "llama-3.1-8b", {"tp": 2, "cp": 2}),
    ],
)
def test_a_layer_of_several_rows_is_one(
    tmp_path: Path, framework: str, model: str, axes: dict[str, Any]
) -> None:
    """Neither a second message of an attention nor the sum of a norm's gradients is a layer."""
    ranks = {"world_size": 8, "gbs": 16, "num_layers": 4, "scale": "tiny"}
    options = options_class(framework)(framework=framework, model=model, **ranks, **axes)
    workload = generate(options)
    timed = replace(
        workload,
        blocks={
            name: tuple(
                replace(item, time_s=1e-9) if isinstance(item, ComputeOp) else item
                for item in block
            )
            for name, block in workload.blocks.items()
        },
    )
    again = read(tmp_path, text_of(timed))
    assert again.stages[0].layers == tuple(range(len(workload.stages[0].layers)))
    assert again.num_microbatches == workload.num_microbatches
