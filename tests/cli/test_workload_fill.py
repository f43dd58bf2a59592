"""workload fill: times of computation, measured on CPU ranks or from sources, in the file."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.cases.case import OpCase
from stepmark.cases.record import Measured
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.model.ops import Gemm, Norm, Op, Phase
from stepmark.step import native
from stepmark.step.workload import ComputeOp, Kernel, Stage, Workload
from stepmark.store import plans
from stepmark.store.reader import read_records
from stepmark.workloads.durations import computations
from stepmark.workloads.formats import aiob

from .process import ROOT, only_run, stepmark
from .workload_program import AICB, Program, program, refused

TINY = "--model gpt2-125m --framework megatron --world-size 2 --tp 2 --gbs 2 --mbs 1"
CPU = "--measure --device cpu --budget 8s"
SIMAI = AICB / "tutorial_gpt13b_tp8_pp1_w8_gbs2" / "simai_no_aiob.txt"
ADD = Kernel(name="add", flops=0, bytes_moved=64)
PRODUCT, NORM = Gemm(m=16, n=16, k=16), Norm(tokens=16, hidden=16)


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program in a folder with w.json, of a tiny model."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    run = program(capsysbinary, tmp_path, monkeypatch)
    Path("w.json").write_bytes(run.made(f"{TINY} --scale tiny").out)
    return run


@pytest.fixture(name="filled", scope="module")
def _filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with w.json, a run of its operators, filled.json and stderr."""
    folder = tmp_path_factory.mktemp("filled")
    for line in (
        f"generate {TINY} --scale tiny -o w.json",
        f"fill w.json {CPU} --budget 20s -o filled.json",  # time for all of them
    ):
        done = stepmark("workload", *shlex.split(line), cwd=folder)
        assert done.returncode == 0, done.stderr
        (folder / "stderr").write_text(done.stderr)
    return folder


def load(path: Path | str) -> Workload:
    return native.decode(Path(path).read_bytes())


def write(path: str, *ops: Op | Kernel, time_s: float | None = None) -> None:
    items = tuple(
        ComputeOp(op=op, phase=Phase.FWD, module=f"part.{index}", time_s=time_s)
        for index, op in enumerate(ops)
    )
    stages = (Stage(step="s"),)
    workload = Workload(name="w", rules="hand", blocks={"s": items}, stages=stages)
    Path(path).write_bytes(native.encode(workload))


def samples_of(run: Path) -> dict[Op, list[float]]:
    return {
        record.operator.op: slowest_per_sample(record.samples.seconds)
        for record in read_records(run)
        if isinstance(record, Measured) and not record.num_wrong
    }


def medians_of(run: Path) -> dict[Op, float]:
    return {op: summarize(seconds).median for op, seconds in samples_of(run).items()}


def cases_of(run: Path) -> list[OpCase]:
    cases = [entry.case for entry in plans.read(run).entries]
    return [case for case in cases if isinstance(case, OpCase)]


def by_phase(workload: Workload, module: str) -> dict[Phase, float | None]:
    """Return the times of a module's operators."""
    own = (one for one in computations(workload) if one.module == module)
    return {one.phase: one.time_s for one in own if not isinstance(one.op, Kernel)}


@pytest.mark.ranks
class TestMeasured:
    def test_each_distinct_operator_is_measured_once(self, filled: Path) -> None:
        computed = computations(load(filled / "w.json"))
        ops = [case.op for case in cases_of(only_run(filled / "runs"))]
        assert len(ops) == len(set(ops)) < len(computed)
        assert set(ops) == {one.op for one in computed if not isinstance(one.op, Kernel)}

    def test_cases_are_labelled_with_their_places(self, filled: Path) -> None:
        places = {
            (label.role, label.phase): case.op
            for case in cases_of(only_run(filled / "runs"))
            for label in case.labels
        }
        for one in computations(load(filled / "w.json")):
            if not isinstance(one.op, Kernel):
                assert places[one.module, one.phase] == one.op

    def test_times_are_the_medians_of_the_run(self, filled: Path) -> None:
        medians = medians_of(only_run(filled / "runs"))
        for one in computations(load(filled / "filled.json")):
            expected = None if isinstance(one.op, Kernel) else medians[one.op]
            assert one.time_s == expected, one

    def test_passes_have_times_of_their_own(self, filled: Path) -> None:
        times = by_phase(load(filled / "filled.json"), "mlp.down")
        assert times.keys() == {Phase.FWD, Phase.DGRAD, Phase.WGRAD}
        assert len(set(times.values())) == 3

    def test_the_note_names_run_and_device(self, filled: Path) -> None:
        run = only_run(filled / "runs")
        device = json.loads((run / "run.json").read_text())["environment"]["devices"][0]
        note = load(filled / "filled.json").notes[-1]
        assert note == f"Compute times: run {run.name} on {device['name']}."

    def test_nothing_else_changes(self, filled: Path) -> None:
        plain, timed = (load(filled / name) for name in ("w.json", "filled.json"))
        assert [replace(one, time_s=None) for one in timed.expand()] == list(plain.expand())
        assert timed.notes[:-1] == plain.notes

    def test_what_has_no_time_is_named_in_one_line(self, filled: Path) -> None:
        lines = (filled / "stderr").read_text().splitlines()
        (line,) = (line for line in lines if "without a time" in line)
        assert line.startswith("# operations without a time (18): kernel name=add ")
        assert line.endswith("and 15 more")

    def test_its_shapes_are_not_measured_again(self, run: Program, filled: Path) -> None:
        """--compute-from RUN of an earlier fill."""
        source = only_run(filled / "runs")
        done = run("fill w.json -o f.json --compute-from", f"{source},roofline:h200-sxm")
        assert done.code == 0, done.err
        assert "without a time" not in done.err
        medians, workload = medians_of(source), load("f.json")
        for one in computations(workload):
            assert one.time_s
            assert isinstance(one.op, Kernel) or one.time_s == medians[one.op]
        assert workload.notes[-1].startswith(f"Compute times: run {source.name} on ")
        assert workload.notes[-1].endswith(", roofline of NVIDIA H200.")
        assert not Path("runs").exists()

    def test_simai_gets_the_times_that_are_known(self, run: Program, filled: Path) -> None:
        done = run("convert --to simai", filled / "filled.json")
        assert done.code == 0, done.err
        assert "fixed:1ns each, AICB's filler, for what has none" in done.err
        rows = [line.split("\t") for line in done.text.splitlines()[2:]]
        time_s = by_phase(load(filled / "filled.json"), "embedding")[Phase.FWD]
        assert {int(row[2]) for row in rows if row[0] == "embedding_layer"} == {
            round((time_s or 0) * 1e9)
        }

    def test_an_aiob_profile_is_written_and_read_back(self, run: Program) -> None:
        done = run(f"fill w.json {CPU} --budget 20s --to aiob -o profile.txt")
        assert done.code == 0, done.err
        profile, samples = aiob.read(Path("profile.txt")), samples_of(only_run(Path("runs")))
        sections = {
            "attention.qkv": "atten_qkv",
            "mlp.down": "mlp_linear_2",
            "head": "logit_time",
        }
        for one in computations(load("w.json")):
            if one.module in sections and one.phase is Phase.FWD:
                assert not isinstance(one.op, Kernel)
                kept = [t for t in samples[one.op] if t <= 3 * min(samples[one.op])]
                part = profile.parts[sections[one.module]]
                assert part.min_s == pytest.approx(min(kept))
                assert part.max_s == pytest.approx(max(kept))
                assert part.avg_s == pytest.approx(sum(kept) / len(kept))
        again = run("fill w.json --compute-from profile.txt -o again.json")
        assert again.code == 0, again.err
        # As in AICB, each pass takes the mean of the forward pass.
        times = by_phase(load("again.json"), "mlp.down")
        assert list(times.values()) == pytest.approx([profile.parts["mlp_linear_2"].avg_s] * 3)

    def test_a_run_that_was_cut_short_is_resumed_and_written(self, run: Program) -> None:
        """`stepmark resume` needs no flags: the plan has the workload and the file's name."""
        write("small.json", PRODUCT, NORM)
        assert run(f"fill small.json {CPU} --runs mine -o f.json").code == 0
        folder = only_run(Path("mine"))
        records = folder / "records.jsonl"
        first, _ = records.read_text().splitlines(keepends=True)
        records.write_text(first)
        for name in ("f.json", "small.json"):
            Path(name).unlink()
        done = run(str(folder), verb="resume")
        assert done.code == 0, done.err
        assert records.read_text().startswith(first)
        medians = medians_of(folder)
        assert [one.time_s for one in computations(load("f.json"))] == [
            medians[PRODUCT],
            medians[NORM],
        ]


@pytest.mark.ranks
class TestNotMeasured:
    """Products fail or are wrong; a kernel is no operator."""

    @pytest.fixture(autouse=True)
    def _bad(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STEPMARK_TEST_HOOK", "tests.cli.bad_gemm")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("BAD_GEMM", "raises")

    @pytest.mark.parametrize(("kind", "code"), [("raises", 3), ("wrong", 1)])
    def test_the_file_keeps_its_time(
        self, run: Program, kind: str, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BAD_GEMM", kind)
        write("timed.json", PRODUCT, NORM, ADD, time_s=3e-6)
        done = run(f"fill timed.json {CPU} -o f.json")
        assert done.code == code, done.err
        norm_s = medians_of(only_run(Path("runs")))[NORM]
        assert [one.time_s for one in computations(load("f.json"))] == [3e-6, norm_s, 3e-6]
        assert load("f.json").notes[-1].endswith(", the file's own.")
        assert "without a time" not in done.err

    def test_another_source_comes_before_that(self, run: Program) -> None:
        write("timed.json", PRODUCT, NORM, ADD, time_s=3e-6)
        done = run(f"fill timed.json {CPU} --compute-from fixed:5us -o f.json")
        assert done.code == 3
        norm_s = medians_of(only_run(Path("runs")))[NORM]
        assert [one.time_s for one in computations(load("f.json"))] == [5e-6, norm_s, 5e-6]

    def test_without_any_time_nothing_is_written(self, run: Program) -> None:
        write("small.json", PRODUCT, ADD)
        done = run(f"fill small.json {CPU} -o f.json")
        assert done.code == 3
        assert "no workload is written: no operator was measured" in done.err
        assert not Path("f.json").exists()


def test_a_dry_run_lists_the_operators(run: Program) -> None:
    done = run(f"fill w.json {CPU} --dry-run")
    assert done.code == 0, done.err
    assert "attention.core bwd" in done.text
    assert "b1 s64" in done.text
    assert done.err.endswith("none was run\n")
    assert not Path("runs").exists()
    named = run("fill w.json --measure --device h200-sxm --backend cudnn,compile --dry-run")
    backends = " ".join(named.text.partition("Backends: ")[2].split())
    assert set(re.findall(r"by ([\w, -]+)", backends)) == {"cudnn", "compile", "torch"}


def test_times_from_sources_alone(run: Program) -> None:
    """What the source lacks keeps its time, or is named."""
    write("timed.json", PRODUCT, Kernel(name="x"), time_s=3e-6)
    done = run("fill timed.json --compute-from roofline:h200-sxm -o f.json")
    assert done.code == 0, done.err
    product, kernel = computations(load("f.json"))
    assert product.time_s != kernel.time_s == 3e-6
    write("plain.json", PRODUCT, Kernel(name="x"))
    done = run("fill plain.json --compute-from roofline:h200-sxm -o -")
    assert done.code == 0
    assert "# operations without a time (1): kernel name=x (part.1)\n" in done.err
    assert done.workload.notes == ("Compute times: roofline of NVIDIA H200.",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("w.json", ("--measure is missing: give --measure", "--compute-from")),
        ("w.json --budget 3s --compute-from fixed:1ns", ("--budget", "only with --measure")),
        ("w.json --dry-run --compute-from fixed:1ns", ("--dry-run", "only with --measure")),
        (f"w.json {CPU} --device tpu", ("--device tpu", "cpu")),
        (f"none.json {CPU}", ("none.json", "a file that exists")),
        (f"{SIMAI} {CPU}", ("simai_no_aiob.txt", "it has none")),
        (f"kernels.json {CPU}", ("kernels.json", "it has none")),
        (f"product.json {CPU} --to aiob", ("--to aiob", "no part")),
        (f"w.json {CPU} --backend fast", ("--backend fast", "cudnn")),
        (f"w.json {CPU} --to word", ("--to word", "aiob")),
        (f"w.json {CPU} --to simai --stage 9", ("--stage 9", "0, the only stage")),
        (f"w.json {CPU} --to param --rank 9", ("--rank 9", "from 0 to 1")),
        (
            f"w.json {CPU} --compute-from none",
            ("--compute-from none", "AIOB profile", "latest"),
        ),
        (f"w.json {CPU} --compute-from fixed:0", ("fixed:0", "above 0")),
        (f"w.json {CPU} --group-sizes ep=2", ("--group-sizes ep=2", "native")),
        (f"w.json {CPU} -o folder/", ("-o folder/", "a file")),
        (f"w.json {CPU} -o w.json/f.json", ("-o w.json", "a folder")),
        (f"w.json {CPU} --runs w.json", ("--runs w.json", "a folder")),
    ],
)
def test_bad_input(run: Program, line: str, words: tuple[str, ...]) -> None:
    write("kernels.json", ADD)
    write("product.json", ADD, PRODUCT)
    refused(run(f"fill {line}"), *words)
    assert not Path("runs").exists() or not any(Path("runs").iterdir())
