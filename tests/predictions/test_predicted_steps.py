"""stepmark predict: against steps measured on an H200, what it refuses, and laws."""

import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.predictions.test_calibrate import STEPS, planned, step_of

from stepmark.cases.comm_curve import Curve
from stepmark.cases.train_case import TrainCase
from stepmark.cli import main
from stepmark.ground.stats import slowest_per_sample
from stepmark.model.device import load_devices
from stepmark.model.parallel import ParallelConfig
from stepmark.model.systems import network_of
from stepmark.predictions.calibration import is_like
from stepmark.predictions.inputs import changed
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import of_training
from stepmark.step.workload import CommOp
from stepmark.store.reader import read_records
from stepmark.workloads.rules.pytorch.case import of_case

from .predicted_runs import GPT2, LLAMA, MEASURED, SHEET, WORDS, Predict, joined, step_s

NCCL_TESTS = Path(__file__).parents[1] / "data" / "nccl-tests"

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
    "llama-3.1-8b --nproc 1 --device h900": "device h900 is invalid: did you mean h800?",
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
    f"{SHEET} --schedule step,micro": "schedule step,micro is invalid: it must be one value",
    f"{SHEET} gpt2-125m": "model llama-3.1-8b,gpt2-125m is invalid: it must be one value",
    "llama-3.1-8b --device h200": "nproc is missing: give the number of ranks",
    "nosuch.json --device h200": "model nosuch.json is invalid: it must be a file that exists",
    f"{SHEET} --text": "does not change a prediction",
    f"{SHEET} --force": "only with --calibration",
    # Files.
    "w.json": "give the name of a device",
    "w.json --device cpu": "must be one of h100",
    f"{SHEET} --network dgx-h10": "did you mean dgx-h100",
    f"{WORDS[GPT2]} --device h200 --network dgx-h200": "only with --device and several ranks",
    f"{WORDS[GPT2]} --device h200 --oversubscription 2": "only with --device and several ranks",
    f"{WORDS[GPT2]} --device h200 --nic 400G": "--nic",
    f"{SHEET} --nproc 4 --curve nothing.txt": "a file that exists, or",
    "llama-3.1-8b --nproc 64 --device l40s": "--network is missing: give one of dgx-a100",
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
    (folder / "nccl.txt").write_bytes((NCCL_TESTS / "8xH200-all_reduce.txt").read_bytes())
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
    f"{SHEET} --compile-mode max-autotune-no-cudagraphs --compile --attention flash": (
        "takes as long without --compile-mode"
    ),
    f"{SHEET} --schedule micro --grad-accum 8": "takes as long without --schedule",
    f"{SHEET} --clip 2": "takes as long without --clip",
    SHEET: "host time: typical, 109 us per eager forward operation (measured 2026-11-29",
    f"{SHEET} --nproc 64": "are by the links of dgx-h100 and published curves",
    f"{SHEET} --nproc 4 --curve nccl.txt": "links of h100-sxm, fitted to measured curves",
    "llama-3.1-8b --nproc 144 --device gb200": "by the links of gb200-nvl72",
    f"--from-run {GPT2} --what-if link=2x": "link has no effect",
    f"--from-run {GPT2} --what-if hbm=2x": "without --what-if the step takes",
    f"{WORDS[GPT2]} --calibration {GPT2} --device h100-sxm --force": "not of NVIDIA H100 80GB",
    "w.json --device h200": "compute time is by operators that were measured sustained on h200",
    f"w.json --calibration {GPT2}": f"run {GPT2} of 2026-11-23",
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", NOTED, ids=joined)
def test_what_a_prediction_lacks_is_said(run: Predict, words: str) -> None:
    code, document, _ = run(words)
    assert code == 0
    assert any(NOTED[words] in note for note in document["notes"]), document["notes"]
    assert not document["is_lower_bound"]
    assert document["host_is_known"]


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
    assert 45 < document["mfu_pct"] < 70


def test_a_step_in_fp8_names_its_peak_and_has_casts(run: Predict) -> None:
    words = f"{SHEET} --no-fp8-all-gather"
    code, low, _ = run(f"{words} --fp8")
    assert code == 0
    plain = run(SHEET)[1]
    assert low["step_s"] < plain["step_s"]
    assert low["peak_flops_per_s"] == plain["peak_flops_per_s"]
    (note,) = (note for note in low["notes"] if "peak" in note)
    assert note == (
        "MFU and HFU are of the bf16 peak, not of the fp8_e4m3 peak, which is 2 times as high"
    )
    assert not any("peak" in note for note in plain["notes"])
    products, casts = (
        [
            sum(row["time_ns"] for row in document["ledger"] if row["line"] == line)
            for document in (low, plain)
        ]
        for line in ("matmul", "norm and elementwise")
    )
    assert products[0] < products[1]
    assert casts[0] > casts[1]


def test_precision_fp8_is_fp8(run: Predict) -> None:
    words = f"{SHEET} --no-fp8-all-gather"
    assert run(f"{words} --fp8")[1] == run(f"{words} --precision fp8")[1]


# ---- laws


@pytest.mark.parametrize(
    "words", [*STEPS, SHEET.removesuffix(" --device h100-sxm")], ids=joined
)
def test_lines_add_up_to_the_step_and_faster_devices_are_not_slower(words: str) -> None:
    case = step_of(words)
    if case.fp8_all_gather:
        case = replace(case, fp8_all_gather=False)
    inputs = of_training(case, None, "NVIDIA H200")
    prediction = predict(inputs)
    for ledger in prediction.step.ledgers:
        assert sum(ledger.lines.values()) == round(prediction.step_s * 1e9)
    for name in ("link", "hbm", "flops"):
        same = predict(changed(inputs, {name: 1.0}))
        assert same.step.ledgers == prediction.step.ledgers
        faster = predict(changed(inputs, {name: 2.0}))
        assert faster.step_s <= prediction.step_s * (1 + 1e-9)
    assert prediction.document()["tokens"] == case.tokens_per_step * case.grad_accum


def test_a_change_acts_on_what_an_operation_is_bound_by(run: Predict) -> None:
    """Products of 16 tokens read weights; a ring of small messages has a latency."""
    words = "gpt2-1.5b --nproc 1 --cuda-graph --seq-len 16 --device h100-sxm --what-if"
    (_, memory, _), (_, rate, _) = run(f"{words} hbm=2x"), run(f"{words} flops=2x")
    (before,) = (note for note in rate["notes"] if note.startswith("without --what-if"))
    base_s = float(before.split()[-2]) * 1e-3
    idle_s = sum(r["time_ns"] for r in rate["ledger"] if r["group"] == "idle") * 1e-9
    assert memory["step_s"] - idle_s == pytest.approx((base_s - idle_s) / 2, rel=0.01)
    assert rate["step_s"] == pytest.approx(base_s, rel=0.01)
    # MFU is of the changed device's peak: it was 111 % of the unchanged one's.
    assert rate["peak_flops_per_s"] == 2 * memory["peak_flops_per_s"]
    assert rate["mfu_pct"] == pytest.approx(memory["mfu_pct"] / 4, rel=0.1)
    network = network_of(load_devices()["h100-sxm"], 4)
    assert network is not None
    small = "gpt2-125m --strategy tp --nproc 4 --seq-len 16 --device h100-sxm"
    _, faster, _ = run(f"{small} --what-if link=1000000x")
    hops_s = sum(
        count * network.fixed_s(collective, network.placement(range(4)))
        for collective, count in messages_of(small).items()
    )
    assert faster["comm_s"] == pytest.approx(hops_s, rel=0.01)


def messages_of(words: str) -> Counter[str]:
    """Return the collectives of the step."""
    case = step_of(words.replace("--device h100-sxm", ""))
    return Counter(op.collective for op in of_case(case).expand() if isinstance(op, CommOp))


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
    assert re.search(r"where the step goes in stages? [\d, -]+, the slowest of 8, in s", shown)
    assert len(shown.splitlines()) < 26
    stages = {line.split(",")[0] for line in csv.read_text().splitlines()[1:]}
    assert stages == set(map(str, range(8)))


def test_over_links_that_are_not_known_a_step_takes_at_least_as_long() -> None:
    """Two groups of eight, whose replicas are eight ranks apart; only curves of one host."""
    eight = step_of("gpt2-1.5b --strategy fsdp --nproc 8 --clip 0")
    case = replace(eight, parallel=ParallelConfig(dp_replicate=2, dp_shard=8))
    names = ("all_gather", "reduce_scatter", "all_reduce")
    curves = tuple(
        Curve(collective=name, num_ranks=8, points=((2**20, 1e-4),), source="", num_hosts=1)
        for name in names
    )
    inputs = of_training(case, None, "NVIDIA H100 80GB HBM3")
    known = predict(replace(inputs, curves=curves))
    assert not known.is_lower_bound
    unknown = predict(replace(inputs, curves=curves, network=None))
    assert unknown.is_lower_bound
    assert any("links between hosts are not known" in note for note in unknown.notes)
    over = tuple(replace(curve, num_ranks=16, num_hosts=2) for curve in curves)
    assert not predict(replace(inputs, curves=over, network=None)).is_lower_bound


PIPELINE = "llama-3.1-8b --nproc 16 --tp 2 --pp 4 --device h100-sxm"  # two data ranks


def test_gbs_of_a_pipeline_is_one_pass(run: Predict) -> None:
    """As many passes wait for as many bubbles."""
    _, one, _ = run(f"{PIPELINE} --gbs 64")
    assert one == run(f"{PIPELINE} --mbs 32 --pp-microbatches 32")[1]
    assert "1f1b of 32" in one["techniques"]
    _, pairs, _ = run(f"{PIPELINE} --gbs 64 --mbs 2")
    assert pairs == run(f"{PIPELINE} --mbs 32 --pp-microbatches 16")[1]
    assert pairs == run(f"{PIPELINE} --gbs 64 --pp-microbatches 16")[1]
    _, passes, _ = run(f"{PIPELINE} --gbs 64 --grad-accum 4")
    assert passes == run(f"{PIPELINE} --mbs 8 --pp-microbatches 8 --grad-accum 4")[1]
    assert one["tokens"] == pairs["tokens"] == passes["tokens"]
    assert passes["bubble_s"] > 3 * one["bubble_s"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gbs 63", "--gbs 63 is invalid: it must be a multiple of --mbs x data ranks (2)"),
        ("--gbs 64 --mbs 3", "a multiple of --mbs x data ranks (6)"),
        (
            "--gbs 64 --mbs 2 --pp-microbatches 8",
            "--pp-microbatches 8 is invalid: it must be 16",
        ),
        ("--gbs 64 --grad-accum 5", "a multiple of --mbs x data ranks x --grad-accum (10)"),
        ("--gbs 4", "it must be at least 4, the number of stages"),
    ],
)
def test_a_batch_that_a_pipeline_cannot_divide_is_refused(
    run: Predict, words: str, expected: str
) -> None:
    code, _, error = run(f"{PIPELINE} {words}")
    assert code == 2
    assert expected in error
