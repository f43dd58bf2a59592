"""Real files come back byte for byte; what is written says what the workload does."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.workloads.mutations import only_config_errors

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Gemm
from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Group, Workload
from stepmark.workloads.formats import aicb

from .aicb_samples import DATA, MOCKED, broken, content, name_of

HEADER = (
    "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,"
    "_elapsed_time,algbw,busbw,count"
)
SUM = "CommType.all_reduce,CommGroup.tp_group,2,64,forward.MoE,None,None,,None,None,None,1"
END = "CommType.epoch_end,None,None,0,,None,None,,None,None,None,1"
LOG = DATA / "a100_log.csv.gz"


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
    assert aicb.omissions(workload) == []


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
    assert aicb.omissions(workload) == [
        "times: a workload of AICB has none, only its log of a run"
    ]
    written = [line.split(",")[:8] for line in text_of(workload).splitlines()[1:]]
    kept = [list(row.values())[:8] for row in rows[: ends[1] + 1]]
    for ours, theirs in zip(written, kept, strict=True):
        # AICB's logs leave out the size of an expert group.
        assert ours[0:2] + ours[4:] == theirs[0:2] + theirs[4:]


EXPERTS = {
    DATA / "mixtral_tp2_ep4_w32_gbs32" / "experts.csv.gz": 4,
    DATA / "deepseek_ep8_w32_gbs64" / "experts.csv.gz": 8,
}


@pytest.mark.parametrize("path", EXPERTS, ids=name_of)
def test_a_group_without_a_size_is_asked_for(path: Path) -> None:
    """AICB writes None for experts' groups, and some sizes as floats."""
    for one in (LOG, path):
        with pytest.raises(ConfigError, match=r"line \d+, comm_group_size.*size of ep_group"):
            aicb.read(one)
    with pytest.raises(
        ConfigError, match="group-sizes experts is invalid: it must be one of tp, dp, pp, ep"
    ):
        aicb.read(path, group_sizes={"experts": 4})
    workload = aicb.read(path, group_sizes={"ep": EXPERTS[path]})
    assert text_of(native.decode(native.encode(workload))).encode() == content(path)
    dispatched = [op for op in _sums(workload) if op.module == "forward.MoE.dispatch"]
    group = workload.groups["ep"]
    sizes = {"mixtral": 2 * 2048 * 4096 * 2 // 2, "deepseek": 51904512}
    for op in dispatched:
        assert (op.collective, op.group, group.size) == ("all_to_all", "ep", EXPERTS[path])
        assert op.message_bytes(group) == sizes[path.parent.name.split("_")[0]]
    assert len(dispatched) == (8 if "mixtral" in str(path) else 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "AICB workload: 'empty'|line 1"),
        (f"{HEADER}\n", "epoch_end at the end"),
        (f"{HEADER}\n{END}\n{SUM}\n", "line 3: .*epoch_end at the end"),
        (f"{HEADER},more\n{END}\n", "line 1: "),
        (
            f"{HEADER}\n{SUM}\n{SUM.replace('all_reduce', 'all_sum')}\n{END}\n",
            r"line 3, comm_type: 'CommType.all_sum' is invalid: "
            r"it must be CommType. and one of all_reduce, isend",
        ),
        (f"{HEADER}\n{SUM.replace('CommType.', '')}\n{END}\n", "line 2, comm_type"),
        (
            f"{HEADER}\n{SUM.replace('tp_group', 'cp_group')}\n{END}\n",
            r"line 2, comm_group: 'CommGroup.cp_group' is invalid: "
            r"it must be CommGroup. and one of tp_group",
        ),
        (f"{HEADER}\n{SUM.replace(',64,', ',6x4,')}\n{END}\n", "line 2, msg_size: '6x4'"),
        (f"{HEADER}\n{SUM.replace(',64,', ',nan,')}\n{END}\n", "line 2, msg_size: 'nan'"),
        (f"{HEADER}\n{SUM.replace(',64,', ',-64,')}\n{END}\n", "line 2, msg_size: '-64'"),
        (f"{HEADER}\n{SUM.replace(',2,', ',0,')}\n{END}\n", "line 2, comm_group_size: '0'"),
        (f"{HEADER}\n{SUM.replace(',None,', ',0x0,', 1)}\n{END}\n", "line 2, dst: '0x0'"),
        (
            f"{HEADER}\n{SUM},1\n{END}\n",
            "line 2: '13 columns' is invalid: it must be 12 columns",
        ),
        (
            f"{HEADER}\n{SUM.replace('forward.MoE', chr(34) + 'a,b' + chr(34))}\n{END}\n",
            "line 2",
        ),
        (
            f"{HEADER}\n{SUM.replace('all_reduce', 'isend')}\n{END}\n",
            "line 2, additional: '' is invalid: it must be send_next, send_prev",
        ),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(str(tmp_path))


def test_any_broken_file_is_one_line_or_comes_back(tmp_path: Path) -> None:
    path = next(path for path in MOCKED if path.suffix == ".csv")
    data = b"\n".join(content(path).split(b"\n")[:30]) + b"\n" + END.encode() + b"\n"

    def there_and_back(path: Path) -> None:
        assert text_of(aicb.read(path)).encode() == path.read_bytes()

    target = tmp_path / "workload.csv"
    good, bad = only_config_errors(there_and_back, broken(data, 200, seed=5), target)
    assert good > 30
    assert bad > 60


def test_iterations_of_a_log_that_differ_are_refused(tmp_path: Path) -> None:
    timed = SUM.replace(",None,None,None,1", ",0.5,1.0,1.0,1")
    other = timed.replace(",64,", ",65,")
    text = "\n".join([HEADER, timed, END, timed, END, other, END, ""])
    with pytest.raises(
        ConfigError, match="iterations 2 is invalid: it must be ones of the same operations"
    ):
        read(tmp_path, text)


def test_iterations_that_differ_are_one_step(tmp_path: Path) -> None:
    other = SUM.replace(",64,", ",128,")
    text = "\n".join([HEADER, SUM, END, SUM, END, other, other, END, SUM, END, ""])
    workload = read(tmp_path, text)
    sizes = [op.message_bytes(Group(digits=((2, 1),))) for op in _sums(workload)]
    assert sizes == [64, 128, 128, 64]
    assert text_of(workload) == text
    assert "3 iterations of the file, which differ" in " ".join(workload.notes)


def test_a_size_that_is_no_whole_number_is_rounded_up(tmp_path: Path) -> None:
    """AICB counts DeepSeek's dispatched bytes in floats."""
    text = "\n".join([HEADER, SUM.replace(",64,", ",64.25,"), END, ""])
    workload = read(tmp_path, text)
    (op,) = _sums(workload)
    assert op.message_bytes(workload.groups["tp"]) == 65
    assert text_of(workload) == text


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


@pytest.mark.parametrize("path", MOCKED[:2], ids=name_of)
def test_a_log_of_a_replay_is_read_as_one_of_aicb(path: Path, tmp_path: Path) -> None:
    """Its operations are the file's, with the median of their times."""
    workload = aicb.read(path)
    ops = list(workload.expand())
    times = [[1e-3 * (n % 7 + 1) * factor for n in range(len(ops))] for factor in (1, 2, 3)]
    times[1][0] = math.nan  # not timed in one pass
    text = "".join(aicb.write_log(workload, times))
    again = read(tmp_path, text, group_sizes={"ep": 4})
    for op, wanted, timed in zip(ops, times[1], again.expand(), strict=True):
        assert timed.module == op.module
        middle = 2e-3 if math.isnan(wanted) else wanted
        assert timed.time_s == pytest.approx(middle)
        if isinstance(op, CommOp):
            assert isinstance(timed, CommOp)
            assert (timed.collective, timed.count) == (op.collective, op.count)
    rows = list(csv.DictReader(io.StringIO(text)))
    row = next(row for row in rows if row["algbw"] not in ("None", "0"))
    seconds, size = float(row["_elapsed_time"]) * 1e-3, float(row["msg_size"])
    assert float(row["algbw"]) == pytest.approx(size / seconds / 2**30, rel=1e-3)


def test_products_of_column_layers_with_too_many_rows_are_noted() -> None:
    """AICB with sequence parallelism over 8 ranks; without it, rows are right."""
    note = "products of MegatronColumnLinear are 8 times too large"
    with_sp, without = (
        aicb.read(next(DATA.glob(f"{job}/mocked_comp.csv.gz"))).notes
        for job in ("gpt175b_tp8*", "tutorial_gpt13b*")
    )
    assert note in with_sp
    assert not any("too large" in note for note in without)
