"""The tuner file: every size of every collective has exactly one measured line."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.sweep import TunerChoice, cut
from stepmark.comparison.tuner_text import (
    ALGORITHMS,
    ANY,
    COLLECTIVES,
    MOST_BYTES,
    NCCLS_OWN,
    PROTOCOLS,
    Rule,
    first_match,
    mismatches,
    rules,
    text_of,
)
from stepmark.ground.errors import ConfigError

from .tuner_file import parse

NODES, RANKS = 2, 16
HOWS = st.tuples(st.sampled_from(ALGORITHMS), st.sampled_from(PROTOCOLS), st.integers(1, 64))
SIZES = st.dictionaries(st.integers(0, 2**40), HOWS, min_size=1, max_size=12)


def choices(table: dict[str, dict[int, tuple[str, str, int]]]) -> list[TunerChoice]:
    return [
        TunerChoice(
            collective=name,
            size_bytes=size,
            algorithm=how[0],
            protocol=how[1],
            num_channels=how[2],
        )
        for name, held in table.items()
        for size, how in held.items()
    ]


TABLES = st.fixed_dictionaries(dict.fromkeys(COLLECTIVES, SIZES)).map(choices)


def made(known: list[TunerChoice]) -> list[Rule]:
    return rules(known, num_nodes=NODES, num_ranks=RANKS)


def decided(found: list[Rule], name: str, size: int, num_ranks: int = RANKS) -> Rule:
    rule = first_match(found, name, size, num_nodes=NODES, num_ranks=num_ranks)
    assert rule is not None
    return rule


def assert_covers(held: list[Rule]) -> None:
    """Every size once: no hole, no overlap, nothing upside down."""
    assert held[0].first_bytes == 0
    assert held[-1].last_bytes == MOST_BYTES
    assert all(rule.first_bytes <= rule.last_bytes for rule in held)
    assert all(after.first_bytes == before.last_bytes + 1 for before, after in pairwise(held))


@given(TABLES)
def test_every_size_of_every_collective_has_one_measured_line(known: list[TunerChoice]) -> None:
    for name in COLLECTIVES:
        of_name = [rule for rule in made(known) if rule.collective == name]
        assert_covers([rule for rule in of_name if rule.num_ranks == RANKS])
        assert_covers([rule for rule in of_name if rule.num_ranks == ANY])


@given(TABLES)
def test_a_measured_size_gets_what_was_measured(known: list[TunerChoice]) -> None:
    found = made(known)
    for one in known:
        rule = decided(found, one.collective, one.size_bytes)
        assert (rule.algorithm, rule.protocol, rule.num_channels) == one.how


@given(TABLES, st.integers(0, MOST_BYTES), st.sampled_from(list(COLLECTIVES)))
def test_channels_are_explicit_and_other_sizes_get_a_neighbours(
    known: list[TunerChoice], size: int, name: str
) -> None:
    rule = decided(made(known), name, size)
    assert rule.num_channels >= 1
    sizes = sorted(one.size_bytes for one in known if one.collective == name)
    around = {max((s for s in sizes if s <= size), default=sizes[0])}
    around |= {min((s for s in sizes if s >= size), default=sizes[-1])}
    hows = {one.how for one in known if one.collective == name and one.size_bytes in around}
    assert (rule.algorithm, rule.protocol, rule.num_channels) in hows


@given(TABLES, st.integers(0, MOST_BYTES), st.sampled_from(list(COLLECTIVES)))
def test_other_communicators_are_not_left_with_one_channel(
    known: list[TunerChoice], size: int, name: str
) -> None:
    rule = decided(made(known), name, size, num_ranks=RANKS + 1)
    assert rule.num_channels == NCCLS_OWN
    assert rule.algorithm == "ring"  # every collective, type and operation has it
    assert rule.protocol in ("ll", "simple")


@given(TABLES, st.lists(st.text(max_size=400), max_size=4))
def test_a_file_reads_back_as_its_rules(known: list[TunerChoice], facts: list[str]) -> None:
    found = made(known)
    text = text_of(found, facts)
    assert parse(text) == found
    # The plugin reads at most 255 characters of a line, and the rest as another line.
    assert all(len(line.encode()) < 512 and len(line) <= 96 for line in text.splitlines())


@given(TABLES)
def test_neighbours_that_say_the_same_are_one(known: list[TunerChoice]) -> None:
    for before, after in pairwise(made(known)):
        same_group = (before.collective, before.num_ranks) == (
            after.collective,
            after.num_ranks,
        )
        says = [(r.algorithm, r.protocol, r.num_channels) for r in (before, after)]
        assert not (same_group and says[0] == says[1])


@given(st.integers(0, 2**60), st.integers(1, 2**60))
def test_a_cut_lies_between(smaller: int, gap: int) -> None:
    assert smaller <= cut(smaller, smaller + gap) < smaller + gap


def test_the_cut_is_the_geometric_mean() -> None:
    table = {name: {8: ("ring", "simple", 4)} for name in COLLECTIVES}
    table["all_reduce"] = {2**10: ("tree", "ll", 2), 2**20: ("nvls", "simple", 16)}
    found = made(choices(table))
    lines = text_of(found, ["NCCL 2.28.9"]).splitlines()
    assert "# NCCL 2.28.9" in lines
    assert f"allreduce,0,32768,tree,ll,2,{NODES},{RANKS},-1,-1" in lines
    assert f"allreduce,32769,{MOST_BYTES},nvls,simple,16,{NODES},{RANKS},-1,-1" in lines
    # Behind all measured ones, for types that NVLS does not serve, and other communicators.
    assert lines[-2:] == [
        "allreduce,0,32768,ring,ll,0,-1,-1,-1,-1",
        f"allreduce,32769,{MOST_BYTES},ring,simple,0,-1,-1,-1,-1",
    ]


def test_a_collective_of_which_nothing_is_known_is_refused() -> None:
    table = {name: {8: ("ring", "simple", 4)} for name in COLLECTIVES if name != "reduce"}
    with pytest.raises(ConfigError, match="reduce"):
        made(choices(table))


@pytest.mark.parametrize(
    "how", [("nvlstree", "simple", 4), ("ring", "ll64", 4), ("ring", "simple", 0)]
)
def test_what_the_plugin_would_misread_is_refused(how: tuple[str, str, int]) -> None:
    table = {name: {8: ("ring", "simple", 4)} for name in COLLECTIVES} | {"reduce": {8: how}}
    with pytest.raises(ConfigError, match="emit-tuner"):
        made(choices(table))


def test_mismatches_name_size_and_both_ways() -> None:
    table = {name: {8: ("ring", "simple", 4), 2**20: ("tree", "ll", 8)} for name in COLLECTIVES}
    found = made(choices(table))
    assert mismatches(found, choices(table), num_nodes=NODES, num_ranks=RANKS) == []
    trap = choices({"all_reduce": {2**20: ("tree", "ll", 1)}})
    (said,) = mismatches(found, trap, num_nodes=NODES, num_ranks=RANKS)
    assert "all_reduce 1048576 bytes" in said
    assert "tree/ll with 8 channels" in said
    assert "tree/ll with 1 channels" in said
