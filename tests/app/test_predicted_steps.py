"""stepmark predict: against steps that were measured on an H200, what it refuses, and laws."""

import gzip
import hashlib
import io
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.app.test_calibrate import STEPS, planned, step_of

from stepmark.app import parts, predict_target
from stepmark.app.likeness import is_like
from stepmark.app.parts import read_parts
from stepmark.app.predict import facts, predict
from stepmark.app.predict_target import Target
from stepmark.cli import main
from stepmark.core.stats import slowest_per_sample
from stepmark.core.train_case import TrainCase
from stepmark.core.workload import CommOp
from stepmark.store.reader import read_records
from stepmark.workload.rules.pytorch.case import of_case

DATA = Path(__file__).parents[1] / "data" / "h200-steps"
GPT2, LLAMA = "20261123-210511-f1ca", "20261123-210652-0a57"
WORDS = {
    GPT2: "gpt2-1.5b --strategy single --mbs 8 --compile",
    LLAMA: "llama-3.1-8b --strategy single --seq-len 4096 --compile --precision bf16",
}
MEASURED = json.loads((DATA / "measured.json").read_text())
SHEET = "llama-3.1-8b --strategy fsdp --nproc 8 --mbs 2 --device h100-sxm"
Predict = Callable[[str], tuple[int, Any, str]]


def joined(words: object) -> str:
    """Return the name of a case without blanks, which mutate.py can run alone."""
    return str(words).replace(" ", "_")


def copy_runs(folder: Path) -> Path:
    """Write the calibrations as runs."""
    for run in (GPT2, LLAMA):
        shutil.copytree(DATA / run, folder / run)
        packed = folder / run / "records.jsonl.gz"
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Predict:
    monkeypatch.chdir(runs.parent)

    def call(words: str) -> tuple[int, Any, str]:
        """Return the exit code, the document of --json and what else is said."""
        more = [] if "--runs" in words else ["--runs", str(runs)]
        code = main.status(["predict", *shlex.split(words), *more, "--json", "-"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, json.loads(out) if out else None, err

    return call


@cache
def parts_of(path: Path, words: str) -> parts.Parts:
    return read_parts(path, step_of(words))


def step_s(runs: Path, name: str, case: TrainCase, **changes: float) -> float:
    """The predicted step of a case by a calibration."""
    own = parts_of(runs / name, WORDS[name])
    target = Target(
        name="step",
        workload=of_case(case),
        case=case,
        device=own.device,
        device_name=own.device_name,
        parts=own,
    )
    return predict(target, changes)[0].step_s


# As far as they were off when these rows were recorded, rounded up: in percent of the measured
# value, and of the step for all lines together. The median of the clock is lower than the mean
# that is predicted in long steps, since it is high for some 60 ms after the optimizer. These
# traces have no steps back to back, which tell how much slower products are at a lower clock.
BOUNDS = {
    GPT2: {"step": 0.5, "lines": 4.0, "sum": 1.5, "clock": 6.0, "energy": 1.0},
    LLAMA: {"step": 2.2, "lines": 4.0, "sum": 2.5, "clock": 9.0, "energy": 3.5},
}
CALIBRATED = {GPT2: 0.1, LLAMA: 1.7}
MEMORY = {"allocated_bytes": 0.1, "reserved_bytes": 1.0}


def off(value: float, measured: float) -> float:
    return abs(value / measured - 1) * 100


@pytest.mark.parametrize("name", [GPT2, LLAMA])
def test_a_measured_step_is_predicted_line_by_line(run: Predict, name: str) -> None:
    measured, bounds = MEASURED[name], BOUNDS[name]
    code, document, _ = run(f"{WORDS[name]} --calibration {name} --device h200")
    assert code == 0
    assert off(document["step_s"], measured["step_ns"] * 1e-9) <= bounds["step"]
    assert off(document["clock_hz"], measured["clock_hz"]) <= bounds["clock"]
    assert off(document["energy_j"], measured["energy_j"]) <= bounds["energy"]
    for size, bound in MEMORY.items():
        assert off(document["memory"][size], measured[size]) <= bound
    own = {(row["group"], row["line"]): row["time_ns"] for row in document["ledger"]}
    lines = {(group, line): time_ns for group, line, time_ns in measured["ledger"]}
    for line, time_ns in lines.items():
        if time_ns > 0.05 * measured["step_ns"]:
            assert off(own[line], time_ns) <= bounds["lines"], line
    differences = (abs(own.get(n, 0) - lines.get(n, 0)) for n in own.keys() | lines.keys())
    assert sum(differences) <= bounds["sum"] / 100 * measured["step_ns"]
    # It says which run its parts are of, and when and where that was.
    assert any(f"{name} of 2026-11-23 21:0" in note for note in document["notes"])


@pytest.mark.parametrize("name", [GPT2, LLAMA])
def test_a_calibrated_step_is_predicted_as_it_was_measured(
    run: Predict, runs: Path, name: str
) -> None:
    record = next(iter(read_records(runs / name)))
    seconds = slowest_per_sample(record.samples.seconds)  # type: ignore[union-attr]
    _, document, _ = run(f"--from-run {name} --num-layers 2")
    assert off(document["step_s"], sum(seconds) / len(seconds)) <= CALIBRATED[name]


def test_a_run_predicts_its_own_step(run: Predict) -> None:
    """Of a calibration it is the step with all layers; options change it."""
    _, document, _ = run(f"--from-run {LLAMA}")
    assert document == run(f"--from-run {LLAMA}")[1]
    _, direct, _ = run(f"{WORDS[LLAMA]} --calibration {LLAMA} --device h200")
    assert {**direct, "notes": document["notes"]} == document
    _, changed, _ = run(f"--from-run {LLAMA} --mbs 2 --gbs 8")
    assert (changed["mbs"], changed["tokens"]) == (2, 8 * 4096)
    assert 6.5 < changed["step_s"] / document["step_s"] < 7  # one optimizer step
    assert any("scaled from other shapes" in note for note in changed["notes"])


@pytest.mark.parametrize(
    ("words", "kept"),
    {
        "--device h100-sxm": "NVIDIA H200: --seq-len 4096 --precision bf16 --compile",
        "--device h100-sxm --precision amp --seq-len 4096": "NVIDIA H200: --compile",
        "--device h100-sxm --model gpt2-125m": "NVIDIA H200: --precision bf16 --compile",
        "--device h200": None,  # the run's
        "": None,
    }.items(),
    ids=joined,
)
def test_options_of_a_run_on_another_device_are_named(
    run: Predict, words: str, kept: str | None
) -> None:
    """They are those of the machine that was measured: fp32 of a CPU, for one."""
    _, document, _ = run(f"--from-run {LLAMA} {words}")
    notes = [note for note in document["notes"] if "keeps these options" in note]
    assert [note.partition("which is of ")[2] for note in notes] == ([kept] if kept else [])


# What is not predicted, and what the sentence says.
REFUSED = {
    # Of another device, model, strategy or precision.
    f"{WORDS[GPT2]} --calibration {GPT2} --device h100-sxm": "on NVIDIA H100 80GB HBM3, not",
    f"{WORDS[GPT2]} --calibration {LLAMA} --device h200": "differs in precision, model)",
    f"{WORDS[GPT2]} --precision bf16 --from-run {GPT2}": "profile differs in precision",
    f"--ac full --from-run {GPT2}": f"from-run {GPT2} is invalid: it must be a run with a pro",
    f"--ac 1/2 --from-run {GPT2}": "profile differs in ac)",
    f"--clip 0 --from-run {GPT2}": "profile differs in clip",
    "gpt2-1.5b --strategy ddp --nproc 4 --mbs 8 --compile --device h200 --calibration "
    + GPT2: "profile differs in strategy",
    "gpt2-125m --device cpu": "stepmark calibrate",
    "gpt2-125m --device cpu --calibration none": "a path, an id",
    # Options.
    "llama-3.1-8b --nproc 1 --device h900": "device h900 is invalid: did you mean h200?",
    f"{SHEET} --what-if link=-1x": "above 0",
    f"{SHEET} --what-if link=0x": "above 0",
    f"{SHEET} --what-if link=nanx": "above 0",
    f"{SHEET} --what-if hbm=2": "such as link=2x",
    f"{SHEET} --what-if hbm=2x,hbm=3x": "each once",
    f"{SHEET} --what-if ,": "at least one change",
    f"{SHEET} --what-if power=500W": "measured the power of a GPU",
    f"--from-run {GPT2} --what-if power=90W": "above 123 W, idle",
    f"--from-run {GPT2} --what-if power=150W": "at the lowest clock",
    f"{SHEET} --gbs 24": "a multiple of --mbs x data ranks (16)",
    f"{SHEET} --gbs 0": "a multiple of",
    f"{SHEET} --gbs 32 --grad-accum 4": "--grad-accum (4)",
    f"{SHEET} --mbs 1,2": "mbs 1,2 is invalid: it must be one value",
    f"{SHEET} --strategy ddp,fsdp": "strategy ddp,fsdp is invalid: it must be one value",
    "llama-3.1-8b --device h200": "nproc is missing: give the number of ranks",
    "nosuch.json --device h200": "model nosuch.json is invalid: it must be a readable file",
    f"{SHEET} --text": "does not change a prediction",
    f"{SHEET} --force": "only with --calibration",
    f"{SHEET} --fp8": "add --no-fp8-all-gather",
    # Files.
    "w.json": "give the name of a device",
    "w.json --device cpu": "must be one of h100",
    "w.json --device h200 --mbs 2": "a workload file says what its step is",
    "w.json --device h200 --gbs 8": "a workload file says what its step is",
    f"w.json --from-run {GPT2}": "a workload file says what its step is",
    f"w.json --calibration {GPT2} --device h100-sxm": "not NVIDIA H200",
    "cut.json --device h200": "JSON",
    "empty.json --device h200": "an empty file",
    "simai.txt --device h200": "known costs",
    "none.json --nproc 1 --device h200": "none.json",
}


@pytest.fixture(scope="module")
def files(runs: Path) -> None:
    """Workload files in the folder in which predictions run."""
    folder = runs.parent
    words = ["workload", "generate", "--model", "gpt2-125m", "--framework", "fsdp"]
    assert main.status([*words, "--world-size", "4", "-o", str(folder / "w.json")]) == 0
    (folder / "cut.json").write_bytes((folder / "w.json").read_bytes()[:3000])
    (folder / "empty.json").touch()
    simai = ["--framework", "megatron", "--world-size", "4", "--tp", "2", "--format", "simai"]
    words = ["workload", "generate", "--model", "gpt2-125m", *simai]
    assert main.status([*words, "-o", str(folder / "simai.txt")]) == 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", REFUSED, ids=joined)
def test_what_cannot_be_predicted_is_refused(run: Predict, words: str) -> None:
    code, document, error = run(words)
    assert (code, document) == (2, None)
    assert REFUSED[words] in error
    assert len(error.strip().splitlines()) == 1, error


# What is predicted, and what has to be said of it.
NOTED = {
    f"{SHEET} --compile --attention flash": "takes as long without --attention, --compile",
    f"{SHEET} --schedule micro --grad-accum 8": "takes as long without --schedule",
    f"{SHEET} --clip 2": "takes as long without --clip",
    SHEET: "the host's time is not known",
    f"{SHEET} --nproc 64": "64 GPUs communicate as 8 of one host do",
    "llama-3.1-8b --nproc 144 --device gb200": "144 GPUs communicate as 72 of one host do",
    f"{SHEET} --nproc 16 --tp 8 --clip 0": "of one host do",  # in groups of two and eight
    f"--from-run {GPT2} --what-if link=2x": "link has no effect",
    f"--from-run {GPT2} --what-if hbm=2x": "without --what-if the step takes",
    f"{WORDS[GPT2]} --calibration {GPT2} --device h100-sxm --force": "not of NVIDIA H100 80GB",
    "w.json --device h200": "100% of the compute time is the data sheet's of NVIDIA H200",
    f"w.json --calibration {GPT2}": f"run {GPT2} of 2026-11-23",
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", NOTED, ids=joined)
def test_what_a_prediction_lacks_is_said(run: Predict, words: str) -> None:
    code, document, _ = run(words)
    assert code == 0
    assert any(NOTED[words] in note for note in document["notes"]), document["notes"]
    spans_hosts = any("links between hosts" in note for note in document["notes"])
    assert document["is_lower_bound"] == spans_hosts == ("host" in NOTED[words].split())
    has_sheet = "data sheet" in " ".join(document["notes"])
    assert document["host_is_known"] == (not has_sheet)


@pytest.mark.usefixtures("files")
def test_a_workload_is_read_from_stdin(
    run: Predict, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (runs.parent / "w.json").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert run("- --device h200")[1] == run("w.json --device h200")[1]


def test_times_of_a_file_stand_in_where_no_cost_is_known(
    run: Predict, runs: Path, tmp_path: Path
) -> None:
    """SimAI's rows have times and no shapes; 1 ns stands for an unknown one."""
    simai = (runs.parent / "simai.txt").read_text().splitlines()
    rows = [line.split() for line in simai]
    timed = ["\t".join("5000000" if c == "1" and i in (2, 5, 8) else c for i, c in enumerate(r))
             for r in rows]  # fmt: skip
    (tmp_path / "timed.txt").write_text("\n".join([simai[0], simai[1], *timed[2:]]) + "\n")
    code, document, error = run(f"{tmp_path / 'timed.txt'} --device h200")
    assert code == 0, error
    assert any("the workload file's own" in note for note in document["notes"])
    assert document["sources_s"]["file"] > 0.005
    assert "unknown" in document["sources_s"]


def test_a_value_that_is_off_counts_as_given(run: Predict) -> None:
    """--clip 0 leaves the optimizer's norm out."""
    (_, clipped, _), (_, free, _) = run(SHEET), run(f"{SHEET} --clip 0")
    assert free["step_s"] < clipped["step_s"]


@pytest.mark.parametrize(
    "words", ["--grad-accum 8", "--gbs 128", "--grad-accum 8 --gbs 128"], ids=joined
)
@pytest.mark.parametrize("schedule", ["", " --schedule micro"], ids=joined)
def test_tokens_are_those_of_an_optimizer_step(run: Predict, words: str, schedule: str) -> None:
    _, document, _ = run(f"{SHEET} {words}{schedule}")
    assert document["tokens"] == 128 * 8192
    assert document["tokens_per_s"] == document["tokens"] / document["step_s"]
    assert 50 < document["mfu_pct"] < 70


# ---- damaged calibrations


def rewritten(path: Path, change: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the records that `change` returns True for; it may change them."""
    file = path / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(r) + "\n" for r in records if change(r)))


def roles(record: dict[str, Any]) -> Iterable[str]:
    return [label["role"] for label in record["case"]["labels"]]


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    return copy_runs(tmp_path / "copies")


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("kernels", "must be a run with a profile of gpt2-1.5b single; stepmark calibrate"),
        ("host", "the host's time was not calibrated"),
        ("power", "power was not calibrated"),
    ],
    ids=joined,
)
def test_a_missing_part_is_named(run: Predict, copies: Path, role: str, text: str) -> None:
    rewritten(copies / GPT2, lambda record: role not in roles(record))
    code, document, error = run(
        f"{WORDS[GPT2]} --calibration {GPT2} --device h200 --runs {copies}"
    )
    assert code == (2 if role == "kernels" else 0)
    assert text in (error if code else " ".join(document["notes"]))


@pytest.mark.parametrize(("factor", "is_noted"), [(1.0, False), (2.0, True)])
def test_parts_that_do_not_give_the_calibrated_step_are_doubted(
    run: Predict, copies: Path, factor: float, is_noted: bool
) -> None:
    """Without power, to which the model of a single GPU is fitted."""

    def slower(record: dict[str, Any]) -> bool:
        if "kernels" in roles(record):
            seconds = record["samples"]["seconds"]
            record["samples"]["seconds"] = [[factor * s for s in rank] for rank in seconds]
        return "power" not in roles(record)

    rewritten(copies / GPT2, slower)
    _, document, error = run(f"--from-run {GPT2} --runs {copies}")
    text = "the calibrated step (2 layers) took "
    assert any(note.startswith(text) for note in document["notes"]) == is_noted, document
    assert not error


def test_the_optimizer_of_a_calibrated_step_has_few_layers_to_issue(
    run: Predict, copies: Path
) -> None:
    """Its host time is measured with all 48 layers, the calibrated step has two."""

    def slow_optimizer(record: dict[str, Any]) -> bool:
        if "host" in roles(record):
            record["training"]["optim_s"] = [[0.15] * 9]
        return True

    rewritten(copies / GPT2, slow_optimizer)
    _, document, _ = run(f"--from-run {GPT2} --runs {copies}")
    assert not any("the calibrated step" in note for note in document["notes"])


def test_a_calibration_by_another_method_is_refused(run: Predict, copies: Path) -> None:
    def newer(record: dict[str, Any]) -> bool:
        record["samples"]["method"] = record["samples"]["method"].replace("/1", "/9")
        return True

    rewritten(copies / GPT2, newer)
    words = f"--from-run {GPT2} --runs {copies}"
    code, _, error = run(words)
    assert (code, "not by train-step-events/9; or --force" in error) == (2, True)
    assert run(f"{words} --force")[0] == 0


def trace_of(path: Path) -> Path:
    (trace,) = (path / "traces").iterdir()
    return trace


def test_a_trace_that_cannot_be_read_is_refused(run: Predict, copies: Path) -> None:
    trace = trace_of(copies / GPT2)
    whole = trace.read_bytes()
    for text in (*(whole[: 10**size] for size in (2, 4)), b"", gzip.compress(b"{}")):
        trace.write_bytes(text)
        code, document, _ = run(f"--from-run {GPT2} --runs {copies}")
        assert (code, document) == (2, None)
    trace.unlink()
    assert "a file that exists" in run(f"--from-run {GPT2} --runs {copies}")[2]


def test_a_trace_of_another_step_is_refused_or_noted(run: Predict, copies: Path) -> None:
    first, second = (trace_of(copies / name) for name in (GPT2, LLAMA))
    first_text, second_text = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_text)
    second.write_bytes(first_text)
    # These records have no hash: a longer step cannot be theirs, a shorter one may.
    code, _, error = run(f"--from-run {GPT2} --runs {copies}")
    assert (code, "of kernels in a step of" in error) == (2, True)
    _, document, _ = run(f"--from-run {LLAMA} --runs {copies}")
    assert "81 of 81 products have a shape that the workload has not" in document["notes"]

    def with_hash(record: dict[str, Any]) -> bool:
        if record["case"].get("mbs"):
            digest = hashlib.sha256(second_text).hexdigest()
            record["training"]["trace_sha256"] = [digest]
        return True

    rewritten(copies / LLAMA, with_hash)
    code, _, error = run(f"--from-run {LLAMA} --runs {copies}")
    assert (code, "changed or replaced" in error) == (2, True)
    second.write_bytes(second_text)
    assert run(f"--from-run {LLAMA} --runs {copies}")[0] == 0


def test_a_run_without_its_environment_is_refused(run: Predict, copies: Path) -> None:
    (copies / GPT2 / "run.json").unlink()
    code, _, error = run(f"{WORDS[GPT2]} --calibration {GPT2} --device h200 --runs {copies}")
    assert (code, "a file that can be read" in error) == (2, True)


def test_an_old_calibration_says_how_old_it_is(run: Predict, copies: Path) -> None:
    file = copies / GPT2 / "run.json"
    file.write_text(file.read_text().replace("2026-11-23", "2026-10-01"))
    _, document, _ = run(f"--from-run {GPT2} --runs {copies}")
    assert any("2026-10-01 21:05" in n and "days ago" in n for n in document["notes"])


def test_a_step_of_as_few_layers_as_its_part_is_predicted(run: Predict, copies: Path) -> None:
    """One record is its part for kernels and for the host."""

    def both(record: dict[str, Any]) -> bool:
        if "kernels" in roles(record):
            record["case"]["labels"] += [{**record["case"]["labels"][0], "role": "host"}]
        return "host" not in roles(record) or "kernels" in roles(record)

    rewritten(copies / GPT2, both)
    code, document, error = run(f"--from-run {GPT2} --runs {copies}")
    assert (code, document and document["name"]) == (0, "gpt2-1.5b@2-layers single"), error


def test_a_calibration_of_another_cpu_host_is_not_taken_by_itself(
    run: Predict, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_cpu(record: dict[str, Any]) -> bool:
        record["case"]["device"], record["case"]["backend"] = "cpu", "gloo"
        return "power" not in roles(record)

    rewritten(copies / GPT2, on_cpu)
    words = f"{WORDS[GPT2]} --device cpu --precision amp --runs {copies}"
    monkeypatch.setattr(predict_target.socket, "gethostname", lambda: "here")
    assert "stepmark calibrate" in run(words)[2]
    assert "on here, not vm; or --force" in run(f"{words} --calibration {GPT2}")[2]
    monkeypatch.setattr(predict_target.socket, "gethostname", lambda: "vm")
    assert run(words)[0] == 0


def test_a_step_in_fp8_names_its_peak_and_what_has_no_time(run: Predict) -> None:
    words = f"{SHEET} --no-fp8-all-gather"
    code, low, _ = run(f"{words} --fp8")
    assert code == 0
    plain = run(SHEET)[1]
    assert low["step_s"] < plain["step_s"]
    assert low["peak_flops_per_s"] == plain["peak_flops_per_s"]
    assert "MFU and HFU are of the bf16 peak, not of the FP8 peak" in low["notes"]
    assert any(note.startswith("casts to FP8 take no time") for note in low["notes"])
    assert not any("FP8" in note for note in plain["notes"])


# ---- laws


@pytest.mark.parametrize(
    "words", [*STEPS, SHEET.removesuffix(" --device h100-sxm")], ids=joined
)
def test_lines_add_up_to_the_step_and_faster_devices_are_not_slower(words: str) -> None:
    case = step_of(words)
    if case.fp8_all_gather:
        case = replace(case, fp8_all_gather=False)
    spec = predict_target._spec("h200")
    target = Target(
        name="step",
        workload=of_case(case),
        case=case,
        device=spec,
        device_name="h200",
        parts=None,
    )
    prediction, _ = predict(target, {})
    for ledger in prediction.timeline.ledgers:
        assert sum(ledger.lines.values()) == round(prediction.step_s * 1e9)
    for name in ("link", "hbm", "flops"):
        assert predict(target, {name: 1.0})[0].timeline.ledgers == prediction.timeline.ledgers
        assert predict(target, {name: 2.0})[0].step_s <= prediction.step_s * (1 + 1e-9)
    assert facts(target).tokens == case.tokens_per_step * case.grad_accum


def test_a_change_acts_on_what_an_operation_is_bound_by(run: Predict) -> None:
    """Products of 16 tokens read weights; a ring of small messages has a latency."""
    words = "gpt2-1.5b --strategy single --nproc 1 --seq-len 16 --device h100-sxm --what-if"
    (_, memory, _), (_, rate, _) = run(f"{words} hbm=2x"), run(f"{words} flops=2x")
    (before,) = (note for note in rate["notes"] if note.startswith("without --what-if"))
    base_s = float(before.split()[-2]) * 1e-3
    idle_s = sum(r["time_ns"] for r in rate["ledger"] if r["group"] == "idle") * 1e-9
    assert memory["step_s"] - idle_s == pytest.approx((base_s - idle_s) / 2, rel=0.01)
    assert rate["step_s"] == pytest.approx(base_s, rel=0.01)
    # MFU is of the changed device's peak: it was 111 % of the unchanged one's.
    assert rate["peak_flops_per_s"] == 2 * memory["peak_flops_per_s"]
    assert rate["mfu_pct"] == pytest.approx(memory["mfu_pct"] / 4, rel=0.1)
    small = "gpt2-125m --strategy tp --nproc 4 --seq-len 16 --device h100-sxm"
    _, faster, _ = run(f"{small} --what-if link=1000000x")
    hops_s = sum(count * hops * 2.5e-6 for hops, count in messages_of(small).items())
    assert faster["comm_s"] == pytest.approx(hops_s, rel=0.01)


def messages_of(words: str) -> Counter[int]:
    """Collectives of the step by their hops in a ring."""
    case = step_of(words.replace("--device h100-sxm", ""))
    ops = [op for op in of_case(case).expand() if isinstance(op, CommOp)]
    return Counter(6 if op.collective == "all_reduce" else 3 for op in ops)


@pytest.mark.parametrize("name", [GPT2, LLAMA])
def test_faster_parts_make_no_calibrated_step_slower(runs: Path, name: str) -> None:
    """A product that is twice as fast draws more power, which lowers the clock."""
    case = step_of(WORDS[name])
    base = step_s(runs, name, case)
    for what in ("link", "hbm", "flops"):
        assert step_s(runs, name, case, **{what: 1.0}) == base
        assert step_s(runs, name, case, **{what: 2.0}) <= base
    watts = [step_s(runs, name, case, power=watts) for watts in (400.0, 550.0, 700.0, 900.0)]
    assert watts == sorted(watts, reverse=True)


@pytest.mark.parametrize("name", [GPT2, LLAMA])
def test_more_work_takes_longer(runs: Path, name: str) -> None:
    case = step_of(WORDS[name])
    base = step_s(runs, name, case)
    fewer = replace(case, model=case.model.with_layers(case.model.num_layers - 1))
    shorter = replace(case, model=replace(case.model, seq_len=case.model.seq_len // 2))
    assert step_s(runs, name, fewer) < base
    assert step_s(runs, name, shorter) < base
    times = [step_s(runs, name, replace(case, grad_accum=count)) for count in (1, 2, 3, 8)]
    assert times == sorted(times)
    steps = [step_s(runs, name, replace(case, mbs=mbs)) for mbs in (1, 2, 3, 8, 9)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("words", STEPS, ids=joined)
def test_the_profiled_part_fits_the_step_of_which_it_is(words: str) -> None:
    """Of every model, those with experts and dense layers too."""
    kernels, host = (entry.case for entry in planned(words).entries[:2])
    assert isinstance(kernels, TrainCase)
    assert isinstance(host, TrainCase)
    step = step_of(words)
    assert is_like(kernels, step)
    bare = replace(host, scale="", model=step.model, mbs=step.mbs, parallel=step.parallel)
    assert is_like(bare, step)


def test_copies_have_their_group_in_both_ledgers(run: Predict) -> None:
    _, document, _ = run(f"--from-run {GPT2}")
    groups = Counter(row["group"] for row in document["ledger"] if row["line"] == "copy")
    assert groups == {"copies": 1}


def test_of_many_stages_few_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "rows.csv"
    words = "predict llama-3.1-8b --pp 8 --nproc 8 --mbs 8 --device h200 --csv"
    assert main.status([*words.split(), str(csv)]) == 0
    shown = capsys.readouterr().out
    assert re.search("[23] of 8 stages: the first, the last, and that which waits least", shown)
    assert len(shown.splitlines()) < 60
    stages = {line.split(",")[0] for line in csv.read_text().splitlines()[1:]}
    assert stages == set(map(str, range(8)))
