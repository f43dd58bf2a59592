"""The tables of kinds and verbs hold every kind, wherever of the package one begins."""

import dataclasses
import subprocess
import sys
from typing import get_args

import pytest

from stepmark.cases.kind import KINDS, PLAN_VERBS
from stepmark.cases.plan import How
from stepmark.cases.record import AnyCase
from stepmark.ground.options import load


def test_every_kind_of_case_is_in_the_table() -> None:
    assert set(KINDS) == {case.kind for case in get_args(AnyCase)}
    assert set(KINDS) == {field.name for field in dataclasses.fields(How)}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_columns_of_their_kind(kind: str) -> None:
    names = [column.name for column in load(KINDS[kind].columns)]
    assert {"case_id", "status", "command"} <= set(names)
    assert len(names) == len(set(names))


def test_only_a_run_commits_predictions() -> None:
    assert [name for name, verb in PLAN_VERBS.items() if verb.commit] == ["run"]


@pytest.mark.parametrize("module", ["cases.kind", "measuring.rank", "store.codec"])
def test_the_tables_are_full_before_any_other_module(module: str) -> None:
    code = f"import stepmark.{module}; from stepmark.cases.kind import KINDS; print(*KINDS)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == list(KINDS)
