"""A framework's file that is written for a workload generates the same workload."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.workloads.flag_layouts import JOBS, VALUES

from stepmark.framework_files.architecture import widths_of
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build
from stepmark.step.workload import Workload
from stepmark.workloads import workload_flags
from stepmark.workloads.formats import FORMATS
from stepmark.workloads.rules import RULES
from stepmark.workloads.workload import generate

PROGRAM = ("groups", "blocks", "stages", "world_size", "num_microbatches", "tokens")
FRAMEWORKS = {"megatron": "megatron-args", "pytorch": "torchtitan", "deepspeed": "deepspeed"}
WIDTHS = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size")
WIDTHS += ("vocab_size", "num_experts", "top_k", "moe_ffn_hidden_size")
LAYOUTS = {
    "megatron": {
        "tp": (1, 2, 4),
        "pp": (1, 2, 4),
        "cp": (1, 2),
        "gbs": (16, 32, 64),
        "mbs": (1, 2),
        "world_size": (8, 16, 32),
    },
    "pytorch": {
        "tp": (1, 2, 4),
        "pp": (1, 2, 4),
        "cp": (1, 2),
        "gbs": (32, 64),
        "mbs": (1, 2),
        "world_size": (8, 16, 32),
        "model": ("llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-30b-a3b"),
        "precision": ("fp8", "mxfp8"),
    },
    "deepspeed": {
        "gbs": (32, 64),
        "mbs": (1, 2),
        "world_size": (2, 4, 16),
        "dtype": ("bf16", "fp16", "fp32"),
    },
}


def jobs(framework: str) -> list[dict[str, Any]]:
    """Return jobs to vary; torchtitan's file has a flavor of a model, not widths."""
    if framework != "pytorch":
        return JOBS[framework]
    unsized = ({k: v for k, v in job.items() if k not in WIDTHS} for job in JOBS[framework])
    return [{**job, "fuse_qkv": False} for job in unsized if job["model"] in BUILT_IN]


BUILT_IN = ("llama-3.1-8b", "qwen3-30b-a3b")


def workload(framework: str, values: dict[str, Any]) -> Workload:
    cls = workload_flags.options_class(framework, has_ignored=False)
    return generate(cls(framework=framework, **values))


def draw(framework: str, seed: int) -> Workload | None:
    """Return the workload of a layout that is drawn; None where no step can have it."""
    rng = random.Random(seed)
    values = dict(rng.choice(jobs(framework)))
    for name in rng.sample(sorted(LAYOUTS[framework]), rng.randint(0, 3)):
        values[name] = rng.choice(LAYOUTS[framework][name])
    fields = RULES[framework].fields()
    for name in rng.sample(sorted(fields), rng.randint(0, 4)):
        kind = workload_flags.kind_of(fields[name])
        if kind is bool:
            values[name] = rng.random() < 0.5
        elif isinstance(kind, type) and issubclass(kind, str) and hasattr(kind, "__members__"):
            values[name] = rng.choice([*kind])
        elif name in VALUES:
            values[name] = rng.choice(VALUES[name])
    try:
        return workload(framework, values)
    except ConfigError:
        return None


def of_model(framework: str, made: Workload) -> dict[str, Any]:
    """Return the options of a model that a file does not name."""
    if framework != "deepspeed":
        return {}
    cls = workload_flags.options_class(framework, has_ignored=False)
    assert made.model is not None
    texts = widths_of(made.model) | {"seq_len": str(made.model.seq_len)}
    options = build(cls, texts)
    return {name: getattr(options, name) for name in texts}


def written(made: Workload, framework: str, folder: Path) -> Path:
    form = FORMATS[FRAMEWORKS[framework]]
    path = folder / f"file{form.suffix}"
    path.write_text("".join(form.load().write(made)))
    return path


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_reading_what_was_written_generates_the_same_workload(
    framework: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = draw(framework, seed)
    if made is None:
        return
    folder = tmp_path_factory.mktemp("written")
    try:
        path = written(made, framework, folder)
    except ConfigError:  # a setting that the framework's file cannot have
        return
    lost = list(FORMATS[FRAMEWORKS[framework]].load().omissions(made, [0]))
    if any("fuse-qkv" in line for line in lost):
        return
    again = workload(framework, {"config": str(path)} | of_model(framework, made))
    for name in PROGRAM:
        assert getattr(again, name) == getattr(made, name), (name, path.read_text())


def test_a_layout_of_every_kind_is_written(tmp_path: Path) -> None:
    for framework in FRAMEWORKS:
        count = 0
        for values in jobs(framework):
            made = workload(framework, values)
            try:
                path = written(made, framework, tmp_path)
            except ConfigError:
                continue
            again = workload(framework, {"config": str(path)} | of_model(framework, made))
            count += 1
            assert [getattr(again, name) == getattr(made, name) for name in PROGRAM] == [
                True
            ] * len(PROGRAM), path.read_text()
        assert count > 0.5 * len(jobs(framework))


def test_multi_token_prediction_is_written(tmp_path: Path) -> None:
    for values in jobs("megatron")[:1]:
        made = workload("megatron", {**values, "num_mtp_layers": 1})
        path = written(made, "megatron", tmp_path)
        assert "--mtp-num-layers 1" in path.read_text()
        again = workload("megatron", {"config": str(path)})
        for name in PROGRAM:
            assert getattr(again, name) == getattr(made, name), name


def test_a_workload_of_another_framework_is_refused() -> None:
    made = workload("deepspeed", dict(JOBS["deepspeed"][0]))
    with pytest.raises(ConfigError, match="megatron"):
        list(FORMATS["megatron-args"].load().write(made))


def test_a_captured_workload_is_refused() -> None:
    made = workload("megatron", dict(JOBS["megatron"][0]))
    with pytest.raises(ConfigError, match="rules"):
        list(FORMATS["megatron-args"].load().write(dataclasses.replace(made, rules="capture")))
