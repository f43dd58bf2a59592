"""stepmark predict: calibrations that are damaged, of another method, or old."""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from stepmark.predictions import predict_inputs

from .predicted_runs import GPT2, LLAMA, WORDS, Predict, copy_runs, joined

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
    assert "the run was kept without it" in run(f"--from-run {GPT2} --runs {copies}")[2]


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
    assert (code, "a file that exists" in error) == (2, True)


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
    monkeypatch.setattr(predict_inputs.socket, "gethostname", lambda: "here")
    assert "stepmark calibrate" in run(words)[2]
    assert "on here, not vm; or --force" in run(f"{words} --calibration {GPT2}")[2]
    monkeypatch.setattr(predict_inputs.socket, "gethostname", lambda: "vm")
    assert run(words)[0] == 0
