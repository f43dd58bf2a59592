"""torchtitan's TOML, of the newer and the older layout."""

from pathlib import Path
from typing import Any

import pytest

from stepmark.framework_files import configuration
from stepmark.framework_files.table import Translation
from stepmark.ground.errors import ConfigError
from stepmark.step.workload import Workload
from stepmark.workloads import workload_flags
from stepmark.workloads.workload import generate

EXAMPLE = Path(__file__).parents[2] / "examples" / "configs" / "torchtitan-llama3-70b.toml"
NEW = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 1024
[parallelism]
tensor_parallel_degree = 2
[compile]
enable = true
components = ["model"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
OLD = """
[job]
description = "before 2025"
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
[training]
batch_size = 2
seq_len = 1024
tensor_parallel_degree = 2
data_parallel_degree = -1
compile = true
[experimental]
enable_async_tensor_parallel = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def read(text: str, folder: Path) -> Translation:
    path = folder / "job.toml"
    path.write_text(text)
    return configuration.read(str(path))


def job(**options: Any) -> Workload:
    cls = workload_flags.options_class("pytorch", has_ignored=False)
    return generate(cls(framework="pytorch", **options))


def test_the_example_is_the_job_that_its_keys_say() -> None:
    made = job(config=str(EXAMPLE), world_size=256)
    typed = job(
        model="llama-3.1-70b",
        world_size=256,
        tp=8,
        mbs=8,
        seq_len=8192,
        recompute="full",
        fuse_qkv=False,
    )
    assert (made.blocks, made.groups, made.tokens) == (typed.blocks, typed.groups, typed.tokens)


def test_the_older_layout_is_the_same_job(tmp_path: Path) -> None:
    old, new = read(OLD, tmp_path), read(NEW, tmp_path)
    assert old.options.pop("async_tp") == "False"
    assert old.options == new.options
    assert new.options["compile"] == "layers"
    assert new.options["recompute"] == "ops"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {"recompute": "blocks", "recompute_every": "2"}),
        ("[activation_checkpoint]\nmode = 'none'", {"recompute": "none"}),
        ("[compile]\nenable = true", {"compile": "block"}),
        ("[compile]\nenable = false\ncomponents = ['loss']", {"compile": None}),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_schedule = 'Interleaved1F1B'",
            {"mbs": "1", "pp_microbatches": "8", "pp_schedule": "interleaved"},
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_microbatch_size = 4",
            {"mbs": "4", "pp_microbatches": "2"},
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_layers_per_stage = 6\n"
            "pipeline_parallel_schedule = 'Interleaved1F1B'",
            {"pp_stages": "3"},  # 32 layers, embedding and head: 6 stages
        ),
        ("[parallelism]\npipeline_parallel_schedule = 'ZBVZeroBubble'", {"pp_schedule": None}),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_schedule = 'ZBVZeroBubble'",
            {"pp_schedule": "zbv"},
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_layers_per_stage = 6\n"
            "pipeline_parallel_schedule = 'InterleavedZeroBubble'",
            {"pp_schedule": "zb1p", "pp_stages": "3"},
        ),
        (
            "[parallelism]\nfsdp_reshard_after_forward = 'never'",
            {"reshard_after_forward": "no"},
        ),
        ("[training]\nmax_norm = 0", {"clip": "False"}),
        ("[parallelism]", {"pp": None}),
        (
            "[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_degree = 4",
            {"mbs": "2", "pp_microbatches": "4"},
        ),
        (
            "[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_microbatches = 8",
            {"mbs": "1", "pp_microbatches": "8"},
        ),
        (
            "[training]\ncompile = true\n[parallelism]\ntensor_parallel_degree = 2",
            {"compile": "block"},
        ),
        (
            "[training]\ncompile = true\nbatch_size = 4\n[parallelism]\n"
            "pipeline_parallel_degree = 2\npipeline_parallel_microbatches = 4",
            {"compile": "layers", "pp_microbatches": "4", "mbs": "1"},
        ),
        (
            "[training]\ncompile = true\nlocal_batch_size = 2",
            {"compile": "block"},
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1",
            {"bucket_cap_mb": "100"},
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 2",
            {"bucket_cap_mb": None},
        ),
    ],
)
def test_keys_are_options(text: str, options: dict[str, str | None], tmp_path: Path) -> None:
    head = "[model]\nname = 'llama3'\nflavor = '8B'\n[optimizer]\nname = 'AdamW'\n"
    file = read(head + text, tmp_path)
    values = file.defaults | file.options
    assert {name: values.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nname = 'flux'", "model.name flux is invalid"),
        ("[training]\nlocal_batchsize = 4", "did you mean training.local_batch_size"),
        ("[training]\nenable_cpu_offload = true", "enable_cpu_offload true is invalid"),
        (
            "[model]\nconverters = ['quantize.grouped_mm.float8']",
            "converters quantize.grouped_mm.float8 is invalid",
        ),
        (
            "[model]\nname = 'qwen3'\nflavor = '30B-A3B'\n"
            "converters = ['quantize.linear.float8']",
            "converters of a model with experts: 'float8' is invalid",
        ),
        (
            "[model]\nconverters = ['float8']\n"
            "[float8]\nfilter_fqns = ['auto_filter_small_kn']",
            "filter_fqns auto_filter_small_kn is invalid",
        ),
        ("[optimizer]\nname = 'Muon'", "optimizer.name Muon is invalid: it must be AdamW"),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_schedule = 'LoopedBFS'",
            "one of 1F1B, Interleaved1F1B, GPipe",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_layers_per_stage = 6\n"
            "pipeline_parallel_schedule = 'DualPipeV'",
            "one with 2 stages per rank for DualPipeV, not 1",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_microbatch_size = 3",
            "a divisor of local_batch_size (8)",
        ),
    ],
)
def test_what_is_refused_is_named(text: str, message: str, tmp_path: Path) -> None:
    head = "[job]\ndescription = 'a'\n[checkpoint]\nenable = false\n[metrics]\nlog_freq = 1\n"
    tables = "" if "[training]" in text else "[training]\nsteps = 1\n"
    with pytest.raises(ConfigError) as error:
        read(head + tables + text, tmp_path)
    assert message in str(error.value)


def test_every_key_without_effect_is_listed(tmp_path: Path) -> None:
    notes = " ".join(read(EXAMPLE.read_text(), tmp_path).notes)
    for key in ("job.dump_folder", "metrics.log_freq", "checkpoint.interval", "optimizer.lr"):
        assert key in notes


def test_a_flavor_that_is_no_model_of_ours_has_its_widths(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(NEW.replace("llama3", "qwen3").replace("8B", "0.6B"))
    model = job(config=str(path), world_size=8).model
    assert model is not None
    assert model.name == "qwen3-0.6b"
    # https://huggingface.co/Qwen/Qwen3-0.6B: 0.6 B parameters, 0.44 B without embedding
    assert round(model.num_params / 1e9, 1) == 0.6
    assert round((model.num_params - model.head_params) / 1e9, 2) == 0.44


FLOAT8 = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 2
[float8]
enable_fsdp_float8_all_gather = true
"""


def test_products_that_torchtitan_makes_narrow_are_noted(tmp_path: Path) -> None:
    assert any("output layer" in note for note in read(FLOAT8, tmp_path).notes)
    text = FLOAT8 + 'filter_fqns = ["output"]\n'
    assert not any("output layer" in note for note in read(text, tmp_path).notes)


def test_a_precision_replaces_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FLOAT8)
    made = job(config=str(path), world_size=8, precision="bf16")
    assert (
        made.blocks
        == job(
            model="llama-3.1-8b",
            world_size=8,
            mbs=2,
            seq_len=2048,
            recompute="blocks",
            recompute_every=2,
            fuse_qkv=False,
        ).blocks
    )


def test_other_stages_than_the_batch_is_divided_by_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(NEW)
    with pytest.raises(ConfigError, match="pp 2 is invalid: it must be 1, on which --mbs"):
        job(config=str(path), world_size=8, pp=2)
