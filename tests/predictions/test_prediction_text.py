"""What `stepmark predict` prints: an answer of few lines that agree with the JSON."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stepmark as sm
from stepmark.cli.main import status
from stepmark.ground.units import format_bytes, format_time
from stepmark.predictions.note import Note, Topic, note_lines, topic_of
from stepmark.predictions.prediction_text import in_width
from stepmark.tables.columns import MS
from stepmark.timeline.ledger import Group, Idle, Ledger
from stepmark.timeline.ledger_rows import lines_of_one

AICB = "tests/data/aicb/tutorial_gpt13b_tp8_pp1_w8_gbs2/mocked.csv"
ROOT = Path(__file__).parents[2]
PIPELINE = "llama-3.1-8b --pp 4 --nproc 8 --mbs 8 --device h200"
NAMES = ("predicted", "share")


def drawn_job(rng: random.Random) -> list[str]:
    """Return a job of any rules, whose ranks any of its layouts divides."""
    model = rng.choice(["llama-3.1-8b", "qwen3-8b", "gpt2-1.5b"])
    pp = rng.choice([1, 2, 4])
    rules = rng.choice(["", "megatron", "deepspeed", "pytorch"])
    words = [model, "--nproc", str(rng.choice([16, 64])), "--mbs", str(rng.choice([1, 2]))]
    words += ["--device", rng.choice(["h100-sxm", "a100-80gb-sxm", "b200", "mi300x"])]
    if not rules:
        words += ["--pp", str(pp), "--mbs", "8"] if pp > 1 else ["--strategy", "fsdp"]
        return [*words, "--ac", rng.choice(["none", "full"])]
    words += ["--framework", rules, "--gbs", "128"]
    if rules == "deepspeed":
        return [*words, "--zero-stage", rng.choice(["1", "3"])]
    tp = "1" if model == "gpt2-1.5b" else rng.choice(["1", "4"])  # it has 25 heads
    return [*words, "--tp", tp, "--pp", str(pp)]


def predicted(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str, dict[str, Any]]:
    """Return what is printed, and the JSON of the same prediction."""
    answer = tmp_path / "answer.json"
    assert status(["predict", *words, "--json", str(answer)]) == 0, words
    document: dict[str, Any] = json.loads(answer.read_text())
    return capsys.readouterr().out, document


def block(text: str, title: str) -> list[str]:
    """Return the block of lines that begins so."""
    return next(part for part in text.split("\n\n") if part.startswith(title)).splitlines()


def answer_of(text: str) -> str:
    """Return the first line as one, however it is broken."""
    return text.partition("\n  by ")[0].replace(",\n    ", ", ")


@pytest.mark.parametrize("seed", range(30))
def test_the_answer_of_any_job_is_short_and_that_of_the_json(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, document = predicted(drawn_job(random.Random(seed)), tmp_path, capsys)
    first = answer_of(text)
    assert f": predicted step {format_time(document['step_s'])}, " in first
    rate = re.search(r"([\d,.]+) tokens/s/GPU", first)
    assert rate is not None
    shown = float(rate[1].replace(",", ""))
    assert shown == pytest.approx(document["tokens_per_s_gpu"], rel=6e-4)
    assert f"{document['mfu_pct']:.1f} % MFU" in first
    memory = document["memory"]
    reserved = format_bytes(memory["reserved_bytes"]).partition(" ")[0]
    verdict = {"fits": ", fits", "close": "may not fit", "does not fit": "DOES NOT FIT"}
    size = re.escape(format_bytes(memory["device_bytes"]))
    sizes = rf"{reserved}.* of {size} reserved"
    if memory["verdict"] == "close" and memory["reserved_bytes"] > memory["device_bytes"]:
        sizes = rf"{format_bytes(memory['allocated_bytes'])} allocated and .*; {size} in all"
    assert re.search(rf"{verdict[memory['verdict']]} \({sizes}\)", first)
    (bound, share_pct), *_ = document["shares_pct"].items()
    if document["bound"] == "device":
        assert f"bound by {bound} ({share_pct:.1f} % of the step)" in first
    ledger = block(text, "where the step goes")
    assert len(ledger) <= 12
    notes = [line for line in text.splitlines() if line.startswith("note: ")]
    assert len(notes) == min(3, len(document["notes"]))
    assert {note.removeprefix("note: ") for note in notes} <= set(document["notes"])
    if rest := len(document["notes"]) - 3:
        assert text.splitlines()[-1].startswith(f"{rest} more note")
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 160


def test_cache_beyond_the_device_is_a_risk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["mixtral-8x7b", "--nproc", "16", "--ep", "8", "--num-layers", "32"]
    words += ["--strategy", "fsdp", "--device", "h100-sxm"]
    text, document = predicted(words, tmp_path, capsys)
    memory = document["memory"]
    assert memory["verdict"] == "close"
    assert memory["allocated_bytes"] < memory["device_bytes"] < memory["reserved_bytes"]
    cache = format_bytes(memory["reserved_bytes"] - memory["allocated_bytes"])
    allocated = format_bytes(memory["allocated_bytes"])
    assert f"may not fit ({allocated} allocated and {cache} of cache; 80 GiB in all)" in text
    risk = "at risk, the allocator frees its cache to stay within 80 GiB"
    assert f"{risk}; it would fit with --ac full" in text.replace("\n  ", " ")
    _, smaller = predicted([*words, "--ac", "full"], tmp_path, capsys)
    assert smaller["memory"]["verdict"] == "fits"


@pytest.mark.parametrize(
    ("length", "more", "has_note"),
    [(40960, [], True), (8192, [], False), (40960, ["--seq-len", "4096"], False)],
)
def test_the_length_of_a_config_is_noted(
    length: int,
    more: list[str],
    has_note: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((ROOT / "examples/hf/llama-3.1-8b/config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"max_position_embeddings": length}))
    words = [str(path), "--nproc", "8", "--device", "h100-sxm", *more]
    for rules in ("--strategy fsdp", "--framework pytorch --gbs 8"):
        _, document = predicted([*words, *rules.split()], tmp_path, capsys)
        notes = [note for note in document["notes"] if note.startswith("seq ")]
        assert notes == ["seq 8192: the config allows 40,960 (--seq-len)"] * has_note


@pytest.mark.parametrize("seed", range(30))
def test_lines_of_a_ledger_add_up_to_the_step_as_shown(seed: int) -> None:
    rng = random.Random(seed)
    names = [(Group.COMPUTE, f"work {n}") for n in range(12)]
    names += [(Group.COMM, f"collective {n}") for n in range(5)]
    names += [(Group.IDLE, Idle.LAUNCH_GAP)]
    scale = 10 ** rng.uniform(4.5, 14)
    lines = {name: int(scale * rng.random() ** 3) for name in names[: rng.randrange(1, 18)]}
    own = Ledger(window_ns=sum(lines.values()), lines=lines)
    title, *rows, rule, step = lines_of_one(own)
    assert len([title, *rows, rule, step]) <= 12
    assert set(rule) == {"-"}
    unit = re.search("in (s|ms|us)", title)
    assert unit is not None
    texts = [re.split(" {2,}", row)[1].replace(",", "") for row in (*rows, step)]
    shown = [*map(float, texts)]
    places = len(texts[-1].partition(".")[2])
    assert sum(shown[:-1]) == pytest.approx(shown[-1], abs=0.01 * 10**-places)
    step_s = shown[-1] * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit[1]]
    assert format_time(step_s) == format_time(own.window_ns * 1e-9)
    assert len(texts[-1].replace(".", "").lstrip("0")) >= 4


@pytest.mark.parametrize(
    "words", [PIPELINE, f"{PIPELINE} --what-if link=2x", f"{AICB} --device h200"]
)
def test_nothing_of_the_json_is_lost(
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    short, _ = predicted(words.split(), tmp_path, capsys)
    text, document = predicted([*words.split(), "--stages", "--notes"], tmp_path, capsys)
    lines = text.splitlines()
    for row in document["ledger"]:
        own = [line for line in lines if line.endswith(f"  {row['line']}")]
        start = [MS.show(row["time_ns"]), f"{row['share_pct']:.1f}"]
        assert any(line.split()[:2] == start and row["group"] in line for line in own), row
    parts = [row for row in document["ledger_parts"] if row["part"] != "transfer"]
    assert text.count("  of which  ") == len(parts)
    for stage in (document["memory"] or {"stages": []})["stages"]:
        cells = [format_bytes(size) for name, size in stage.items() if name != "stage" and size]
        assert any(all(cell in line for cell in cells) for line in lines)
    assert sorted(line for line in lines if line.startswith("note: ")) == sorted(
        f"note: {note}" for note in document["notes"]
    )
    assert "--notes" not in text
    for line in short.splitlines():  # the flags add, and take nothing away
        assert line in lines or line.endswith("--notes"), line
    name, _, about = document["network"].partition(": ")
    if about:
        assert f"network {name} ({about})" in text.replace(",\n    ", ", ")


def test_a_pipeline_has_the_ledger_of_its_slowest_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, document = predicted(PIPELINE.split(), tmp_path, capsys)
    title, *rows = block(text, "where the step goes")
    stages = re.search(r"in stage (\d), the slowest of 4, in s", title)
    assert stages is not None
    stage = int(stages[1])
    computed = [0] * 4
    for row in document["ledger"]:
        computed[row["stage"]] += row["time_ns"] * row["group"].startswith("compute")
    assert computed[stage] == max(computed)
    products = [
        r for r in document["ledger"] if (r["group"], r["line"]) == ("compute", "matmul")
    ]
    shown = dict(re.findall(r"^(\S.*?) {2,}([\d.]+) ", "\n".join(rows), re.M))
    assert float(shown["matmul"]) == pytest.approx(products[stage]["time_ns"] / 1e9, abs=2e-3)
    bubble_s = float(shown["idle time (waiting for other ranks)"])
    assert bubble_s == pytest.approx(document["bubble_s"], abs=2e-3)


def test_stages_that_are_alike_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many micro-batches and a small head leave stages of as many layers the same lines."""
    words = "llama-3.1-70b --framework megatron --nproc 64 --tp 8 --pp 4 --gbs 512"
    words += " --device h100-sxm --use-distributed-optimizer"
    for vocab_size, where in {
        "1024": "in each stage, in s",
        "16384": "in stages 0, 2-3, the slowest of 4, in s",
        "1048576": "in stage 3, the slowest of 4, in s",
    }.items():
        text, _ = predicted([*words.split(), "--vocab-size", vocab_size], tmp_path, capsys)
        assert where in block(text, "where the step goes")[0], vocab_size


@pytest.mark.parametrize("flag", ["--stages", "--notes"])
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--json -", "a file takes the place of the text"),
        ("--html -", "a file takes the place of the text"),
        ("--mbs 1,2", "left out with lists (--mbs)"),
    ],
)
def test_what_prints_more_is_refused_where_nothing_more_is_printed(
    flag: str, more: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"predict llama-3.1-8b --nproc 8 --device h200 {more} {flag}"
    assert status(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{flag} is invalid" in err
    assert reason in err


def test_the_assumed_load_of_experts_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["qwen3-30b-a3b", "--framework", "megatron", "--nproc", "8", "--ep", "8"]
    words += ["--gbs", "64", "--device", "h100-sxm"]
    even, _ = predicted(words, tmp_path, capsys)
    assert "top 8 of 128 experts (even routing)" in even.replace(",\n    ", ", ")
    uneven, _ = predicted([*words, "--imbalance", "1.5"], tmp_path, capsys)
    assert "top 8 of 128 experts (imbalance 1.5)" in uneven.replace(",\n    ", ", ")


def test_notes_on_costs_without_a_measurement_say_what_the_rules_are_for() -> None:
    job = {"nproc": 64, "strategy": "fsdp", "ep": 8, "ac": "full"}
    notes = sm.predict("qwen3-30b-a3b", device="b200", **job).notes
    shares = [note for note in notes if "of the compute time is" in note]
    assert any("by rules for operators that were not measured on b200" in n for n in shares)
    prediction = sm.predict("llama-3.1-8b", device="mi300x", nproc=1)
    (note,) = [note for note in prediction.notes if "compute time" in note]
    expected = "100% of the compute time is by shares of the peak that AMD's devices reach, "
    assert note == expected + "because no operator was measured on mi300x"


def test_reserved_memory_below_the_device_does_not_fit_by_what_others_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "llama-3.1-8b --framework megatron --nproc 8 --tp 2 --use-distributed-optimizer"
    words += " --sequence-parallel --gbs 64 --mbs 2 --num-layers 30 --device h100-sxm"
    text, document = predicted(words.split(), tmp_path, capsys)
    memory = document["memory"]
    assert memory["verdict"] == "does not fit"
    assert memory["reserved_bytes"] < memory["device_bytes"]
    assert "DOES NOT FIT (78.25 of 80 GiB reserved; CUDA and NCCL need more)" in text


def test_lists_say_where_rows_differ_in_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict llama-3.1-8b --framework megatron --nproc 8 --tp 4 --sequence-parallel"
    words += " --gbs 64 --device h100-sxm"
    different = "step: 8 ranks, rows differ in tokens a step: compare tokens/s/GPU\n"
    assert status([*words.split(), "--seq-len", "4096,8192"]) == 0
    assert different in capsys.readouterr().out
    assert status([*words.split(), "--mbs", "1,2"]) == 0
    assert different not in capsys.readouterr().out


def test_a_config_without_a_family_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.json"
    file.write_text('{"hidden_size": 4096, "num_hidden_layers": 32}')
    assert status(["predict", str(file), "--nproc", "8", "--device", "h200"]) == 2
    err = capsys.readouterr().err
    assert "this is a model's config without `model_type`, which names its family" in err


# A job whose first note is on this.
FIRST = {
    f"{AICB} --device h200": "the file has no computation",
    "qwen3-8b --strategy fsdp --nproc 4 --seq-len 5632 --device h100": "memory may run out",
    "gpt2-1.5b --nproc 1 --mbs 8 --compile --device l40s": "no published step is of a device",
    "gpt2-1.5b --nproc 1 --mbs 8 --device mi300x": "100% of the compute time is by shares",
    f"{PIPELINE} --what-if link=2x": "without --what-if the step takes",
    "gpt2-1.5b --nproc 1 --device h200 --clip 2": "by the data sheet the step takes as long",
    "deepseek-v3 --nproc 256 --ep 32 --device h200": "deepseek-v3: not modelled",
    "--from-run results/h100-run --mbs 4": "78% of the compute time is scaled",
}


@pytest.mark.parametrize("words", FIRST)
def test_the_first_note_is_what_changes_the_answer_most(
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    text, _ = predicted(words.split(), tmp_path, capsys)
    assert text.partition("\nnote: ")[2].startswith(FIRST[words]), text


def test_the_second_line_says_what_the_times_are_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = "gpt2-1.5b --strategy single --mbs 8 --compile --calibration results/h100-run"
    text, document = predicted(run.split(), tmp_path, capsys)
    assert re.search(r"\n  by calibration h100-run of 2026-11-26(, \d+ days? ago)?, 90 %", text)
    assert "by 22 committed predictions (bound by the device; one GPU)" in text
    sheet = "llama-3.1-8b --nproc 16 --device h200 --host slow --network dgx-h200"
    text, document = predicted(sheet.split(), tmp_path, capsys)
    network = "network dgx-h200 (8 GPUs and 8 x 400G a host)"
    assert f"\n  by data sheet of h200-sxm, slow host, {network}," in text
    low, high = (format_time(document["interval"][end]) for end in ("low_s", "high_s"))
    rows = document["interval"]["num_rows"]
    numbers = f"{low.split()[0]}.* to {high} by {rows} published steps"
    assert re.search(f"90 % interval {numbers}", text.replace("\n    ", " "))


def test_python_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"predict {PIPELINE} --stages --notes"
    assert status(words.split()) == 0
    printed = capsys.readouterr().out
    own = sm.predict("llama-3.1-8b", pp=4, nproc=8, mbs=8, device="h200")
    own.show(stages=True, notes=True)
    assert capsys.readouterr().out == printed
    with pytest.raises(sm.ConfigError, match=r"stages .* show.stages=True"):
        sm.predict("llama-3.1-8b", nproc=8, device="h200", stages=True)


def test_the_readme_shows_this_answer(capsys: pytest.CaptureFixture[str]) -> None:
    command = r"```sh\nstepmark (predict .*)\n```\n\n```text\n((?:.*\n)+?)```"
    shown = re.findall(command, (ROOT / "README.md").read_text())
    assert shown
    for words, text in shown:
        assert status(words.split()) == 0
        assert capsys.readouterr().out.startswith(f"{text}\n")


@pytest.mark.parametrize("seed", range(10))
def test_a_broken_line_is_the_same_text(seed: int) -> None:
    rng = random.Random(seed)
    words = ["x" * rng.randrange(1, 60) for _ in range(rng.randrange(1, 20))]
    lines = [*in_width(", ".join(words), "  ")]
    assert max(map(len, lines)) <= 160
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == ", ".join(words)


def test_notes_are_ordered_by_topic_and_counted() -> None:
    texts = {topic: Note.of(topic, topic.name) for topic in reversed(Topic)}
    notes = sorted(["plain", *texts.values()], key=topic_of)
    assert notes[:2] == ["LOWER_BOUND", "OPTIONS"]
    assert notes[-2:] == ["plain", "ORIGIN"]
    assert [*note_lines(notes, 3, "--notes")][3:] == ["9 more notes: --notes"]
    assert [*note_lines(notes[:4], 3, "--notes")][3:] == ["1 more note: --notes"]
    assert [*note_lines(notes, None, "--notes")] == notes
