"""Options with lists: each combination has the options of its own command line."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.ground.option_grid import read_grid
from stepmark.ground.options import WholeNumbers, between, build, flag


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job."""

    tp: Annotated[int, between(1, 64)] | None = flag("degree", "--tp-num", "--tp")
    mbs: WholeNumbers | None = flag("sequences")
    device: str | None = flag("device")
    note: str | None = flag("text with commas")


NAMES = ("tp", "mbs", "device")
LISTS = {
    "tp": st.lists(st.integers(1, 64).map(str), min_size=1, max_size=4),
    "mbs": st.lists(st.integers(1, 9).map(str), min_size=1, max_size=4),
    "device": st.lists(st.sampled_from(["h200", "b200", "a"]), min_size=1, max_size=3),
}


@given(st.fixed_dictionaries({}, optional=LISTS))
def test_points_are_the_options_of_single_values(lists: dict[str, list[str]]) -> None:
    grid = read_grid(Job, {name: ",".join(words) for name, words in lists.items()}, NAMES)
    points = list(grid.points())
    distinct = {name: set(words) for name, words in lists.items()}
    assert len(grid) == len(points) == math.prod(map(len, distinct.values()))
    assert {axis.option.name for axis in grid.axes} == {
        n for n in distinct if len(distinct[n]) > 1
    }
    assert len({job for _, job in points}) == len(points)
    for place, job in points:
        single = {name: words[0] for name, words in lists.items()}
        single |= {name: str(value) for name, value in place.items()}
        assert job == build(Job, single)
        assert all(str(value) in distinct[name] for name, value in place.items())


def test_a_range_is_a_list() -> None:
    grid = read_grid(Job, {"mbs": "1-3,8"}, NAMES)
    assert [place for place, _ in grid.points()] == [{"mbs": n} for n in (1, 2, 3, 8)]
    assert [job.mbs for _, job in grid.points()] == [(1,), (2,), (3,), (8,)]


def test_an_axis_has_its_shortest_spelling() -> None:
    (axis,) = read_grid(Job, {"tp": "1,2"}, NAMES).axes
    assert axis.title == "tp"


def test_other_options_keep_their_commas() -> None:
    grid = read_grid(Job, {"note": "a,b"}, NAMES)
    assert (grid.options.note, grid.axes) == ("a,b", ())


@pytest.mark.parametrize("text", ["2,x", "2,", "2,65", ",2"])
def test_each_value_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match="tp "):
        read_grid(Job, {"tp": text}, NAMES)
