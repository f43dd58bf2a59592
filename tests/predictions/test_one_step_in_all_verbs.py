"""One job asked of every verb without further flags: they say the same of its step."""

import random
from typing import Any

import pytest

from stepmark.cases.flops import per_token
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Recompute
from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model, load_models
from stepmark.predictions.predict import of_job
from stepmark.predictions.predict_options import PredictOptions
from stepmark.runs import dry_run
from stepmark.step.layout import Inputs, ShardLayout
from stepmark.step.tree import build
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.training import train_plan
from stepmark.training.train_options import TrainOptions
from stepmark.workloads import workload_flags
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.workload import generate

SEED = 20261128
NUM_LAYOUTS = 30
NUM_PREDICTED = 10
AXES = ("tp", "pp", "cp", "ep", "dp_replicate")
Layout = dict[str, Any]


def train_words(layout: Layout) -> dict[str, Any]:
    """Return the options of `train` and `predict`."""
    axes = {name: layout[name] for name in AXES if layout[name] > 1}
    axes.pop(layout["strategy"], None)
    return {
        "model": layout["model"],
        "strategy": (layout["strategy"],),
        "num_layers": layout["num_layers"],
        **({"ac": (layout["recompute"], (1, 1))} if layout["recompute"] != "none" else {}),
        **axes,
    }


def case_of(layout: Layout) -> TrainCase:
    return train_plan.only_case(TrainOptions(**train_words(layout)), "cuda", layout["ranks"])


def generated_of(layout: Layout) -> Workload:
    parallel = case_of(layout).parallel
    # The pp rule has tp, too.
    framework = "pp" if layout["strategy"] == "tp" and parallel.pp > 1 else layout["strategy"]
    axes = {name: getattr(parallel, name) for name in AXES}
    if framework == "ddp":  # whose ranks are all replicas
        axes.pop("dp_replicate")
    options = workload_flags.options_class(framework)(
        model=layout["model"],
        framework=framework,
        num_layers=layout["num_layers"],
        world_size=layout["ranks"],
        recompute=layout["recompute"],
        **axes,
    )
    return generate(options)


def draw_layouts() -> list[Layout]:
    """Return layouts that `train` accepts, of any model."""
    draw = random.Random(SEED)
    found: list[Layout] = []
    while len(found) < NUM_LAYOUTS:
        layout: Layout = {
            "model": draw.choice(sorted(load_models())),
            "strategy": draw.choice(("fsdp", "fsdp", "fsdp", "tp", "pp", "ddp")),
            "num_layers": draw.choice((4, 8, 9)),
            "ranks": draw.choice((4, 8, 16)),
            "recompute": draw.choice((Recompute.NONE, Recompute.NONE, Recompute.FULL)),
            **{name: draw.choice((1, 1, 2)) for name in AXES},
        }
        try:
            of_case(case_of(layout))
        except ConfigError:
            continue
        found.append(layout)
    return found


LAYOUTS = draw_layouts()


def words(layout: Layout) -> str:
    return " ".join(f"{value}" for value in layout.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=words)
def test_a_generated_workload_is_the_step_that_train_runs(layout: Layout) -> None:
    """Operations, messages, their order and streams, and so what is predicted from them."""
    trained = of_case(case_of(layout))
    generated = generated_of(layout)
    for stage in range(len(trained.stages)):
        assert list(generated.expand(stage)) == list(trained.expand(stage))
    assert len(generated.stages) == len(trained.stages)
    assert generated.groups == trained.groups
    assert generated.num_microbatches == trained.num_microbatches


@pytest.mark.parametrize("layout", LAYOUTS, ids=words)
def test_flops_and_messages_of_a_workload_are_those_of_train(layout: Layout) -> None:
    case = case_of(layout)
    row = dry_run.step_row(case)
    made = generated_of(layout)
    flops = 0
    sizes = []
    for stage in range(len(made.stages)):
        tally = made.tally(stage)
        flops += sum(
            count * (op.op.flops or 0)
            for op, count in tally.items()
            if isinstance(op, ComputeOp) and op.module not in ("gradients", "embedding")
            if not getattr(op.op, "name", "").startswith("bucket")
        )
        sizes.append(
            sum(
                count * op.message_bytes(made.groups[op.group])
                for op, count in tally.items()
                if isinstance(op, CommOp)
            )
        )
    assert flops * (case.num_ranks // len(made.stages)) == row["flops"]
    assert max(sizes) == row["message_bytes"]


@pytest.mark.parametrize("layout", LAYOUTS[:NUM_PREDICTED], ids=words)
def test_the_step_is_predicted_alike_from_a_model_and_from_a_file(layout: Layout) -> None:
    options = PredictOptions(device="h200", nproc=str(layout["ranks"]), **train_words(layout))
    of_model = of_job(options)
    of_file = of_job(PredictOptions(device="h200"), generated_of(layout))
    assert of_model.step_s == of_file.step_s
    figures = ("tokens", "tokens_per_s", "mfu_pct", "hfu_pct", "flops_per_token", "seq_len")
    of_model_document, of_file_document = of_model.document(), of_file.document()
    for name in figures:
        expected = of_model_document[name]
        assert of_file_document[name] == pytest.approx(expected, rel=1e-6), name
    document = of_model.document()
    case = case_of(layout)
    row = dry_run.step_row(case)
    assert document["memory"]["allocated_bytes"] == row["memory_bytes"]
    assert document["flops_per_token"] == per_token(case).causal
    executed = document["executed_per_token"] * document["tokens"]
    assert executed == pytest.approx(row["flops"], rel=1e-12)


@pytest.mark.parametrize("name", sorted(load_models()))
def test_parameters_and_flops_of_op_are_the_model_s(name: str) -> None:
    """What `op --model` measures is one micro-batch of what `train` and `workload` count."""
    model = find_model(name)
    root = build(model, ShardLayout(), Inputs(mbs=1, seq_len=model.seq_len))
    flops = sum(
        unit.times * item.op.flops
        for unit in root.inside
        for leaf in unit.walk()
        for item in leaf.work
        if item.op.flops
    )
    assert flops == per_token(TrainCase(model=model)).causal * model.seq_len
    numel = sum(
        unit.times * param.numel
        for unit in root.inside
        for leaf in unit.walk()
        for param in leaf.params
    )
    table = model.vocab_size * model.hidden_size
    assert numel - (table if model.tied_embeddings else 0) == model.num_params
