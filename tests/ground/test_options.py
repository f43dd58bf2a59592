"""Typed options: what is read, spelled and refused, and that spelling is read back."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.collectives.comm_options import CommOptions
from stepmark.comparison.check_options import CheckOptions
from stepmark.comparison.compare_options import CompareOptions
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import (
    REQUIRED,
    Duration,
    Size,
    argv,
    between,
    build,
    flag,
    options,
    words_of,
)
from stepmark.training.train_options import TrainOptions
from stepmark.workloads.workload_options import GenerateOptions


class Mode(StrEnum):
    QUEUED = "queued"
    GRAPH = "graph"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes."""

    begin: Size | None = flag("smallest size [1K]", "-b", "--begin")
    factor: float | None = flag("multiply the size by", "-f", "--factor")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits.

    Only the first line is the title.
    """

    budget: Duration | None = flag("time for all")
    launches: Annotated[int, between(1, 100)] = flag("times", default=1)
    share: Annotated[float, between(0.0, 1.0)] = flag("part", default=0.5)
    root: int = flag("root rank", "-r", "--root", default=0)


@dataclass(frozen=True, kw_only=True)
class Everything(Limits, Sizes):
    """Everything."""

    names: tuple[str, ...] = flag("names", default=(), argument=True)
    env: tuple[str, ...] = flag("NAME=A,B", default=())
    mode: Mode = flag("mode", default=Mode.QUEUED)
    order: Annotated[str, words_of("fixed", "random")] = flag("order", default="random")
    wide: bool = flag("all columns", "--wide", default=False)
    swiglu: bool | None = flag("gated", "--swiglu/--no-swiglu")
    out: Path = flag("folder", default=Path("runs"))


printable = st.characters(exclude_categories=("C", "Z")) | st.just(" ")
text = st.text(printable, min_size=1, max_size=8)
everything = st.builds(
    Everything,
    names=st.lists(text, max_size=3).map(tuple),
    env=st.lists(text, max_size=3).map(tuple),
    mode=st.sampled_from(Mode),
    order=st.sampled_from(["fixed", "random"]),
    wide=st.booleans(),
    swiglu=st.none() | st.booleans(),
    out=text.map(Path),
    begin=st.none() | st.integers(0, 2**50),
    factor=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    budget=st.none() | st.floats(1e-9, 7 * 86400),
    launches=st.integers(1, 100),
    share=st.floats(0, 1),
    root=st.integers(-(2**40), 2**40),
)


@given(everything)
def test_what_is_spelled_is_read_back(asked: Everything) -> None:
    from tests.parsing import parse

    assert parse(Everything, argv(asked)) == asked


def test_only_what_differs_from_the_default_is_spelled() -> None:
    assert argv(Everything()) == []
    asked = Everything(names=("all_reduce",), begin=1024, wide=True, swiglu=False, root=-1)
    assert argv(asked) == ["all_reduce", "--wide", "--no-swiglu", "--root=-1", "-b", "1K"]


def test_the_class_that_declares_an_option_is_its_group() -> None:
    groups = {one.name: one.group for one in options(Everything)}
    assert groups["begin"] == "Sizes"
    assert groups["budget"] == "Limits"
    assert groups["names"] == "Everything"


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"begin": "abc"}, "begin abc is invalid: it must be a size such as"),
        ({"factor": "x"}, "factor x is invalid: it must be a number."),
        ({"root": "1.5"}, "root 1.5 is invalid: it must be a whole number."),
        ({"launches": "0"}, "launches 0 is invalid: it must be from 1 to 100."),
        ({"share": "nan"}, "share nan is invalid: it must be from 0 to 1."),
        ({"mode": "fast"}, "mode fast is invalid: it must be one of queued, graph."),
        ({"order": "none"}, "order none is invalid: it must be one of fixed, random."),
    ],
)
def test_what_cannot_be_read_is_refused(given_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Everything, given_)
    assert message in str(caught.value)


def test_a_required_option_is_missing() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        """Needy."""

        query: str = flag("a query", default=REQUIRED, argument=True)

    with pytest.raises(ConfigError, match=r"^query is missing: give a query\.$"):
        build(Needy, {})


def test_a_flag_names_one_option_in_every_verb() -> None:
    """A long spelling is no alias elsewhere; verbs that share an option share a spelling."""
    classes = (TrainOptions, CommOptions, GenerateOptions, CheckOptions, CompareOptions)
    known = [one for cls in classes for one in options(cls) if not one.argument]
    for option in known:
        for other in known:
            same_name = option.name == other.name
            long = next(word for word in option.words if word.startswith("--"))
            assert same_name or long not in other.words, (option, other)
            assert not same_name or set(option.words) & set(other.words), (option, other)
