"""A case of communication: its identity, its buffers, the command that makes it again."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.parsing import parse

from stepmark.cases.case import Label
from stepmark.cases.comm_case import CommCase
from stepmark.collectives import comm_plan
from stepmark.collectives.comm_options import CommOptions
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import (
    FACTS,
    Api,
    Collective,
    Mode,
    RedOp,
    Registration,
    busbw_factor,
)
from stepmark.store.commands import command_of

from .comm_samples import MATRIX, PLAIN, SAMPLES

GOLDEN = {
    "all_reduce": "f37dd494e35c0829",
    "nccl": "6392f148e309b85c",
    "out_of_place": "398ece1daac8bc89",
    "mean": "fd8aba6ff719b2c4",
    "reduce": "486d887e0a4423cd",
    "broadcast": "9936c83d3507e0e0",
    "gather": "78bb0549108d1de9",
    "incast": "276794a092715640",
    "all_to_all": "426f924d02f8d93b",
    "spread": "be166ffba2754741",
    "full_spread": "8561f51cf6f6d2dc",
    "even": "6545dff7a0d262b4",
    "matrix": "7dbb940ff7af417f",
    "p2p": "edd33e7c6346710a",
    "p2p_both": "d390639a73f91931",
    "ping_pong": "d370e627fdebbac5",
    "barrier": "1dd9eca3d643e186",
    "graph": "ec46bae2b73ad8f0",
    "free": "c2a0a960241311d3",
    "first_ranks": "de09f46049cf589f",
    "split": "d97e3372675b76a8",
    "grouped": "b7b877d1bc18350c",
    "skew": "1be34c5b1d42b367",
    "odd_skew": "692d5d86715b9805",
    "ctas": "cefefc7034975c89",
    "beside": "ef8289887463077c",
    "cpu": "9a9b0e67b3307cd3",
    "gloo_on_cuda": "670d3f7c21799e13",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_case_id_is_stable(name: str) -> None:
    """Stored runs are joined by it: a change needs a new schema, not a new golden."""
    assert SAMPLES[name].case_id[:16] == GOLDEN[name]


CHANGES: dict[str, Any] = {
    "collective": Collective.REDUCE_SCATTER,
    "count": 7,
    "dtype": DType.BF16,
    "num_ranks": 4,
    "world_size": 16,
    "redop": RedOp.MAX,
    "root": 3,
    "in_place": False,
    "mode": Mode.BLOCKING,
    "aligned": False,
    "api": Api.NCCL,
    "backend": "gloo",
    "device": "cpu",
    "calls_per_group": 2,
    "split": "mod 2",
    "pair": (0, 1),
    "spread": 0.5,
    "matrix": MATRIX,
    "skew_s": 1e-6,
    "max_ctas": 8,
    "beside": "copy",
    "registration": Registration.SYMMETRIC,
    "unalign": 1,
    "cta_policy": 1,
}


def test_every_field_but_labels_and_a_files_name_is_identity() -> None:
    fields = {field.name for field in dataclasses.fields(CommCase)}
    assert fields == CHANGES.keys() | {"matrix_file", "labels"}
    changed = [dataclasses.replace(PLAIN, **{name: to}) for name, to in CHANGES.items()]
    assert len({case.case_id for case in [PLAIN, *changed]}) == len(CHANGES) + 1
    assert dataclasses.replace(PLAIN, matrix_file="x").case_id == PLAIN.case_id
    assert dataclasses.replace(PLAIN, labels=(Label(role="x"),)).case_id == PLAIN.case_id


# The command


def planned(case: CommCase) -> list[CommCase]:
    program, verb, *words = shlex.split(command_of(case))
    assert (program, verb) == ("stepmark", "comm")
    options = parse(CommOptions, words)
    return comm_plan.plan(options, str(options.device), int(options.nproc or 0))[0]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_command_makes_the_case_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [" ".join(str(2 * count) for count in row) for row in MATRIX]  # bytes of bf16
    (tmp_path / "parts.txt").write_text("\n".join(rows))
    case = SAMPLES[name]
    found = planned(case)
    assert case in found
    # Beside compute the collective is measured alone as well, for the comparison.
    assert {dataclasses.replace(one, beside=case.beside) for one in found} == {case}


@given(skew_s=st.floats(1e-9, 1.0))
def test_any_skew_keeps_its_identity(skew_s: float) -> None:
    case = dataclasses.replace(PLAIN, skew_s=skew_s)
    assert planned(case)[0].case_id == case.case_id


# Buffers


@pytest.mark.parametrize("name", SAMPLES)
def test_message_bytes_is_the_largest_buffer_of_any_rank(name: str) -> None:
    case = SAMPLES[name]
    buffers = [
        count
        for index in range(case.num_ranks)
        for count in (case.send_count(index), case.recv_count(index))
    ]
    assert case.message_bytes == max(buffers) * case.dtype.itemsize
    assert case.busbw_factor == busbw_factor(case.collective, case.num_ranks)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_moved_arrives(name: str) -> None:
    """Where nothing is reduced or copied to many, as much is received as is sent."""
    case = SAMPLES[name]
    copies = (Collective.ALL_GATHER, Collective.BARRIER)
    if FACTS[case.collective].reduces or case.collective in copies:
        return
    ranks = range(case.num_ranks)
    sent, received = (sum(map(each, ranks)) for each in (case.send_count, case.recv_count))
    assert sent == received


# Who takes part


def test_members_and_communicators() -> None:
    pair, split, first = (SAMPLES[name] for name in ("p2p", "split", "first_ranks"))
    assert pair.members == (3, 1)
    assert pair.communicators == [(3, 1)]
    assert split.members == tuple(range(8))
    assert split.communicators == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert first.members == (0, 1, 2, 3)
    assert first.communicators == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"redop": RedOp.NONE}, "redop"),
        ({"collective": Collective.ALL_GATHER}, "redop"),
        ({"collective": Collective.REDUCE}, "root"),
        ({"collective": Collective.REDUCE, "root": 8}, "root"),
        ({"collective": Collective.P2P, "redop": RedOp.NONE}, "pair"),
        ({"collective": Collective.P2P, "redop": RedOp.NONE, "pair": (1, 1)}, "pair"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(PLAIN, **changes)
    assert caught.value.field == field
