"""Megatron-LM's arguments, typed beside options of ours."""

import pytest

from stepmark.cli.main import status
from stepmark.framework_files import megatron, typed_arguments
from stepmark.ground.errors import ConfigError

GENERATE = "workload generate --model llama-3.1-8b --num-layers 4 --world-size 4 --gbs 8"
PREDICT = "predict llama-3.1-8b --framework megatron --nproc 8 --device h100-sxm"


def output(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert status(words.split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("--bf16 --normalization LayerNorm", "--dtype bf16 --norm layernorm"),
        ("--kv-channels=64", "--head-dim 64"),
        ("--recompute-activations --tp 2", "--recompute-granularity selective --tp 2"),
        ("--num-virtual-stages-per-pipeline-rank 2 --pp 2", "--vpp 2 --pp 2"),
        ("--disable-bias-linear --qk-layernorm", "--no-linear-bias --qk-norm"),
    ],
)
def test_an_argument_is_the_option_that_it_means(
    arguments: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = output(f"{GENERATE} {arguments} -o -", capsys)
    assert typed == output(f"{GENERATE} {options} -o -", capsys)
    assert typed != output(f"{GENERATE} -o -", capsys) or "--bf16" in arguments


def test_predict_takes_them_with_lists(capsys: pytest.CaptureFixture[str]) -> None:
    typed = output(f"{PREDICT} --tp 2,4 --bf16 --kv-channels 64 --csv -", capsys)
    assert typed == output(f"{PREDICT} --tp 2,4 --head-dim 64 --csv -", capsys)
    assert typed != output(f"{PREDICT} --tp 2,4 --csv -", capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--log-interval 10",
            "--log-interval is invalid: it must be left out, as it has no effect",
        ),
        ("--moe-latent-size 64", "--moe-latent-size is invalid: it must be left out here"),
        (
            "--num-layers-per-virtual-pipeline-stage 2",
            "--virtual-pipeline-model-parallel-size N",
        ),
        ("--group-query-attention", "--num-query-groups N is enough"),
        ("--multi-latent-attention", "in a file with the model's other arguments (--config)"),
        ("--cuda-graph-impl local", "--cuda-graph-impl is invalid: it must be left out"),
        ("--bf16 --fp16", "--fp16 is invalid: it must be left out with --bf16"),
        ("--bf16 --dtype bf16", "--bf16 is invalid: it must be left out with --dtype"),
        ("--normalization BatchNorm", "one of LayerNorm, RMSNorm"),
        ("--kv-channels", "--kv-channels is invalid"),
    ],
)
@pytest.mark.parametrize("command", [f"{GENERATE} -o -", PREDICT])
def test_what_is_no_option_is_refused_by_name(
    command: str, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([*command.split(), *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("framework", ["pytorch", "deepspeed"])
def test_other_frameworks_refuse_them(
    framework: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{GENERATE} --framework {framework} --bf16 -o -"
    assert status(words.split()) == 2
    assert "only with --framework megatron" in capsys.readouterr().err


def test_each_argument_is_an_option_or_is_refused_by_its_name() -> None:
    num_options = 0
    for argument, entry in megatron.TABLE.entries.items():
        if not entry.option:
            with pytest.raises(ConfigError, match=f"^--{argument} is invalid"):
                typed_arguments.typed_option(argument, "true")
            continue
        num_options += 1
        value = next(iter(entry.values), "2")
        expected = entry.option, entry.values.get(value, value)
        if argument == "moe-layer-freq":
            value, expected = "[0]*2+[1]*6", (entry.option, "2")
        assert typed_arguments.typed_option(argument, value) == expected
    assert num_options > 70
