"""Training logs at the command line: `logs`, `compare`, `predict --measured` and `--anchor`."""

import csv
import json
from pathlib import Path

import pytest
from tests.job_logs.training_lines import VERSIONS, KnownStep, known_steps, mlperf
from tests.parsing import run

from stepmark.ground.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "logs" / "megatron.log"
EXAMPLE_MS = 375.1
STEP = [
    "llama-3.1-8b",
    "--device",
    "h200-sxm",
    "--nproc",
    "1",
    "--strategy",
    "single",
    "--seq-len",
    "4096",
    "--mbs",
    "1",
]
MEGATRON = next(own for own in VERSIONS if own.name == "megatron 2026")


def call(*words: object, code: int = 0) -> str:
    exit_code, shown = run(*map(str, words))
    assert exit_code == code, shown
    return shown


def refusal(*words: object) -> str:
    with pytest.raises(ConfigError) as error:
        run(*map(str, words))
    return str(error.value)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "job.log", known_steps(seed=1, count=40))


def write(path: Path, steps: list[KnownStep], batch: int = 128) -> Path:
    lines = [*MEGATRON.head, *(line for step in steps for line in MEGATRON.lines(step))]
    text = "\n".join([*lines, "exiting program at iteration 40", ""])
    path.write_text(text.replace("global batch size:   128", f"global batch size: {batch:5d}"))
    return path


def test_the_answer_is_the_time_of_a_step() -> None:
    first, second, third = call("logs", EXAMPLE).splitlines()[:3]
    assert first.startswith(
        f"answer     {EXAMPLE_MS} ms a step (median of 31 lines after 27 of "
    )
    assert "10,920 tokens/s/GPU; finished: " in first
    assert (
        second
        == "training   Megatron-LM, steps 1 to 58, 1 GPU, global batch 1, sequences of 4096"
    )
    assert third.startswith("assumes    times as printed")


def test_a_failure_comes_before_the_steps(log: Path) -> None:
    text = log.read_text().replace("exiting program", "Segmentation fault (core dumped)\n#")
    log.write_text(text)
    first = call("logs", log, code=1).splitlines()[0]
    assert first.index("egmentation") < first.index("a step (median")


def test_a_log_that_is_cut_has_an_unknown_end(log: Path) -> None:
    log.write_text(log.read_text()[:-300])
    assert "unknown whether it ended" in call("logs", log, code=3).splitlines()[0]


def test_files_have_every_step(log: Path, tmp_path: Path) -> None:
    rows = json.loads(call("logs", log, "--json", "-"))["sources"][0]
    assert len(rows["steps"]) == 40
    assert rows["training"][0]["num_ranks"] == 16
    call("logs", log, "--csv", f"{tmp_path}/out/")
    with (tmp_path / "out" / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert [float(row["step_s"]) for row in steps] == [
        pytest.approx(step.step_s) for step in known_steps(seed=1, count=40)
    ]


def test_flops_in_every_convention_agree_with_a_prediction() -> None:
    document = json.loads(
        call("logs", EXAMPLE, "--model", "llama-3.1-8b", "--device", "h200-sxm", "--json", "-")
    )
    own = {row["convention"]: row["mfu_pct"] for row in document["sources"][0]["flops"]}
    predicted = json.loads(call("predict", *STEP, "--measured", EXAMPLE, "--json", "-"))
    rows = predicted["measured"]["conventions"]
    theirs = {row["convention"]: row["measured_mfu_pct"] for row in rows}
    assert set(own) == {"causal", "torchtitan", "palm-all", "6n"}
    assert own == pytest.approx({name: theirs[name] for name in own}, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--device", "h200"), "also with --model"),
        (("--model", "gpt2-1.5b", "--histogram"), "left out with other views"),
        (("--model", "gpt2-1.5b", "--device", "h2000"), "--device h2000 is invalid"),
        (("--model", "gpt-none"), "--model gpt-none is invalid"),
    ],
)
def test_options_without_effect_are_refused(words: tuple[str, ...], error: str) -> None:
    assert error in refusal("logs", EXAMPLE, *words)


def test_a_model_needs_a_training_log() -> None:
    shown = refusal("logs", ROOT / "examples" / "coll.log", "--model", "gpt2-1.5b")
    assert "given with a training log" in shown


def test_ranks_without_a_prefix_are_a_warning(tmp_path: Path) -> None:
    steps = known_steps(seed=2, count=40)
    order = [step for a, b in zip(steps[::2], steps[1::2], strict=True) for step in (b, a)]
    shown = call("logs", write(tmp_path / "job.log", order))
    assert "step numbers go back in 20 of 40 lines. [steps-unread]" in shown


def test_mlperf_ends_with_its_run(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text("\n".join([*mlperf(known_steps(seed=3, count=20)), ""]))
    shown = call("logs", path)
    assert 'finished: ":::MLLOG' in shown.splitlines()[0]
    assert "between blocks" in shown


def test_of_several_files_the_one_shown_is_named(log: Path, tmp_path: Path) -> None:
    more = [
        KnownStep(step.number, step.step_s, float("nan"))
        for step in known_steps(seed=1, count=60)[40:]
    ]
    path = write(tmp_path / "more.log", more)
    first = call("logs", log, path, code=1).splitlines()[0]
    assert "more.log: The loss is nan in 20 lines" in first
    assert "job.log: " in first


def test_the_end_of_another_job_is_not_that_of_the_steps(log: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.log", known_steps(seed=3, count=20))
    other.write_text(other.read_text().replace("using world size: 16", "using world size: 8"))
    shown = call("logs", log, other, code=3)
    assert "unknown whether it ended" in shown.splitlines()[0]
    assert "GPUs: 8 and 16. [several-jobs]" in shown.replace("\n    ", " ")


def test_two_logs_are_compared_as_two_launches(log: Path, tmp_path: Path) -> None:
    slower = [
        KnownStep(step.number, round(step.step_s * 1.25, 2), step.loss)
        for step in known_steps(seed=1, count=40)
    ]
    other = write(tmp_path / "other.log", slower)
    shown = call("compare", log, other)
    assert "0.799" in shown
    assert "cannot tell (one launch)" in shown
    assert "slower" in call("compare", log, other, "--noise", "1%")


def test_steps_of_other_tokens_are_not_compared(log: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.log", known_steps(seed=1, count=40), batch=256)
    shown = refusal("compare", log, other)
    assert "tokens_per_step '524288 and 1048576' is invalid" in shown
    call("compare", log, other, "--allow", "tokens_per_step")


def test_a_log_is_a_measured_step() -> None:
    shown = call("predict", *STEP, "--measured", EXAMPLE)
    assert f"measured {EXAMPLE_MS} ms" in shown.splitlines()[0]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (("--seq-len", 2048), "a step of 2,048 tokens; this one states 4,096"),
        (("--grad-accum", 2), "a step of 8,192 tokens; this one states 4,096"),
    ],
)
def test_a_log_of_another_step_is_refused(changed: tuple[object, ...], error: str) -> None:
    shown = refusal("predict", *STEP, *changed, "--measured", EXAMPLE)
    assert error in shown
    assert error in refusal("predict", *STEP, *changed, "--anchor", EXAMPLE)


@pytest.mark.parametrize("option", ["--measured", "--anchor"])
def test_a_log_that_tells_no_steady_step_is_refused(option: str, tmp_path: Path) -> None:
    few = write(tmp_path / "few.log", known_steps(seed=1, count=7))
    assert "fewer than 8 lines of steps" in refusal("predict", *STEP, option, few)
    unsteady = [KnownStep(place, 2.0 + place, 3.0) for place in range(1, 41)]
    path = write(tmp_path / "unsteady.log", unsteady)
    assert "never become steady" in refusal("predict", *STEP, option, path)
    bad = tmp_path / "nan.log"
    text = EXAMPLE.read_text()
    last = text[text.rindex("lm loss: ") :].split("|")[0].strip()
    bad.write_text(text.replace(last, "lm loss: NAN"))
    assert "The loss is nan" in refusal("predict", *STEP, option, bad)


def test_a_log_of_another_batch_is_refused_without_its_tokens(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    path = tmp_path / "job.log"
    path.write_text("\n".join(own for own in text.split("\n") if "seq_length" not in own))
    shown = call("predict", *STEP, "--measured", path)
    assert "The log does not state the tokens of a step, the sequence length" in shown
    changed = ("--grad-accum", 2)
    shown = refusal("predict", *STEP, *changed, "--measured", path)
    assert "a step of 2 sequences; this one states 1" in shown


def test_steps_that_are_all_torn_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("| elapsed time per iteration (ms): 12\n" * 9 + "exiting program\n")
    assert "none of its lines of steps is whole. [steps-unread]" in call("logs", path, code=3)


def test_a_mean_over_the_whole_job_is_told_and_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(
        "[INFO] [timer.py:154:stop] 0/50, SamplesPerSec=12.5\n"
        "[INFO] [timer.py:154:stop] 0/100, SamplesPerSec=13.25\n"
    )
    shown = call("logs", path, code=3)
    assert "DeepSpeed's 13.25 samples/s is the mean since the start, warm-up" in shown
    assert "a step (" not in shown
    assert "13.25 samples/s is the mean" in refusal("predict", *STEP, "--measured", path)


def test_bars_of_other_loops_are_no_torn_steps(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    bars = "Map: 100%|##| 5/5 [00:01<00:00]\n 50%|# | 1/2 [00:01<00:01]\n" * 3
    path.write_text(f"{bars}Segmentation fault (core dumped)\n")
    assert "steps-unread" not in call("logs", path, code=1)


def test_a_file_without_steps_is_no_measured_step() -> None:
    shown = refusal("predict", *STEP, "--measured", ROOT / "examples" / "coll.log")
    assert "it must be a log of a trainer, with steps" in shown
    shown = refusal("predict", *STEP, "--measured", "no.log")
    assert "a training log that exists" in shown


def test_a_log_is_an_anchor_alone_and_in_a_column(tmp_path: Path) -> None:
    alone = call("predict", *STEP, "--anchor", EXAMPLE)
    assert f"anchors: 1 steps of {EXAMPLE}" in alone
    (tmp_path / "job.log").write_bytes(EXAMPLE.read_bytes())
    table = tmp_path / "anchors.csv"
    table.write_text("mbs,log\n1,job.log\n")
    by_column = call("predict", *STEP, "--anchor", table)
    named = by_column.replace(str(table), str(EXAMPLE)).replace("line 2 ", f"{EXAMPLE.name} ")
    assert named == alone
    table.write_text("mbs,log\n2,job.log\n")
    shown = refusal("predict", *STEP, "--anchor", table)
    assert "anchors.csv: line 2: log" in shown
