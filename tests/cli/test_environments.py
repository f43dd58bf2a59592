"""Full disks, closed streams, limits, odd names, no network: it works or says why not."""

import pytest

from .environments import Environment, carry_out, environments, open_folder

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=one.name, marks=[] if one.is_quick else [pytest.mark.slow])
        for one in environments()
    ],
)
def test_a_command_works_or_says_why_not(one: Environment) -> None:
    if reason := one.why_not():
        pytest.skip(reason)
    with open_folder() as cwd:
        end = carry_out(one, cwd)
    assert end.problems == [], end.text


def test_there_are_environments_of_every_kind() -> None:
    assert len(environments()) >= 60
    assert len({one.name for one in environments()}) == len(environments())
    assert sum(one.is_quick for one in environments()) >= 8
