"""Every file that is written is read, and holds all messages but those that are stated."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from stepmark.step import native
from stepmark.step.workload import CommOp, Workload
from stepmark.workloads.formats import FORMATS, simai
from stepmark.workloads.formats.loss import Representable, communication, losses
from stepmark.workloads.formats.ranks import disagreements

from .aicb_samples import megatron
from .export_cases import AXES, EXPERTS, ExportCase, accepted, cases, timed

Sums = Counter[tuple[str, int, int, bool]]  # collective, ranks, bytes, before the first step
READABLE = ("simai", "aicb", "param", "chakra")
STATED = re.compile(r": (\d+) messages?,[^;]*(?:; in the file (\d+) messages?,.*)?")


def sums_of(workload: Workload, stage: int) -> Sums:
    kept = Representable()
    for op, times, setup in communication(workload, stage):
        kept.add(op, workload.groups[op.group], times, setup=setup)
    return sums_of_kept(kept)


def sums_of_kept(kept: Representable) -> Sums:
    sums: Sums = Counter()
    for (collective, _, setup), sizes in kept.messages.items():
        for (ranks, num_bytes), times in sizes.items():
            sums[collective, ranks, num_bytes, setup] += times
    return sums


def read_back(name: str, workload: Workload, folder: Path) -> list[tuple[Workload, int]]:
    """Write the files of all ranks or stages; return what is read of each stage."""
    module = FORMATS[name].load()
    if FORMATS[name].picks == "stage":
        read = []
        for stage in range(len(workload.stages)):
            path = folder / f"stage{stage}{FORMATS[name].suffix}"
            path.write_text("".join(module.write(workload, stage=stage)))
            read.append((module.read(path), 0))
        return read
    for file, chunks in module.files(workload):
        data = b"".join(one if isinstance(one, bytes) else one.encode() for one in chunks)
        (folder / file).write_bytes(data)
    again = module.read(folder)
    per_stage = workload.world_size // len(workload.stages)
    return [(again, again.stage_of(stage * per_stage)) for stage in range(len(workload.stages))]


def total(sums: Sums) -> int:
    return sum(sums.values())


def check(name: str, workload: Workload, folder: Path) -> None:
    module: ModuleType = FORMATS[name].load()
    for stage, (again, place) in enumerate(read_back(name, workload, folder)):
        in_file = sums_of(again, place)
        kept = sums_of_kept(module.kept(workload, stage))
        if name == "aicb" and not workload.stages[stage].setup:
            in_file -= Counter({("barrier", workload.world_size, 0, True): 1})
        if name == "simai":  # transfers between stages are one number in line 1
            moved = Counter({key: kept[key] for key in kept if key[0] in ("send", "recv")})
            assert {key[2] for key in moved} <= {again.settings["pp_comm"]}
            in_file += moved
        assert in_file == kept
        lines = losses(workload, module.kept, [stage])
        stated = [STATED.search(line) for line in lines]
        missing = sum(int(m[1]) - int(m[2] or 0) for m in stated if m)
        assert total(sums_of(workload, stage)) - missing == total(in_file)


@pytest.mark.parametrize("origin", READABLE)
def test_conversions_hold_what_they_do_not_deny(origin: str, tmp_path: Path) -> None:
    """A file of one format, read and written in each of the others."""
    mine = [case for case in cases() if case.framework in ("megatron", "fsdp")]
    random.Random(5).shuffle(mine)
    for number, (case, workload) in enumerate(accepted(iter(mine))):
        folder = tmp_path / str(number)
        folder.mkdir()
        again = timed(read_back(origin, workload, folder)[0][0])
        check_formats(case, again, folder, [name for name in READABLE if name != origin])
        if number == 1:
            break


def check_all(case: ExportCase, workload: Workload, folder: Path) -> None:
    assert disagreements(workload) == ()
    check_formats(case, workload, folder, READABLE)


def check_formats(
    case: ExportCase, workload: Workload, folder: Path, names: Sequence[str]
) -> None:
    workload.check()
    assert native.decode(native.encode(workload)) == workload
    for name in names:
        try:
            (folder / name).mkdir()
            check(name, workload, folder / name)
        except Exception as error:
            error.add_note(f"{name}: {case}")
            raise


@pytest.mark.parametrize("framework", AXES)
def test_some_exports_hold_what_they_do_not_deny(framework: str, tmp_path: Path) -> None:
    mine = [case for case in cases() if case.framework == framework]
    random.Random(2).shuffle(mine)
    number = 0
    for number, (case, workload) in enumerate(accepted(iter(mine)), start=1):
        (tmp_path / str(number)).mkdir()
        check_all(case, workload, tmp_path / str(number))
        if number == 2:
            break
    assert number == 2


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("name", ["simai", "aicb"])
def test_experts_over_tensor_ranks_come_back(name: str, ep: int, tmp_path: Path) -> None:
    """ep 2 fits the data ranks, but is over tensor ranks; ep 4 is over both."""
    case = ExportCase(
        framework="megatron",
        model=EXPERTS,
        axes=(("tp", 2), ("dp_shard", 4), ("ep", ep)),
        settings=(("sequence_parallel", True), ("expert_tensor_parallel_size", 1)),
    )
    workload = case.workload()
    ((again, _),) = read_back(name, workload, tmp_path)
    expert_data = "dp_ep" if name == "simai" else "ep_dp"
    for ours, theirs in (("ep", "ep"), ("expt_dp", expert_data)):
        assert again.groups[theirs].members(0) == workload.groups[ours].members(0)


def test_ranks_of_experts_that_exceed_the_data_ranks_are_read(tmp_path: Path) -> None:
    """A file of AICB's has no word for it: ep 8 over tp 4 x dp 2."""
    path = tmp_path / "folded.txt"
    head = (
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 ep: 8 pp: 1 vpp: 1 ga: 1"
    )
    row = "mlp_moelayer\t-1\t5\tALLTOALL_EP\t64\t6\tNONE\t0\t7\tNONE\t0\t100"
    path.write_text(f"{head} all_gpus: 8 pp_comm: 0\n1\n{row}\n")
    workload = simai.read(path)
    assert workload.groups["ep"].members(0) == tuple(range(8))
    assert "ep does not divide dp: read as neighbouring ranks, across tp" in workload.notes
    assert "".join(simai.write(workload)) == path.read_text()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_pp_comm_is_the_pipelines_message(stage: int) -> None:
    """Neither a larger one of context parallelism's ring nor, at the last stage, nothing."""
    sequence = {"sequence_parallel": True}
    workload = megatron("llama-2-7b", tp=2, pp=4, cp=2, gbs=8, settings=sequence)
    moved = {
        op.call_bytes()
        for op in workload.tally(stage)
        if isinstance(op, CommOp) and op.group == "pp" and op.peer is not None
    }
    (line,) = [*simai.write(workload, stage=stage)][:1]
    assert int(line.partition("pp_comm: ")[2].split()[0]) == moved.pop()
    assert not moved
    lost = losses(workload, simai.kept, [stage])
    assert any(line.startswith("send of cp: ") for line in lost)
    assert not any(line.startswith("send of pp: ") for line in lost)
