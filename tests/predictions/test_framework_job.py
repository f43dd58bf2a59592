"""stepmark predict --framework: as of the file that `workload generate` writes."""

import json
from pathlib import Path

import pytest

import stepmark as sm
from stepmark.cli.main import status

JOBS = {
    "megatron": "llama-3.1-8b --tp 2 --pp 4 --gbs 32 --sp",
    "deepspeed": "gpt2-1.5b --zero-stage 3 --mbs 2",
    "pytorch": "llama-3.1-8b --tp 2 --async-tp",
    "fsdp": "llama-3.1-8b --pp 2 --gbs 32",
}
RANKS = "16"


@pytest.mark.parametrize("framework", JOBS)
def test_a_job_is_predicted_as_its_file(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, *flags = JOBS[framework].split()
    job = ["--framework", framework, *flags]
    file, answer = tmp_path / "w.json", tmp_path / "answer.json"
    generate = ["workload", "generate", "--model", model, "--world-size", RANKS, *job]
    assert status([*generate, "-o", str(file)]) == 0
    device = ["--device", "h100", "--json", str(answer)]
    assert status(["predict", str(file), *device]) == 0
    of_file = json.loads(answer.read_text())
    assert status(["predict", model, "--nproc", RANKS, *job, *device]) == 0
    of_job = json.loads(answer.read_text())
    assert of_job == of_file
    assert of_job["tokens_per_s"]
    assert of_job["mfu_pct"]
    assert "network dgx-h100 (8 GPUs and 8 x 400G a host" in capsys.readouterr().out


@pytest.mark.parametrize("tp", ["2", "8"])
def test_products_in_pieces_hide_communication(tp: str, tmp_path: Path) -> None:
    """The work is the same, so that a step takes less by what is no longer exposed."""
    steps = {}
    for flag in ("--no-async-tp", "--async-tp"):
        answer = tmp_path / "answer.json"
        job = ["llama-3.1-8b", "--framework", "pytorch", "--nproc", RANKS, "--tp", tp]
        job += ["--mbs", "4", flag]
        assert status(["predict", *job, "--device", "h100", "--json", str(answer)]) == 0
        steps[flag] = json.loads(answer.read_text())["step_s"]
    assert 0.7 < steps["--async-tp"] / steps["--no-async-tp"] < 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--framework megatrom", "--framework megatrom is invalid: did you mean megatron"),
        ("--framework fsdp --zero-stage 3", "--zero-stage"),
        ("--framework megatron --gbs 7", "--gbs 7 is invalid: it must be a multiple of"),
        ("--framework megatron --from-run latest", "--framework says what the step is"),
        (
            "--framework megatron --world-size 8",
            "--nproc 16 is invalid: it must be --world-size",
        ),
        ("--framework megatron llama-3.1-8b", "one model"),
        ("--framework megatron --device nothing", "--device nothing is invalid"),
        ("--framework megatron --mbs 2 --scale 3", "--scale 3 is invalid"),
    ],
)
def test_a_wrong_job_is_refused(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        status(["predict", "gpt2-125m", "--nproc", RANKS, "--device", "h100", *words.split()])
        == 2
    )
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.strip().splitlines()) == 1


def test_tensor_parallelism_across_hosts_is_slower_than_inside(tmp_path: Path) -> None:
    def step_s(tp: int, pp: int) -> float:
        answer = tmp_path / "answer.json"
        words = f"gpt-175b --framework megatron --nproc 1024 --tp {tp} --pp {pp} --gbs 1536"
        more = ["--device", "h100-sxm", "--network", "dgx-h100", "--json", str(answer)]
        assert status(["predict", *words.split(), *more]) == 0
        seconds: float = json.loads(answer.read_text())["step_s"]
        return seconds

    assert step_s(16, 4) > 1.1 * step_s(8, 8)


def test_multi_token_prediction_is_told_and_its_stage_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last stage has it, wherever its memory stands among the stages'."""
    words = "predict llama-3.1-8b --framework megatron --nproc 8 --pp 8 --mbs 4 --gbs 64"
    more = "--seq-len 8192 --num-mtp-layers 1 --device h100-sxm --stages"
    assert status([*words.split(), *more.split()]) == 0
    out = capsys.readouterr().out
    assert "1 module of multi-token prediction, with" in out
    table = out[out.index("total") :].splitlines()
    assert any(line.startswith("7 ") for line in table[1:9])


@pytest.mark.parametrize(
    ("pp", "vpp", "expected"),
    [
        (
            12,
            1,
            "the last stage has 10, the others 2 each; Megatron-LM refuses this without --",
        ),
        (4, 3, "a chunk has 3, the first 2, the last 0; Megatron-LM refuses this without --"),
        (
            17,
            1,
            "embedding and head take a layer's place each; Megatron-LM refuses this without",
        ),
    ],
)
def test_a_pipeline_whose_layers_do_not_divide_has_a_note_as_its_workload(
    pp: int, vpp: int, expected: str
) -> None:
    axes = {"pp": pp, "virtual_pipeline_model_parallel_size": vpp, "gbs": 2 * pp}
    workload = sm.workload("llama-3.1-8b", framework="megatron", world_size=pp, **axes)
    job = {"framework": "megatron", "nproc": pp, "device": "h100-sxm"}
    prediction = sm.predict("llama-3.1-8b", **job, **axes)
    (note,) = [note for note in prediction.notes if expected in note]
    assert note in workload.program.notes
    rows = sm.predict("llama-3.1-8b", **job, **axes, mbs=[1, 2])
    assert expected in " ".join(rows.notes)


def test_more_stages_than_layers_are_refused_with_the_largest_number() -> None:
    job = {"framework": "megatron", "nproc": 64, "gbs": 64, "device": "h100-sxm"}
    with pytest.raises(
        sm.ConfigError, match="at most 34 with vpp 1: 32 layers, embedding, head"
    ):
        sm.predict("llama-3.1-8b", **job, pp=64)


def test_notes_say_what_is_padded_and_assumed() -> None:
    """Without a pipeline, too, the weights have the padding of the workload."""
    job = {"framework": "megatron", "device": "h200", "tp": 8}
    [padded] = [
        note
        for note in sm.workload("llama-3.1-70b", framework="megatron", tp=8).notes
        if "padded" in note
    ]
    prediction = sm.predict("llama-3.1-70b", nproc=8, **job)
    assert padded in prediction.notes
    assert not any("--nproc" in note for note in prediction.notes)
    assumed = "product of the axes, because --nproc is not given: 8"
    assert any(note.endswith(assumed) for note in sm.predict("llama-3.1-70b", **job).notes)
