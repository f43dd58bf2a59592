"""stepmark workload: what it makes, writes, shows and refuses, called as a user calls it."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.parsing import parse

from stepmark.model.ops import Attention, Gemm
from stepmark.operators.op_options import FamilyOptions, options_class
from stepmark.operators.op_plan import placed_ops
from stepmark.step.workload import CommOp, ComputeOp
from stepmark.workloads.formats import FORMATS
from stepmark.workloads.rules import RULES

from .process import environment, stepmark_process
from .workload_program import AICB, Program, program, refused

TINY = "--model llama-3.1-8b --scale tiny"
SIMAI = sorted(AICB.glob("*/simai*"))
# What each framework needs beside the model to run on ranks.
FRAMEWORKS = {
    "megatron": f"{TINY} --world-size 8 --tp 2 --pp 2 --sp --gbs 8",
    "deepspeed": f"{TINY} --world-size 8",
    "pytorch": f"{TINY} --world-size 8 --tp 2",
    "fsdp": f"{TINY} --world-size 8 --tp 2",
    "ddp": f"{TINY} --world-size 4",
    "tp": f"{TINY} --tp 2",
    "pp": f"{TINY} --pp 2 --gbs 4",
    "dlrm": "--world-size 2 --mini-batch-size 2",
}


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return program(capsysbinary, tmp_path, monkeypatch)


def test_llama_405b_on_16384_ranks(run: Program) -> None:
    done = run(
        "generate --model llama-3.1-405b --framework megatron --world-size 16384 --tp 8 "
        "--pp 16 --vpp 8 --sp --gbs 2048 --mbs 1 -o w.json"
    )
    assert (done.code, done.out) == (0, b"")
    assert "126 layers + embedding + head = 16 stages x 8 chunks x 1" in done.err
    assert Path("w.json").stat().st_size < 2**20
    shown = run("show w.json")
    assert (shown.code, shown.err) == (0, "")
    assert "16 stages, 16 micro-batches per step" in shown.text
    # b s h bytes over tp: 8192 x 16384 x 2 / 8; whole sequences are gathered
    assert "recv            bf16   pp        16   16777216     32 MiB" in shown.text
    assert "all_gather      bf16   tp         8   16777216    256 MiB" in shown.text
    # (pp - 1) / (vpp x micro-batches + pp - 1): arXiv 2104.04473, section 2.2
    assert f"idle {100 * 15 / (8 * 16 + 15):.1f} %" in shown.text
    said = next(line for line in shown.text.splitlines() if line.startswith("settings"))
    assert "sequence_parallel yes" in said
    assert "overlap" not in said
    rules = next(line for line in shown.text.splitlines() if line.startswith("rules"))
    assert rules.removeprefix("rules    ").startswith("NVIDIA/Megatron-LM core_v")
    assert ".py" not in rules


def test_the_tutorials_7b_as_simai_text(run: Program) -> None:
    done = run(
        "generate --frame Megatron --model_size 7 --world_size 4096 --tp_num 4 --pp_num 1 "
        "--global_batch 8192 --micro_batch 1 --seq_length 4096 --swiglu --use_flash_attn "
        "--format simai -o gpt7b.txt"
    )
    assert done.code == 0
    head, count, *rows = Path("gpt7b.txt").read_text().splitlines()
    assert head.startswith("HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 ep: 1")
    assert "ga: 8 all_gpus: 4096" in head
    assert int(count) == len(rows)
    assert {line.count("\t") for line in rows} == {11}
    assert "without effect here: --use-flash-attn" in done.err
    assert "fixed:1ns each, AICB's filler" in done.err
    assert "simai cannot carry: " in done.err


@pytest.mark.parametrize("path", SIMAI, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_simai_files_come_back_byte_for_byte(run: Program, path: Path) -> None:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    assert run("convert", path, "-o", "n.json").code == 0
    back = run("convert n.json --to simai -o -")
    assert (back.code, back.out) == (0, data)


def test_distinct_messages_of_fsdp_are_commands(run: Program) -> None:
    done = run("generate --model llama-3-70b --framework fsdp --world-size 8 --distinct")
    assert done.code == 0
    lines = [line for line in done.text.splitlines() if line.startswith("stepmark comm")]
    # One layer: 855,654,400 parameters; both gathers of it are one message.
    sizes = {line.split(" -b ")[1].split()[0]: line for line in lines}
    gather, scatter = (sizes[f"{8 * 106_956_800 * size // 1024}K"] for size in (2, 4))
    assert "comm all_gather " in gather
    assert " --dtype bf16 " in gather
    assert "160 calls, fsdp forward, backward" in gather
    assert "comm reduce_scatter " in scatter
    assert " --dtype fp32 " in scatter
    assert "stepmark op gemm --m 8192 --n 8192 --k 28672 --dtype bf16  # 80 calls" in done.text


def test_a_distinct_message_is_what_its_command_measures(run: Program) -> None:
    Path("w.json").write_bytes(run.made(FRAMEWORKS["megatron"]).out)
    rows = json.loads(run("show w.json --distinct --json -").out)["collectives"]
    assert {row["collective"] for row in rows} >= {"all_reduce", "all_gather", "p2p"}
    whole = run("--from-workload w.json --print nccl-tests", verb="comm").text.splitlines()
    for row, line in zip(rows, whole, strict=True):
        words = row["command"].removeprefix("stepmark comm ")
        alone = run(f"{words} --print nccl-tests", verb="comm")
        assert alone.text.strip() == line.partition("  # ")[0]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt2-small", "deepseek-v2-lite"])
@pytest.mark.parametrize("framework", ["megatron --sp", "fsdp"])
def test_operators_of_a_framework_are_those_of_its_workload(
    run: Program, framework: str, model: str
) -> None:
    """The vocabulary of head and loss is padded and divided as the framework does."""
    for tp in (1, 4):
        line = f"--model {model} --tp {tp} --mbs 2 --seq-len 1024"
        done = run(f"generate {line} --framework {framework} --world-size {2 * tp} -o -")
        if done.code and model == "deepseek-v2-lite":  # PyTorch's rules: no tp with experts
            assert (framework, tp) == ("fsdp", 4)
            continue
        operators = {one.op for one in done.workload.tally(0) if isinstance(one, ComputeOp)}
        for family in ("gemm", "attention", "norm", "activation", "cross-entropy"):
            words = f"{line} --as {framework.split(maxsplit=1)[0]} --dtype bf16".split()
            options = parse(options_class(family), [family, *words])
            assert isinstance(options, FamilyOptions)
            placed = placed_ops(options, "cuda")
            shapes = {op for label, op in placed if label.role != "loss_chunked"}
            assert shapes
            if framework.startswith("megatron") and family == "cross-entropy":
                continue  # Megatron-LM's loss is several kernels
            assert shapes <= operators, family


def test_a_distinct_shape_is_what_its_command_measures(run: Program) -> None:
    made = run.made(FRAMEWORKS["megatron"])
    Path("w.json").write_bytes(made.out)
    rows = json.loads(run("show w.json --distinct --json -").out)["operators"]
    asked = set()
    for row in rows:
        words = row["command"].split()[2:]
        options = parse(options_class(words[0]), words)
        assert isinstance(options, FamilyOptions)
        asked |= {op for _, op in placed_ops(options, "cuda")}
    workload = made.workload
    held = {one.op for stage in (0, 1) for one in workload.tally(stage) if hasattr(one, "op")}
    assert asked == {op for op in held if isinstance(op, (Gemm, Attention))}


@pytest.mark.parametrize("framework", RULES)
def test_every_framework_makes_shows_and_converts(run: Program, framework: str) -> None:
    made = run.made(f"--framework {framework} {FRAMEWORKS[framework]}")
    workload = made.workload
    workload.check()
    assert workload.source
    assert sum(isinstance(one, CommOp) for one in workload.tally(0))
    Path("w.json").write_bytes(made.out)
    assert run("convert w.json -o -").out == made.out
    for name, kind in FORMATS.items():
        if name in ("chakra", "aiob") or kind.framework:
            # chakra's package is optional, aiob is of times alone; tests/framework_files
            continue
        written = run(f"convert w.json --to {name} -o w{kind.suffix}")
        assert written.code == 0, written.err
        if kind.reads:
            shown = run(f"show w{kind.suffix}")
            assert shown.code == 0, shown.err
            assert "Stages" in shown.text


@pytest.mark.parametrize(
    "name",
    [
        "tutorial_gpt13b_tp8_pp1_w8_gbs2/mocked.csv",
        "gpt175b_tp8_pp8_w1024_gbs1536_sp/mocked.csv.gz",
        "ds_stage2_llama7b_w128/mocked.csv",
        "tutorial_gpt13b_tp8_pp1_w8_gbs2/simai_aiob_example.txt",
    ],
)
def test_show_of_files_of_others(run: Program, name: str) -> None:
    done = run("show", AICB / name)
    assert (done.code, done.err) == (0, "")
    for title in ("Stages", "Communication", "Sizes"):
        assert f"\n{title}" in done.text


def test_what_a_file_leaves_out_can_be_said(run: Program) -> None:
    log = AICB / "a100_log.csv.gz"
    refused(run("show", log), "ep_group")
    done = run("show --group-sizes ep=16", log)
    assert done.code == 0
    assert "all_to_all" in done.text
    refused(run("show --group-sizes ep", log), "group-sizes", "ep=16")
    refused(run("show --group-sizes ep=16", SIMAI[0]), "group-sizes", "simai")
    refused(run("convert --world-size 8 -o -", log), "world-size", "a file of format aicb")
    told = AICB / "tutorial_gpt13b_tp8_pp1_w8_gbs2/simai_no_aiob.txt"
    refused(run("show --world-size 3", told), "world-size 3", "as line 1 says")
    assert run("show --world-size 8", told).out == run("show", told).out != b""


def test_tables_as_json_and_csv(run: Program) -> None:
    done = run(f"generate {FRAMEWORKS['megatron']} --json -")
    tables = json.loads(done.out)
    of_stage = {"communication", "sizes", "computation", "layers"}
    assert set(tables) == {"stages", "totals", "notes", *of_stage}
    assert [row["stage"] for row in tables["stages"]] == [0, 1]
    Path("w.json").write_bytes(run.made(FRAMEWORKS["megatron"]).out)
    assert json.loads(run("show w.json --json -").out) == tables
    assert run("show w.json --csv folder/").code == 0
    assert {path.name for path in Path("folder").iterdir()} == {
        f"{name}.csv" for name, rows in tables.items() if rows
    }
    last = json.loads(run("show w.json --json - --stage 1").out)
    assert last["communication"] != tables["communication"]
    refused(run("show w.json --csv one.csv"), "csv", "one.csv", "a folder")
    both = run(f"generate {FRAMEWORKS['megatron']} --json - -o o.json")
    assert json.loads(both.out) == tables
    assert Path("o.json").read_bytes() == Path("w.json").read_bytes()


def test_one_stage_one_rank_or_all(run: Program) -> None:
    Path("w.json").write_bytes(run.made(FRAMEWORKS["megatron"]).out)
    first, last = (run(f"convert w.json --to aicb --stage {stage} -o -") for stage in (0, 1))
    assert first.out != last.out
    # The ranks of a stage do the same; of the second stage they begin at 4.
    ranks = [run(f"convert w.json --to param --rank {rank} -o -").out for rank in (0, 4)]
    assert run("convert w.json --to param --stage 1 -o -").out == ranks[1] != ranks[0]
    assert run("convert w.json --to param -o all/").code == 0
    held = {path.name: path.read_bytes() for path in Path("all").iterdir()}
    assert sorted(held) == [f"{rank}.json" for rank in range(8)]
    assert [held["0.json"], held["4.json"]] == ranks
    assert "2 stages" in run("show all").text
    said = run("convert w.json --to csv --stage 1 --rank 3 -o -").err
    assert "--stage: no effect: csv holds all stages" in said
    assert "--rank: no effect: csv holds all ranks" in said
    # Of a format of one stage --rank picks the rank's.
    assert run("convert w.json --to aicb --rank 7 -o -").out == last.out
    assert "stage 1 alone" in run("convert w.json --to aicb --rank 4 -o rank4.csv").err
    refused(run("convert w.json --to aicb --rank 8 -o -"), "rank 8", "from 0 to 7")
    for to in ("aicb", "param"):
        line = f"convert w.json --to {to} --rank 3 --stage 1 -o -"
        refused(run(line), "rank 3", "stage 1: 4 to 7")


def test_a_stage_of_a_pipeline_goes_by_either_name(run: Program) -> None:
    base = f"generate {FRAMEWORKS['megatron']} --format aicb -o -"
    stages = [run(f"{base} --pp-rank {stage}").out for stage in (0, 1)]
    assert [run(f"{base} --stage {stage}").out for stage in (0, 1)] == stages
    assert stages[0] != stages[1] == run(f"{base} --stage 1 --pp-rank 1").out
    assert "no effect" not in run(f"{base} --stage 1").err
    assert "Computation, stage 1" in run(f"generate {FRAMEWORKS['megatron']} --stage 1").text
    refused(run(f"{base} --stage 2"), "stage 2", "from 0 to 1")
    refused(run(f"{base} --stage 1 --pp-rank 0"), "stage", "--pp-rank")
    # Of DeepSpeed it is ZeRO's.
    zero = run.made(f"--framework deepspeed {FRAMEWORKS['deepspeed']} --stage 1").workload
    assert (zero.settings["stage"], len(zero.stages)) == (1, 1)


@pytest.mark.parametrize("to", ["aicb", "simai"])
def test_a_folder_of_stages(run: Program, to: str) -> None:
    Path("w.json").write_bytes(run.made(FRAMEWORKS["megatron"]).out)
    assert run(f"convert w.json --to {to} -o all/").code == 0
    suffix = FORMATS[to].suffix
    assert {path.name: path.read_bytes() for path in Path("all").iterdir()} == {
        f"stage{stage}{suffix}": run(f"convert w.json --to {to} --stage {stage} -o -").out
        for stage in (0, 1)
    }
    assert run(f"convert w.json --to {to} --stage 1 -o one/").code == 0
    assert [path.name for path in Path("one").iterdir()] == [f"stage1{suffix}"]
    # A file of theirs is one, whatever its stages.
    theirs = AICB / "tutorial_gpt13b_tp8_pp1_w8_gbs2/mocked.csv"
    refused(run("convert --to aicb -o none/", theirs), "-o", "a file")
    for one in ("native", "csv"):
        refused(run(f"convert w.json --to {one} -o none/"), "-o", "a file")
    assert not Path("none").exists()


def test_files_of_another_job_are_not_taken_for_ranks(run: Program) -> None:
    job = f"generate {TINY} --framework fsdp"
    assert run(f"{job} --world-size 8 --to param -o st/").code == 0
    before = {path.name: path.read_bytes() for path in Path("st").iterdir()}
    for more in ("--world-size 4 --to param", "--world-size 16 --to chakra"):
        refused(run(f"{job} {more} -o st/"), "-o", ".json", "of this workload")
    refused(run(f"{job} --world-size 4 --to param --rank 0 -o st/"), "4.json and 3 more")
    assert {path.name: path.read_bytes() for path in Path("st").iterdir()} == before
    # All are replaced, or one of them.
    assert run(f"{job} --world-size 8 --mbs 2 --to param -o st/").code == 0
    assert Path("st/0.json").read_bytes() != before["0.json"]
    assert run(f"{job} --world-size 8 --to param --rank 3 -o st/").code == 0
    assert Path("st/3.json").read_bytes() == before["3.json"]
    assert "8 ranks" in run("show st/").text
    for absent in ("7.json", "3.json"):
        Path("st", absent).unlink()
        refused(run("show st/"), f"no {absent}")


def test_one_rank_of_a_chakra_trace(run: Program) -> None:
    pytest.importorskip("google.protobuf")
    job = f"generate {TINY} --framework fsdp --to chakra"
    assert run(f"{job} --world-size 2 -o ch/").code == 0
    refused(run(f"{job} --world-size 1 -o ch/"), "workload.1.et")
    groups = Path("ch/comm_groups.json").read_bytes()
    refused(run(f"{job} --world-size 4 --rank 3 -o ch/"), "comm_groups.json")
    assert run(f"{job} --world-size 2 --rank 1 -o ch/").code == 0
    assert Path("ch/comm_groups.json").read_bytes() == groups
    for name in ("g", "g.et", "g.1.et"):
        refused(run(f"{job} --world-size 2 -o {name}"), "PREFIX.0.et")
    for rank in (0, 1):
        assert run(f"{job} --world-size 2 --rank {rank} -o g.{rank}.et").code == 0
        if not rank:
            refused(run("show g.0.et"), "there is no g.1.et")
    assert run("show g.0.et").text.replace("g:", "workload:") == run("show ch/").text
    # Its groups are not another's.
    refused(run(f"{job} --world-size 4 -o h.0.et"), "comm_groups.json")
    assert not Path("h.0.et").exists()


def test_stdin_pipes_and_stdout(run: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    data = run.made(FRAMEWORKS["megatron"]).out
    Path("w.json").write_bytes(data)
    shown = run("show w.json").out

    def given(line: str, text: bytes) -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return run(line)

    assert given("show -", data).out == shown
    assert given("convert - -o -", data).out == data
    refused(given("show -", b"Dear reader"), "workload -", "unknown kind")
    monkeypatch.setattr(sys, "stdin", None)
    refused(run("show -"), "workload -", "closed")
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_bytes, args=(data,))
    writer.start()
    assert run("show pipe").out == shown
    writer.join()
    assert run("show w.json --html page.html").code == 0
    page = run("show w.json --html -").out
    assert page == Path("page.html").read_bytes()
    assert page.endswith(b"</html>\n")
    refused(run("show w.json --html - --json -"), "stdout")


def test_a_full_stdout_is_one_line(run: Program, tmp_path: Path) -> None:
    Path("w.json").write_bytes(run.made(TINY).out)
    for line in (
        *("show w.json", "show w.json --json -", "show w.json --html -"),
        *("convert w.json -o -", f"generate {TINY}"),
    ):
        with Path("/dev/full").open("wb") as full:
            told = subprocess.run(
                [sys.executable, "-m", "stepmark", "workload", *line.split()],
                cwd=tmp_path,
                env=environment(),
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        said = told.stderr.decode().splitlines()
        assert (told.returncode, len(said)) == (2, 1), said
        assert "No space left" in said[0]


def test_a_profile_is_no_workload(run: Program) -> None:
    refused(run("show", AICB / "aiob_example.txt"), "--compute-from")


def test_stdout_is_the_file_and_nothing_else(run: Program) -> None:
    sharded = f"--framework fsdp {FRAMEWORKS['fsdp']}"
    to_file = run(f"generate {sharded} -o w.json")
    assert to_file.out == b""
    assert "wrote w.json: " in to_file.err
    assert run.made(sharded).out == Path("w.json").read_bytes()
    for more in ("--json -", "--csv -", "--distinct"):
        refused(run(f"generate {TINY} -o - {more}"), "out", "stdout")
    both = run(f"generate {sharded} -o again.json --distinct")
    assert "stepmark comm all_gather" in both.text
    assert Path("again.json").read_bytes() == Path("w.json").read_bytes()


def test_an_output_file_is_replaced_whole_or_left(run: Program) -> None:
    Path("w.json").write_text("of another day")
    refused(run(f"generate {TINY} --tp 3 -o w.json"), "tp")
    refused(run(f"generate {TINY} --compute-from none -o w.json"), "none")
    assert Path("w.json").read_text() == "of another day"
    assert run(f"generate {TINY} -o w.json").code == 0
    assert run("show w.json").code == 0
    assert [path.name for path in Path().iterdir()] == ["w.json"]


@pytest.mark.parametrize("target", ["none/w.json", "folder", "w.json/x"])
def test_what_cannot_be_written(run: Program, target: str) -> None:
    Path("folder").mkdir()
    Path("w.json").write_bytes(run.made(TINY).out)
    for line in (f"generate {TINY} -o {target}", f"convert w.json -o {target}"):
        refused(run(line), "-o", target)
    refused(run(f"show w.json --html {target}"), target)
    if target != "folder":
        refused(run(f"show w.json --json {target}/x.json"), "x.json")


GARBAGE = {
    "empty": b"",
    "blank": b" \n\n",
    "binary": bytes(range(256)) * 20,
    "json": b'{"a": 1}',
    "cut.json": b'{"schema":1,"kind":"stepmark workload","name":',
    "wrong.json": b'{"schema":1,"kind":"stepmark workload"}',
    "prose.txt": b"Dear reader,\n",
    "head.txt": b"HYBRID_TRANSFORMER_FWD_IN_BCKWD\n",
    "count.txt": b"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 1 ep: 1 pp: 1 "
    b"vpp: 1 ga: 1 all_gpus: 1 checkpoints: 0 checkpoint_initiates: 0 pp_comm: 0\n9\n",
    "aicb.csv": b"comm_type,comm_group\nCommType.nothing,CommGroup.x\n",
    "cut.gz": gzip.compress(b"HYBRID_TRANSFORMER", mtime=0)[:-9],
    "trace.json": b'[{"comms": 1}]',
}


@pytest.mark.parametrize("name", [*GARBAGE, "none.json", "."])
def test_files_that_are_no_workloads(run: Program, name: str) -> None:
    if name in GARBAGE:
        Path(name).write_bytes(GARBAGE[name])
    refused(run(f"show {name}"))
    refused(run(f"convert {name} -o -"))
    refused(
        run(f"comm --from-workload {name} --print nccl-tests".partition(" ")[2], verb="comm")
    )


BAD = [
    ("generate", "num-layers"),
    ("generate --model lama-3", "lama-3"),
    (f"generate {TINY} --framework magic", "megatron, deepspeed, pytorch, fsdp"),
    ("generate --framework collective_test", "stepmark comm"),
    (f"generate {TINY} --nonsense 1", "--nonsense"),
    (f"generate {TINY} --framework fsdp --vpp 2", "--vpp"),
    (f"generate {TINY} --framework fsdp --virtual-pipeline-model-parallel-size 2", "megatron"),
    (f"generate {TINY} --framework fsdp --recompute-granularity full", "megatron"),
    (f"generate {TINY} --framework deepspeed --stage", "--stage"),
    (f"generate {TINY} --framework deepspeed --stage 4", "stage"),
    (f"generate {TINY} --framework deepspeed --reduce-bucket-size many", "whole number"),
    (f"generate {TINY} --framework deepspeed --reduce-bucket-size 1.5", "whole number"),
    (f"generate {TINY} --framework deepspeed --overlap-comm perhaps", "auto, true, false"),
    (f"generate {TINY} --framework deepspeed --gradient-clipping x", "a number"),
    (f"generate {TINY} --tp four", "--tp four is invalid: it must be a whole number"),
    (f"generate {TINY} --tp 3", "tp"),
    (f"generate {TINY} --world-size 0", "world-size"),
    (f"generate {TINY} --world-size 6 --tp 4", "e.g. 4 or 8"),
    (f"generate {TINY} --framework tp --tp 2 --world-size 8", "--framework pytorch"),
    (
        f"generate {TINY} --framework pytorch --world-size 8 --bucket-cap-mb 25",
        "--bucket-cap-mb 25 is invalid: it has no effect with data-parallel fsdp",
    ),
    (
        f"generate {TINY} --framework pytorch --dp-replicate 8 --prefetch 1",
        "--prefetch 1 is invalid: it has no effect with data-parallel ddp",
    ),
    (f"generate {TINY} --framework fsdp --data-parallel ddp", "--framework pytorch"),
    (f"generate {TINY} --world-size 8 --gbs 12", "e.g. 8 or 16"),
    (f"generate {TINY} --mbs 0", "mbs"),
    (f"generate {TINY} --pp 3", "pp"),
    (f"generate {TINY} --format docx -o x", "native, simai"),
    (f"generate {TINY} --pp-rank 1 --format simai -o -", "pp-rank"),
    (f"generate {TINY} --world-size 4 --rank 4 --format param -o -", "rank"),
    (f"generate {TINY} --dtype int3", "int3"),
    ("generate -m 7 --world-size 1 --comp_filepath none", "comp-filepath none is invalid"),
    ("generate --model llama-3.1-8b -m 7", "only without --model-size (-m)"),
    ("generate -m 8", "7, 13, 22"),
    ("generate -m 270 --world-size 8", "--num-layers"),
    ("generate --framework dlrm --model llama-3.1-8b", "it has no effect with dlrm"),
    ("generate --model llama-3.1-8b --num-layers 1000003", "at most 100000"),
    (f"generate {TINY} --to simai --format aicb -o x", "simai and aicb"),
    (f"generate {TINY} --framework fsdp --recompute -o x", "full, blocks, ops"),
    (f"generate {TINY} --framework fsdp --recompute", "full, blocks, ops"),
    (f"generate {TINY} --pp 2 --vpp x", "--vpp x is invalid: it must be a whole number"),
    ("capture x.py:f --world-size 0", "world-size 0"),
    ("capture x.py:f", "missing"),
    ("show", "file is missing"),
    ("convert", "file is missing"),
    ("nonsense", "nonsense"),
]


@pytest.mark.parametrize(("line", "word"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line(run: Program, line: str, word: str) -> None:
    refused(run(line), word)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("framework", RULES)
def test_help_lists_a_frameworks_settings(run: Program, framework: str) -> None:
    done = run(f"generate --framework {framework} --help-all")
    assert (done.code, done.err) == (0, "")
    for name, field in RULES[framework].fields().items():
        if name not in ("dtype", "make_vocab_size_divisible_by"):
            assert re.search(rf"--(\[no-\])?{name.replace('_', '-')}\b", done.text), name
            assert field.metadata["help"].split()[0] in done.text


def test_help_says_what_a_value_is(run: Program) -> None:
    text = run("generate --framework megatron --help-all").text
    for word in (
        "--vpp N",
        "--moe-aux-loss-coeff NUMBER",
        "--cp-comm-type p2p|all_gather",
    ):
        assert word in text
    zero = run("generate --framework deepspeed --help-all").text
    assert re.findall(r"^  (--stage\b[^3].*?)  ", zero, re.M) == ["--stage, --zero-stage N"]


def test_every_name_of_a_switch_has_an_opposite(run: Program) -> None:
    base = f"generate {TINY} --world-size 2 --tp 2"
    plain, split = run(f"{base} -o -").out, run(f"{base} --sp -o -").out
    assert plain != split
    for name in ("sequence-parallel", "sp", "enable-sequence-parallel", "sp-enable"):
        assert run(f"{base} --{name} -o -").out == split
        for opposite in (f"--no-{name}", f"--{name}=False"):
            assert run(f"{base} --sp {opposite} -o -").out == plain


@pytest.mark.parametrize("framework", [name for name, rule in RULES.items() if rule.has_job])
def test_settings_hold_the_batches(run: Program, framework: str) -> None:
    line = f"--framework {framework} {FRAMEWORKS[framework]} --mbs 2"
    settings = run.made(f"{line} --gbs 32").workload.settings
    mbs, gbs = (settings.get(f"{one}_batch_size") for one in ("micro", "global"))
    assert (mbs or settings["mbs"], gbs or settings["gbs"]) == (2, 32)
    assert "(mbs 2, 32 sequences of all data ranks)" in run(f"generate {line} --gbs 32").text


def test_a_pipelines_micro_batches_come_of_the_batch(run: Program) -> None:
    line = f"generate {TINY} --framework pp --pp 2 --mbs 4"
    refused(run(f"{line} --gbs 4"), "gbs", "8 or more: 1f1b needs pp (2) micro-batches of 4")
    assert run(f"{line} --gbs 8").out == run(line).out  # the fewest are the default


def test_the_preset_of_aicb_says_so(run: Program) -> None:
    assert "published GPT-3 has 2048" in run("generate --model gpt-175b -o w.json").err
    short = "--model gpt-175b --seq-len 2048 --max-positions 2048"
    made = run.made(short)
    assert "GPT-3" not in made.err
    assert made.workload.model is not None
    assert (made.workload.model.seq_len, made.workload.model.max_positions) == (2048, 2048)


@pytest.mark.parametrize("verb", ["generate", "show", "convert", "capture"])
def test_help_of_each_verb(run: Program, verb: str) -> None:
    assert verb in run("--help").text
    done = run(f"{verb} --help")
    assert (done.code, done.err) == (0, "")
    assert f"stepmark workload {verb}" in done.text


@pytest.mark.ranks
def test_a_file_is_made_in_half_a_second(tmp_path: Path) -> None:
    """In CPU time of the process, the start of Python included."""
    words = "workload generate --model llama-3.1-70b --framework fsdp --world-size 64 -o w.json"

    def seconds() -> float:
        begin = os.times()
        assert stepmark_process(*words.split(), cwd=tmp_path).returncode == 0
        end = os.times()
        spent = end.children_user + end.children_system
        return spent - begin.children_user - begin.children_system

    assert min(seconds() for _ in range(5)) < 0.5


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    """A generator that takes seconds to start is no better than what it replaces."""
    heavy = ["torch", "numpy", "plotly", "duckdb", "rich"]
    code = (
        "import sys; from stepmark.cli.main import status; "
        f"status({['workload', 'generate', *TINY.split(), '-o', 'w.json']!r}); "
        "status(['workload', 'show', 'w.json']); "
        "status(['comm', '--from-workload', 'w.json', '--print', 'nccl-tests']); "
        f"sys.exit(' '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert b"Layers" in told.stdout
