"""Keyword arguments are the options of the command line."""

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stepmark as sm
from stepmark.api import keywords
from stepmark.collectives.comm_options import CommOptions
from stepmark.comparison.compare_options import CompareOptions
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import options as declared
from stepmark.operators.op_options import options_class

VERBS = [("op", "gemm"), ("op", "all"), ("op", ""), ("comm", ""), ("train", "")]
VERBS += [("replay", ""), ("predict", ""), ("compare", ""), ("trace", ""), ("workload", "ddp")]
VERBS += [("plan", ""), ("predict", "megatron"), ("run", ""), ("sweep", ""), ("logs", "")]


def test_values_may_be_python_s_own_or_the_command_line_s_text() -> None:
    own = keywords.read(
        CommOptions,
        ["all_reduce", "all_gather"],
        {"begin": 1024, "end": "1M", "dtype": [DType.BF16, "fp32"], "budget": 2.5, "root": None}
        | {"max_ctas": range(1, 3), "bidirectional": True},
    )
    text = keywords.read(
        CommOptions,
        [],
        {"begin": "1K", "end": "1048576", "dtype": "bf16,fp32", "budget": "2500ms"}
        | {"max_ctas": "1,2", "bidirectional": True},
    )
    assert own.names == ("all_reduce", "all_gather")
    names = [option.name for option in declared(CommOptions) if not option.argument]
    assert [getattr(own, name) for name in names] == [getattr(text, name) for name in names]


def test_every_spelling_is_a_keyword() -> None:
    for name in ("mbs", "micro_batch_size", "batch_size"):
        assert (
            sm.workload("gpt2-124m", framework="ddp", **{name: 3}).program.settings["mbs"] == 3
        )


def test_flags_that_are_words_of_python_end_in_an_underscore() -> None:
    shapes = {"m": 8, "n": 8, "k": 8}
    read = keywords.read(options_class("gemm"), ["gemm"], {"pass_": "wgrad", **shapes})
    assert read.field("phase") == "wgrad"
    read = keywords.read(options_class("gemm"), ["gemm"], {"as_": "fsdp", "model": "gpt2"})
    assert read.field("run_as") == "fsdp"


def test_launches_of_a_side_have_commas_between_them() -> None:
    read = keywords.read(CompareOptions, [["a", Path("b/c")], "d"], {})
    assert read.sources == ("a,b/c", "d")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgt": 1}, r"budgt 1 is invalid: it is no keyword here; did you mean budget\?"),
        ({"qqq": 1}, r"qqq 1 is invalid: .*; options\(VERB\) lists those"),
        ({"csv": "x"}, "csv x is invalid: it is for the command line"),
        ({"dry_run": True}, "it is for the command line: stepmark VERB --dry-run lists"),
        ({"family": "bmm"}, "family bmm is invalid: it is no keyword"),
        ({"find_max": 1}, "find-max 1 is invalid: it must be True or False"),
        ({"m": True}, "m is invalid: it must be a value"),
        ({"device": {"a": 1}}, "device .* it must be text, a number or a path.*not dict"),
        ({"m": [object()]}, "m .* not object"),
        ({"seq_len": 3, "seq_length": 3}, "seq_length 3 is invalid"),
        ({"launches": 0}, "launches 0 is invalid: it must be from 1 to 100"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keywords.read(options_class("gemm"), ["gemm"], options)


@pytest.mark.parametrize("name", ["out", "format", "rank", "json"])
def test_what_only_write_does_is_no_keyword_of_workload(name: str) -> None:
    given: dict[str, object] = {name: 0}
    with pytest.raises(ConfigError, match=f"^{name} 0 is invalid"):
        sm.workload("gpt2-124m", **given)
    assert name not in [row["keyword"] for row in sm.options("workload")]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("only with --dp-replicate", "it works only with dp_replicate."),
        ("it needs --pass wgrad", "it needs pass_ wgrad."),
        ("measure it by `stepmark op gemm --m 8`", "measure it by `stepmark op gemm --m 8`."),
        ("it is for stepmark VERB --dry-run; use --nproc", "VERB --dry-run; use nproc."),
    ],
)
def test_rules_name_keywords_but_leave_commands_as_they_are(rule: str, words: str) -> None:
    @keywords.spells_keywords
    def refuse() -> None:
        raise ConfigError("--world-size", 7, rule)

    with pytest.raises(ConfigError, match=r"^world_size 7 is invalid") as raised:
        refuse()
    assert str(raised.value).endswith(words)


def test_two_spellings_of_one_option_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="batch_size 3 is invalid: it is given twice: it is mbs"
    ):
        sm.workload("gpt2-124m", mbs=2, batch_size=3)


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'gemm bmm' is invalid: .*at most 1"):
        sm.measure("op", "gemm", "bmm", m=1, n=1, k=1)


def test_messages_name_the_keyword_also_where_a_verb_refuses_a_value() -> None:
    with pytest.raises(ConfigError, match=r"^world_size 7 is invalid: .*multiple of tp 2"):
        sm.workload("gpt2-124m", framework="fsdp", world_size=7, tp=2)
    with pytest.raises(ConfigError, match=r"works only with framework megatron\.$"):
        sm.workload("gpt2-124m", framework="fsdp", use_distributed_optimizer=True)
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b"):
        sm.Model("llama-3.1-9b")


@pytest.mark.parametrize(("verb", "which"), VERBS)
def test_options_lists_every_keyword(verb: str, which: str) -> None:
    rows = sm.options(verb, which).rows()
    assert len(rows) > 3
    for row in rows:
        assert row["keyword"]
        assert row["help"]


def test_what_options_lists_is_accepted() -> None:
    """Each default, given as a keyword, changes nothing."""
    plain = keywords.read(CommOptions, ["all_reduce"], {})
    given = {str(row["keyword"]): row["default"] for row in sm.options("comm")}
    assert keywords.read(CommOptions, ["all_reduce"], given) == plain


def test_unknown_verbs_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="one of op, comm, train, replay, predict"):
        sm.options("gem")
    with pytest.raises(ConfigError, match="did you mean gemm"):
        sm.options("op", "gem")


def test_help_and_completion_have_the_options_of_a_verb() -> None:
    for function, verb in ((sm.predict, "predict"), (sm.plan, "plan")):
        names = inspect.signature(function).parameters
        assert {row["keyword"] for row in sm.options(verb)} <= names.keys()
        assert next(reversed(names)) == "options"


def test_arrays_are_lists_of_values() -> None:
    job = {"device": "h200", "strategy": "fsdp"}
    rows = sm.predict("gpt2-1.5b", nproc=np.array([2, 4]), **job)
    assert rows.rows() == sm.predict("gpt2-1.5b", nproc=[2, 4], **job).rows()
    assert sm.predict("gpt2-1.5b", nproc=np.int64(2), **job).step_s > 0


def test_a_number_of_gpus_hints_at_the_keyword_of_the_verb() -> None:
    with pytest.raises(ConfigError, match="did you mean nproc"):
        sm.predict("gpt2-1.5b", gpus=8, device="h200")
    with pytest.raises(ConfigError, match="did you mean gpus"):
        sm.plan("gpt2-1.5b", world_size=8, gbs=64, device="h200")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sm.Model(3), "model 3 is invalid"),
        (sm.Model, r"Model is invalid: it has the arguments name \(missing"),
        (lambda: sm.read_run(3), "run 3 is invalid: .*; in the folder runs: none"),
        (lambda: sm.read_workload(3), "workload 3 is invalid: it must be a file"),
        (lambda: sm.sweep(3), "3 is invalid"),
        (lambda: sm.read_run("a", run="b"), "read_run is invalid: .* run, runs .multiple val"),
        (sm.plan, r"plan is invalid: it has the arguments model \(missing"),
        (lambda: sm.read_trace("a", rank=0), r"did you mean ranks\?"),
        (lambda: sm.plan("gpt2", nproc=8), r"did you mean gpus\?"),
        (lambda: predict(fp8=True), r'did you mean precision="fp8"\?'),
        (lambda: predict(stages=True), r"show\(stages=True\)"),
        (lambda: predict(notes=True), r"show\(notes=True\)"),
        (
            lambda: predict(what_if=["link=2x", "link=4x"]),
            "link, predict the step once for each",
        ),
        (lambda: predict(sequence_parallel=[True, False]), "call the function once for each"),
        (lambda: predict(nproc=3, tp=2), "nproc 3 is invalid: it must be a multiple"),
        (lambda: predict(gbs=1), "gbs 1 is invalid: it must be a multiple"),
        (lambda: predict(device=["h100", "h100-sxm"]), "it is the same as h100"),
        (lambda: predict(device="h1000"), "b200, .* h100, h800, h200, a100"),
        (lambda: predict(network=["dgx-h100", "hgx-h100"]), "it is the same as dgx-h100"),
    ],
)
def test_messages_say_what_to_do_instead(call: Callable[[], object], message: str) -> None:
    with pytest.raises(sm.ConfigError, match=message):
        call()


def predict(**options: object) -> object:
    job = {"framework": "megatron", "nproc": 8, "device": "h200", **options}
    return sm.predict("gpt2-125m", **job)
