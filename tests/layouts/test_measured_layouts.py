"""Steps of layouts that are measured as anchors: what is trained, and what follows from it."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Recompute
from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import argv
from stepmark.layouts import measured_layouts
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.layout_space import LayoutSpace
from stepmark.layouts.measured_layouts import training_plan
from stepmark.layouts.plan_options import PlanOptions
from stepmark.layouts.small_steps import one_stage, without_pipeline
from stepmark.measuring.machine import Machine
from stepmark.measuring.measure import measure_quietly
from stepmark.model.layers import DENSE
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import of_training
from stepmark.store.reader import read_records
from stepmark.training import train_plan
from stepmark.training.framework_options import with_file
from stepmark.training.train_options import TrainOptions, options_of
from stepmark.workloads.formats import FORMATS

H100 = "NVIDIA H100 80GB HBM3"
ROOT = Path(__file__).parents[2]
RUN = ROOT / "results" / "h200-x4-train-proxy-fsdp"
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def options(**changes: Any) -> PlanOptions:
    own = {"models": ("llama-3.1-8b",), "gpus": (64,), "gbs": 256, "device": "h100-sxm"}
    return PlanOptions(**{**own, "seq_len": 4096, "verify": 1, **changes})


def layouts(own: PlanOptions) -> list[Candidate]:
    (count,) = own.gpus
    space = LayoutSpace(options=own, num_gpus=count, gpus_per_host=8)
    return [*space.layouts([*space.axes()])]


def machine(count: int) -> Machine:
    return Machine(device="cuda", name=H100, num_accelerators=count)


def cases(own: PlanOptions, layout: Candidate, num_gpus: int) -> list[TrainCase]:
    planned = training_plan(own, [layout], machine(num_gpus), num_gpus)
    return [entry.case for entry in planned.entries if isinstance(entry.case, TrainCase)]


@pytest.mark.parametrize("framework", ["megatron", "pytorch"])
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_layout_is_trained_with_its_own_axes(framework: str, num_gpus: int) -> None:
    own = options(framework=framework, pp=(1, 4), vpp=(1, 2))
    fits = [c for c in layouts(own) if num_gpus % c.parallel.tp == 0]
    for layout in random.Random(4).sample(fits, 6):
        two, four = cases(own, layout, num_gpus)
        assert [two.model.num_layers, four.model.num_layers] == [2, 4]
        for case in (two, four):
            axes = case.parallel
            assert (axes.tp, axes.cp, axes.pp) == (layout.parallel.tp, 1, 1)
            assert axes.world_size == num_gpus
            assert axes.data_ranks == num_gpus // axes.tp
            assert (case.mbs, case.grad_accum) == (layout.job.mbs, 2)
            words = {"none": Recompute.NONE, "full": Recompute.FULL}
            assert case.recompute is words.get(layout.recompute, Recompute.BLOCKS)
            # The case is one that `train` plans by its own command.
            again = train_plan.only_case(options_of(case), "cuda", num_gpus)
            assert again.case_id == case.case_id, argv(options_of(case))


def test_a_layout_by_pytorch_is_what_train_makes_of_its_file(tmp_path: Path) -> None:
    own = options(framework="pytorch", precision="fp8", tp=(1, 2))
    file = tmp_path / "layout.toml"
    for layout in random.Random(2).sample(layouts(own), 4):
        two, _ = cases(own, layout, 8)
        workload = without_pipeline(layout).workload()
        file.write_text("".join(FORMATS["torchtitan"].load().write(workload)))
        given: dict[str, Any] = {"config": str(file), "num_layers": 2, "nproc": "8"}
        given |= {"models": own.models, "mbs": (two.mbs,), "grad_accum": 2, "dp_replicate": 1}
        typed = TrainOptions(**given, ac=(two.recompute, two.recompute_blocks))
        job = with_file(typed, machine(8))
        assert train_plan.only_case(job.options, "cuda", 8).case_id == two.case_id


def test_the_step_is_predicted_as_the_small_step_of_the_search() -> None:
    """The search composes steps of such small ones: factors of these are of its parts."""
    own = options(framework="pytorch", tp=(1,), pp=(1,), recompute=("none",), gpus=(8,), gbs=64)
    layout = next(each for each in layouts(own) if each.job.mbs == 2)
    two, four = cases(own, layout, 8)
    for case in (two, four):
        small = one_stage(layout, {DENSE: case.model.num_layers}, False, 2).workload()
        inputs = of_training(case, None, H100)
        step_s = predict(inputs).step_s
        other_s = predict(replace(inputs, workload=small, case=None)).step_s
        assert step_s == pytest.approx(other_s, rel=0.02)


def test_rows_that_this_machine_cannot_train_are_named() -> None:
    own = options(framework="megatron", mbs=(1,), recompute=("none",), verify=2)
    first = [next(c for c in layouts(own) if c.parallel.tp == tp) for tp in (4, 8, 4, 1, 2, 1)]
    planned = training_plan(own, first, machine(2), 2)
    tps = {e.case.parallel.tp for e in planned.entries if isinstance(e.case, TrainCase)}
    assert tps == {1, 2}  # the first two that fit, each with two numbers of layers
    assert len(planned.entries) == 4
    named = [note for note in planned.notes if note.startswith("not measured here: ")]
    assert [note.partition(": ")[2][:15] for note in named] == [
        "row 1, 3: tp 4 ",
        "row 2: tp 8 is ",
    ]
    with pytest.raises(ConfigError) as caught:
        training_plan(own, first[:3], machine(2), 2)
    assert caught.value.field == "verify"
    assert "row 1, 3: tp 4" in str(caught.value)


def test_experts_are_divided_or_named() -> None:
    own = options(models=("qwen3-30b-a3b",), framework="pytorch", tp=(1,), ep=(4,), mbs=(1,))
    layout = layouts(own)[0]
    assert {case.parallel.ep for case in cases(own, layout, 4)} == {4}
    with pytest.raises(ConfigError, match="ep 4 is invalid"):
        cases(own, layout, 2)


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("framework", ["megatron", "pytorch"])
def test_steps_are_measured(framework: str, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    own = options(
        models=(str(model),),
        framework=framework,
        gpus=(2,),
        gbs=4,
        seq_len=64,
        tp=(1,),
        pp=(1,),
    )
    layout = next(each for each in layouts(own) if each.recompute == "none")
    planned = training_plan(own, [layout], Machine(device="cpu"), 2)
    how = replace(planned.how, train=replace(planned.how.train, steps=2))
    code, run = measure_quietly(replace(planned, how=how), str(tmp_path / "runs"))
    assert code == 0
    records = read_records(run)
    assert [type(record) for record in records] == [Measured, Measured]


def test_a_plan_has_the_factors_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned: list[Any] = []

    def measured(plan: Any, _folder: str) -> tuple[int, Path]:
        planned.append(plan)
        return 0, RUN

    h200 = Machine(device="cuda", name="NVIDIA H200", num_accelerators=4)
    monkeypatch.setattr(measured_layouts, "machine", lambda _device: h200)
    monkeypatch.setattr(measured_layouts, "measure_quietly", measured)
    out = tmp_path / "layouts.json"
    words = "plan llama-3.1-8b --gpus 16 --gbs 32 --seq-len 2048 --device h200 --mbs 1 --tp 1,8"
    more = ["--pp", "1", "--jobs", "1", "--framework", "pytorch", "--recompute", "none"]
    files = ["--files", str(tmp_path / "layouts")]
    assert status([*words.split(), *more, "--json", str(out), "--verify", "1", *files]) == 0
    text, errors = capsys.readouterr()
    assert re.search(f"to predict the first: stepmark predict .*--anchor {RUN}", errors)
    verified = json.loads(out.read_text())
    for row in verified["layouts"]:
        row.pop("file")
    assert len(planned) == 1
    assert len(planned[0].entries) == 2
    assert status([*words.split(), *more, "--json", str(out), "--anchor", str(RUN)]) == 0
    anchored = json.loads(out.read_text())
    assert verified["layouts"] == anchored["layouts"]
    assert verified["anchors"] == anchored["anchors"]
    assert f"--anchor {RUN}" in text  # of the command that predicts the first row
    assert "not measured: pipelines, links between hosts" in text
    (row,) = anchored["anchors"]["rows"]
    assert (
        f"{row['measured_s'] / row['predicted_s']:.2f}" in text.split("steps of the first")[1]
    )
    assert "the first row before this measurement: pytorch, dp 16" in errors


def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "llama-3.1-8b", "--gpus", "16", "--gbs", "32", "--device", "h200"]
    words += ["--verify", "1"]
    monkeypatch.setattr(measured_layouts, "machine", lambda _device: Machine(device="cpu"))
    assert status(words) == 2
    assert "this machine has no GPU, and --device is h200" in capsys.readouterr().err
    monkeypatch.setattr(measured_layouts, "machine", lambda _device: machine(8))
    assert status(words) == 2
    assert f"this machine has {H100}" in capsys.readouterr().err
    assert status([*words, "--anchor", str(RUN)]) == 2
    assert "left out with --anchor" in capsys.readouterr().err
