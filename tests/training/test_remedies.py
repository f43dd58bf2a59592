"""Options with which a step fits: they do, and the step trains on the same tokens."""

import dataclasses
import shlex
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.parsing import parse

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, Recompute
from stepmark.ground.errors import ConfigError
from stepmark.step_memory import memory
from stepmark.training import remedies, train_plan
from stepmark.training.train_options import TrainOptions, given_options

GIB = 2**30


def planned(options: TrainOptions) -> TrainCase:
    return train_plan.only_case(options, "cuda", int(options.nproc or 1))


def with_words(options: TrainOptions, words: str) -> TrainOptions:
    """Return options with those of a command line in place of what was given."""
    return dataclasses.replace(
        options, **given_options(parse(TrainOptions, shlex.split(words)))
    )


def tokens(case: TrainCase) -> int:
    return case.tokens_per_step * case.grad_accum


def verdict(case: TrainCase, device_bytes: int) -> str:
    return memory.verdict(case, *memory.calibrated(case), device_bytes)


@st.composite
def commands(draw: st.DrawFn) -> str:
    """Command lines, few of which cannot run."""
    strategy = draw(st.sampled_from(["single", "ddp", "fsdp", "tp", "pp"]))
    names = ["llama-3.1-8b"] if strategy in ("tp", "pp") else ["gpt2-1.5b", "mixtral-8x7b"]
    precisions = ["amp", "bf16"] if strategy == "fsdp" else ["amp", "bf16", "master"]
    options: dict[str, Any] = {
        "num-layers": draw(st.sampled_from([4, 8])),
        "strategy": strategy,
        "nproc": 1 if strategy == "single" else draw(st.sampled_from([2, 4])),
        "mbs": draw(st.sampled_from([4, 8, 12, 16] if strategy == "pp" else [1, 2, 3, 6, 8])),
        "grad-accum": draw(st.sampled_from([1, 2, 3])),
        "precision": draw(st.sampled_from(precisions)),
        "ac": draw(st.sampled_from(["none", "selective", "full", "1/2"])),
    }
    if strategy == "fsdp":
        options["dp-replicate"] = draw(st.sampled_from([1, options["nproc"] // 2]))
    if strategy not in ("tp", "pp"):
        options["loss-chunks"] = draw(st.sampled_from([1, 4]))
    words = [f"--{name} {value}" for name, value in options.items()]
    words += draw(st.sampled_from([[], [], ["--fp8"]]))
    return " ".join([draw(st.sampled_from(names)), *words])


@settings(max_examples=60, deadline=None)
@given(commands(), st.floats(0.05, 0.95))
def test_what_is_named_fits_with_the_same_tokens(words: str, share: float) -> None:
    options = parse(TrainOptions, words.split())
    try:
        case = planned(options)
    except ConfigError:
        assume(False)
    device_bytes = int(share * memory.estimate(case).allocated_bytes)
    fitting = remedies.what_fits(case, device_bytes)
    if not fitting:
        return
    other = planned(with_words(options, f"{words.split(maxsplit=1)[0]} {fitting}"))
    assert verdict(other, device_bytes) == "fits", fitting
    assert tokens(other) == tokens(case), fitting
    assert other.model == case.model
    assert other.num_ranks >= case.num_ranks
    assert other.mbs <= case.mbs
    if "--strategy" not in fitting:
        assert other.parallel == case.parallel


# From the cheapest to the dearest, with the GiB of a device in which each is the first to fit.
LADDER = "llama-3.1-8b --num-layers 8 --strategy ddp --nproc 8 --mbs 4 --grad-accum 2"


def test_the_smallest_change_is_named() -> None:
    """With ever less memory: checkpointing, smaller micro-batches, shards, more GPUs."""
    case = planned(parse(TrainOptions, LADDER.split()))
    needed = memory.estimate(case).allocated_bytes
    named = [remedies.what_fits(case, int(needed * share / 100)) for share in range(95, 5, -5)]
    kinds = [kind(words) for words in named if words]
    assert kinds == sorted(kinds)
    assert set(kinds) == {0, 1, 2, 3}


def kind(words: str) -> int:
    if "--nproc" in words:
        return 2 if "--nproc 8" in words else 3
    return 1 if "--mbs" in words else 0


@pytest.mark.parametrize(
    ("words", "gib", "fitting"),
    [
        ("gpt2-1.5b --nproc 1 --mbs 16", 70, "--ac selective"),
        ("gpt2-1.5b --nproc 1 --mbs 16 --ac selective", 40, "--ac full"),
        ("gpt2-1.5b --nproc 1 --mbs 16 --ac full", 38, "--mbs 8 --grad-accum 2"),
        # Three sequences of a rank are not divided by two.
        ("gpt2-1.5b --nproc 1 --mbs 3 --ac full", 32, "--mbs 1 --grad-accum 3"),
        # One sequence is divided over tp alone.
        ("llama-3.1-8b --nproc 1", 80, "--strategy tp --nproc 4 --tp 4"),
        ("llama-3.1-8b --strategy fsdp --nproc 8 --mbs 1", 8, ""),
    ],
)
def test_examples(words: str, gib: int, fitting: str) -> None:
    case = planned(parse(TrainOptions, words.split()))
    assert remedies.what_fits(case, gib * GIB) == fitting


def test_a_refusal_names_what_fits() -> None:
    case = planned(parse(TrainOptions, ["gpt2-1.5b", "--nproc", "1", "--mbs", "16"]))
    with pytest.raises(ConfigError, match=r"; the step would fit with --ac full\.$"):
        remedies.check_memory(case, 67 * GIB)
    remedies.check_memory(case, 200 * GIB)
    on_cpu = dataclasses.replace(case, device="cpu")
    with pytest.raises(ConfigError, match="the step would fit with --scale tiny"):
        remedies.check_memory(on_cpu, GIB)


def test_measured_sizes_count_for_the_same_technique() -> None:
    """The estimate lacks 10 GiB of what was measured, so smaller micro-batches must be less."""
    words = "gpt2-1.5b --nproc 1 --mbs 16 --ac full"
    case = planned(parse(TrainOptions, words.split()))
    estimate = memory.estimate(case)
    sizes = estimate.allocated_bytes + 10 * GIB, estimate.reserved_bytes + 10 * GIB
    assert case.recompute is Recompute.FULL
    assert case.data_parallel is DataParallel.NONE
    assert remedies.what_fits(case, 38 * GIB) == "--mbs 8 --grad-accum 2"
    assert "--nproc 2" in remedies.what_fits(case, 38 * GIB, [(case, *sizes)])
